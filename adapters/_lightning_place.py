"""Where the loops of a fit are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from resumekit.adapters._lightning_changing import forget_groups
from resumekit.adapters._lightning_elsewhere import counted
from resumekit.adapters._lightning_logged import Results, as_plain
from resumekit.adapters._lightning_settings import fidelity_of
from resumekit.capture import RngState, UserState, generator_state, set_generator_state
from resumekit.data import stateful_generators
from resumekit.run import DrivenLoop
from resumekit.state import CaptureLine, Fidelity, SharingPattern, StateComponent

_KEY = "callbacks/lightning"


class Place:
    """Where Lightning's loops are, what they decide by, and the sums of the epoch under way.

    Lightning's own way back leaves out what was due at the last batch. So the loops go into the
    interrupted epoch as into any other, and are put where they were when they ask for a batch.
    lightning 2.6 loops/fit_loop.py ``reset``, loops/training_epoch_loop.py ``reset``, ``advance``.
    """

    def __init__(self, trainer: Any, ask: Callable[[], DrivenLoop]) -> None:
        self._trainer = trainer
        self._ask = ask  # where the run is; known when it has found its checkpoint
        self._again: Mapping[str, Any] | None = None  # until the first batch of this launch
        self._keeps_workers = False  # of a loader for validation
        self._validated: Sequence[Mapping[str, Any]] = ()  # until the loaders for it are there
        # Of the last request for training loaders, where there will be others.
        self._requested: dict[str, Any] | None = None
        # Of the last request for loaders for validation, and whether it is to be repeated.
        self._validation_requested: dict[str, Any] | None = None
        self._repeats_validation_request = False
        self._validated_in: float | None = None
        self._lost_averages: tuple[str, ...] = ()
        # Restored when the hooks before the first batch have run.
        self.user_state: UserState | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loop = trainer.fit_loop  # its own state_dict asks the loaders, and some draw numbers then
        return {
            "loops": {
                **loop.epoch_loop.state_dict(prefix="epoch_loop."),
                "epoch_progress": loop.epoch_progress.state_dict(),
                "state_dict": {},
            },
            "logged": as_plain(loop.epoch_loop._results),
            "is_first_batch": trainer._logger_connector._first_loop_iter,
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "logged_metrics": dict(trainer._logger_connector._logged_metrics),
            "progress_bar_metrics": dict(trainer._logger_connector._progress_bar_metrics),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
            "requested": self._requested,
            "validation_requested": self._validation_requested,
            "validated_in": loop.epoch_loop.val_loop._last_val_dl_reload_epoch
            if trainer.reload_dataloaders_every_n_epochs
            else None,
            "keeps_workers": self._keeps_workers
            or any(getattr(each, "_iterator", None) for each in self._validation()),
            "validation": self._validated or [_states(each) for each in self._validation()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Puts all but what the first batch decides in its place.

        Returns:
            What did not come back exactly: nothing.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.load_state_dict(dict(state["loops"]))
        loop.epoch_loop.restarting = False
        logged = trainer._logger_connector
        for live, name in (
            (logged._callback_metrics, "metrics"),
            (logged._logged_metrics, "logged_metrics"),
            (logged._progress_bar_metrics, "progress_bar_metrics"),
        ):
            live.clear()  # of what a tuner has logged
            live.update(state.get(name, {}))  # an older checkpoint has not all
        trainer.should_stop = state["should_stop"]
        forget_groups(trainer)
        self._keeps_workers = state["keeps_workers"]
        self._requested = state["requested"]
        self._validation_requested = state.get("validation_requested")  # an older one has none
        if self._again is None:  # not the second time, when Lightning has asked already
            self._repeats_validation_request = self._validation_requested is not None
        self._validated_in = state["validated_in"]
        self._validated = state.get("validation", [])  # an older checkpoint has none
        trainer.num_sanity_val_steps = 0
        epoch = loop.epoch_progress.current
        self._again = state if epoch.processed < epoch.started else None
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """Goes on where a run under another framework was left."""
        loop, trainer, state = self._ask(), self._trainer, self.state_dict()
        place = loop.progress
        is_automatic = trainer.lightning_module.automatic_optimization
        each_step = 1 if is_automatic else len(trainer.optimizers)
        begun = place.epoch + (loop.finished is None)
        state["loops"] = counted(state["loops"], place, begun=begun, optimizers=each_step)
        state["is_first_batch"] = place.batch == 1 if place.batch else None
        self.load_state_dict(state)
        where = f"batch {place.batch} of epoch {place.epoch}"
        return (f"Lightning's loops go on at {where}; averages over this epoch begin there",)

    @property
    def was_requested(self) -> bool:
        """Whether the loaders of the interrupted epoch were to be others than the first ones."""
        return self._again is not None and self._requested is not None

    @property
    def epoch_of_request(self) -> int:
        """The epoch for which there are new training loaders, or 0."""
        return 0 if self._requested is None else int(self._requested["epoch"])

    def request(self, ask: Callable[[], Any]) -> Any:
        """The training loaders, as they were asked for in the interrupted run."""
        progress, rng = self._trainer.fit_loop.epoch_progress.current, RngState()
        if not self._trainer.reload_dataloaders_every_n_epochs:
            return ask()
        if not self.was_requested:
            self._requested = {"epoch": progress.completed, "rng": rng.state_dict()}
            return ask()
        return self._ask_again(self._requested, ask)

    def request_validation(self, ask: Callable[[], Any]) -> Any:
        """The loaders for validation; a resume asks as the interrupted run did."""
        progress, rng = self._trainer.fit_loop.epoch_progress.current, RngState()
        now = rng.state_dict()
        if not self._repeats_validation_request:
            self._validation_requested = {"epoch": progress.completed, "rng": now}
            return ask()
        self._repeats_validation_request = False
        given = self._ask_again(self._validation_requested, ask)
        rng.load_state_dict(now)
        return given

    def _ask_again(self, requested: Any, ask: Callable[[], Any]) -> Any:
        """Calls a hook under the RNG state and in the epoch of a former request."""
        progress = self._trainer.fit_loop.epoch_progress.current
        RngState().load_state_dict(requested["rng"])
        now, progress.completed = progress.completed, requested["epoch"]
        given = ask()
        progress.completed = now
        return given

    def component(self) -> StateComponent:
        """All of it."""
        return StateComponent(_KEY, self, SharingPattern.PER_RANK, framework="Lightning")

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """Whether the work of persistent workers is restored; some loaders are known later."""
        return fidelity_of(self._trainer)

    def end_epoch(self) -> None:
        """All batches of an epoch have logged."""
        results = self._trainer.fit_loop.epoch_loop._results
        if isinstance(results, Results):
            self._lost_averages += results.take_not_logged_again()

    def findings(self) -> Iterator[CaptureLine]:
        """Averages that an epoch lacks after a resume."""
        for name in self._lost_averages:
            yield CaptureLine(
                f"{_KEY}/{name}",
                Fidelity.LOST,
                "an average with a sync_dist_group, of an epoch that was interrupted and did not "
                "log it again; log it in every batch",
            )

    def restore_user_state(self) -> None:
        """Sets the attributes that hooks such as ``on_train_start`` make or clear, once."""
        if self.user_state is not None:
            self.user_state.restore_now()

    def arrive(self) -> None:
        """Lightning asks for the first batch of an epoch."""
        self.restore_user_state()
        if self._again is not None:
            self._go_on(self._again)
        self._put_back_validation()

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Puts the loops into the interrupted epoch."""
        loop = self._trainer.fit_loop
        self.load_state_dict(state)
        self._again = None
        loop._restarting = False  # or plateau schedulers would miss this epoch
        if self._requested is not None:
            loop._last_train_dl_reload_epoch = self._requested["epoch"]
        loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
        self._trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        loop.epoch_loop._results = Results(state["logged"], self._trainer)
        self._trainer._logger_connector._first_loop_iter = state["is_first_batch"]
        if self._keeps_workers:  # they draw a seed when they start, and that was before
            loop.epoch_loop.val_loop.setup_data()
            for each in self._validation():
                iter(each)

    def _put_back_validation(self) -> None:
        """The order of the next validation is that of the interrupted run."""
        saved, self._validated = self._validated, ()
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        repeats = self._repeats_validation_request and val_loop._data_source.is_defined()
        if any(saved) or repeats:
            val_loop.setup_data()
        validated_in, self._validated_in = self._validated_in, None
        if validated_in is not None:
            val_loop._last_val_dl_reload_epoch = validated_in
        for each, states in zip(self._validation(), saved, strict=False):
            for name, generator in stateful_generators(each).items():
                if name in states:
                    set_generator_state(generator, states[name])

    def _validation(self) -> list[Any]:
        loader = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if loader is None else list(loader.flattened)


def _states(loader: Any) -> dict[str, Any]:
    """Of the generators of a loader for validation: they decide the next order."""
    found = stateful_generators(loader).items()
    return {name: generator_state(each) for name, each in found}
