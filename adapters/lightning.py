"""Lightning: one callback, and the identical ``trainer.fit`` starts, resumes, or is done.

Example:
    saving = ResumeCallback("runs/a", save_every=500)
    L.Trainer(max_epochs=3, callbacks=[saving]).fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer, Progress
from resumekit.adapters._lightning_changing import prepare, prepare_epoch
from resumekit.adapters._lightning_loader import LoaderInStep
from resumekit.adapters._lightning_package import Callback
from resumekit.adapters._lightning_place import Place
from resumekit.adapters._lightning_settings import check, check_path, limits_of, refuse
from resumekit.adapters._lightning_state import fit_components
from resumekit.run import DrivenLoop, Options, checked_extras, checked_names, run_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run import OptionKeywords

__all__ = ["ResumeCallback"]


class ResumeCallback(Callback):
    """Saves the whole state of a fit; ``fit`` continues it in the same directory.

    Args:
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.run.options.Options``.

    Raises:
        ConfigurationError: an option is wrong; when ``fit`` begins, a setting of the Trainer.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        self._reports = Options.from_keywords(options).best_metric is not None
        own: dict[str, Any] = {
            "extras": checked_extras(extras),
            "generators": checked_names("generators", generators),
            **options,
        }
        self._make_checkpointer = partial(Checkpointer, run_directory(directory), **own)
        self._ema = ema
        self._checkpointer: Checkpointer | None = None  # while a fit is under way
        self._loop: DrivenLoop | None = None

    def save(self) -> None:
        """Makes a save due before the next batch; outside a fit nothing. Collective."""
        if self._checkpointer is not None:
            self._checkpointer.save()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes the last place among the callbacks, and one between Lightning and the loader."""
        if stage == "fit" and not trainer.fast_dev_run:
            check(trainer, pl_module)
            alike = sum(isinstance(each, ResumeCallback) for each in trainer.callbacks)
            refuse(f"{alike} of them in one Trainer", alike > 1, "expected one")
            # What the others make in on_fit_start is to be restored.
            trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
            # lightning 2.6 loops/fit_loop.py setup_data takes the loader from here.
            source = trainer.fit_loop._data_source
            source.dataloader = partial(self._request, trainer, source)
            # lightning 2.6 loops/fit_loop.py on_run_end calls it after the module's on_train_end.
            trainer.strategy.on_train_end = partial(self._finish, trainer)

    def _request(self, trainer: Any, source: Any) -> LoaderInStep:
        """Asks for the training loaders, for all epochs or for some."""
        ask = partial(type(source).dataloader, source)
        given = ask() if self._loop is None else self._place.request(ask)
        # lightning 2.6 loops/fit_loop.py setup_data makes them, and for any epoch but the first one
        # loops/training_epoch_loop.py on_run_start once more.
        draws_twice = self._loop is not None and self._place.epoch_of_request > 0
        return LoaderInStep(given, _Driver(self, trainer), draws_twice=draws_twice)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Every object exists."""
        if not trainer.fast_dev_run:
            check_path(trainer.ckpt_path)
            self._place = Place(trainer, self._under_way)
            components = fit_components(trainer, self._place, self._ema)
            self._checkpointer = self._make_checkpointer(components=components)
            self._checkpointer._run.account.add_finding(self._place.findings)
            # lightning 2.6 loops/evaluation_loop.py setup_data takes the loader from here.
            source = trainer.fit_loop.epoch_loop.val_loop._data_source
            ask = partial(type(source).dataloader, source)
            source.dataloader = partial(self._place.request_validation, ask)
            limits = {unit: limit for unit, (limit, _) in limits_of(trainer).items() if limit > 0}
            self._loop = self._checkpointer.drive(one_at_a_time=True, **limits)
            prepare(trainer, components, self._loop.progress.epoch, self._loop.saved)
            self._loop.resume()
            if self._place.was_requested:  # before it was known for which epoch
                trainer.fit_loop._combined_loader = None
            self._global_step = trainer.global_step

    def _under_way(self) -> DrivenLoop:
        assert self._loop is not None
        return self._loop

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The signals are ours again; Lightning's handler calls a collective from inside."""
        if self._checkpointer is not None:
            # lightning 2.6 trainer/connectors/signal_connector.py gives back what it found.
            trainer._signal_connector.teardown()
            prepare_epoch(trainer)
            loop = self._loop
            if loop is not None and loop.goes_on_after_end and loop.progress.batch == 0:
                # The hooks that begin the epoch were not called yet.
                self._place.restore_user_state()
                loop.restore_random()
            trainer.fit_loop._combined_loader.follow(trainer.fit_loop)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """There may be new loaders."""
        if self._checkpointer is not None:
            trainer.fit_loop._combined_loader.follow(trainer.fit_loop)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An optimizer-step boundary, if a step was taken."""
        if self._checkpointer is not None and trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._checkpointer.step(loss=(outputs or {}).get("loss"))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The callbacks before this one have counted the epoch."""
        if self._checkpointer is not None:
            self._place.end_epoch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Metrics of the step that is not settled yet."""
        if self._checkpointer is not None and self._reports and not trainer.sanity_checking:
            self._checkpointer.report(**trainer.callback_metrics)

    def _finish(self, trainer: Any) -> None:
        """The run is over: at its horizon, or because it was stopped."""
        type(trainer.strategy).on_train_end(trainer.strategy)
        if self._loop is not None:
            limits = limits_of(trainer).items()
            reached = [f"{unit}={limit}" for unit, (limit, done) in limits if 0 < limit <= done]
            self._loop.finish(", ".join(reached) or f"stopped at step {trainer.global_step}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Nothing new is saved."""
        vars(trainer.strategy).pop("on_train_end", None)
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, None)
        self._checkpointer = self._loop = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The run directory is free for others, and the loader's workers end."""
        vars(trainer.strategy).pop("on_train_end", None)
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer = self._loop = None


class _Driver:
    """Where a fit is, for the loader that it iterates."""

    def __init__(self, callback: ResumeCallback, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer

    @property
    def is_followed(self) -> bool:
        """Whether this fit is; a tuner takes all callbacks away and tries some batches."""
        return any(each is self._callback for each in self._trainer.callbacks)

    @property
    def is_before_start(self) -> bool:
        """Whether ``on_fit_start`` has not come."""
        return self._callback._loop is None

    @property
    def is_at_start(self) -> bool:
        """Whether nothing was restored, and nothing trained."""
        loop = self._callback._loop
        return loop is not None and loop.progress == Progress()

    def begin(self, loader: Any) -> Any:
        """The batches of an epoch; Lightning asks for the first one, and all else has run."""
        callback, loop = self._callback, self._callback._loop
        assert loop is not None, "no fit asks for a batch before on_fit_start"
        is_over = loop.finished is not None
        refuse(
            "an epoch more for a run that has finished", is_over, "give it a directory of its own"
        )
        callback._place.arrive()
        loop.next_epoch(loader)
        return loop.batches(loader)
