"""The state of Lightning's loops: counts, logged metrics, and requests for loaders."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, TypedDict

import torch

from resumekit import Progress
from resumekit.adapters.lightning import _private as private
from resumekit.adapters.lightning._private import (
    Metadata,
    ResultCollection,
    ResultMetric,
    Sync,
    callbacks,
    strategies,
)
from resumekit.adapters.lightning.loader import loader_fidelity, under_rng_state
from resumekit.capture.nested_state import OneNumber, Scalar, paired, structure_mismatches
from resumekit.capture.rng import (
    GeneratorState,
    RngState,
    RngStates,
    generator_state,
    set_generator_state,
)
from resumekit.capture.user_state.user_state import UserState
from resumekit.data.loader_traits import LoaderTraits
from resumekit.errors import InvalidStateError
from resumekit.run.loops import FrameworkLoop
from resumekit.state import (
    CaptureLine,
    Checked,
    Count,
    Fidelity,
    Rule,
    SharingPattern,
    StateComponent,
    check_schema,
)

_KEY = "callbacks/lightning"
_EPOCHS, _BATCHES = "epoch_progress", "epoch_loop.batch_progress"  # of the state of the loops
_FLAGS = ("of_torch", "synchronizes", "rank_zero_only", "has_function")  # of a metric

# By the name in the state.
_METRICS = {
    "metrics": private.CALLBACK_METRICS,
    "logged_metrics": private.LOGGED_METRICS,
    "progress_bar_metrics": private.PROGRESS_BAR_METRICS,
}


class _Requested(TypedDict):
    epoch: Count
    rng: RngStates


def _is_meta(meta: Mapping[str, Any]) -> bool:
    """Whether it has what Lightning's own dataclass has, with the name of a function."""
    names = {each.name for each in fields(Metadata)} - {"_sync"}
    if meta.keys() != names.union(_FLAGS) or not isinstance(meta["reduce_fx"], str):
        return False
    return hasattr(torch if meta["of_torch"] else builtins, meta["reduce_fx"])


_Meta = Annotated[dict[str, str | int | bool | None], Rule("settings of self.log()", _is_meta)]


class _Logged(TypedDict):
    sums: dict[str, Scalar]
    begins_with: dict[str, Scalar]
    last: Scalar | None
    meta: _Meta | None


class _OptionalLoopFields(TypedDict, total=False):
    state_keys: dict[str, str]


class _LoopFields(_OptionalLoopFields):
    loops: dict[str, Any]
    logged: dict[str, _Logged]
    is_first_batch: bool | None
    metrics: dict[str, OneNumber]
    logged_metrics: dict[str, OneNumber]
    progress_bar_metrics: dict[str, OneNumber]
    accumulate_grad_batches: Count
    should_stop: bool
    requested: _Requested | None
    validation_requested: _Requested | None
    validated_in: float | None
    keeps_workers: bool
    validation: list[dict[str, GeneratorState]]


class LoopState(Checked):
    """The counts of Lightning's loops, the sums of the current epoch, and requested loaders.

    Lightning's own restart omits what was due at the last batch. So the loops enter the interrupted
    epoch like any other, and their state is restored when they ask for a batch.
    lightning 2.6 loops/fit_loop.py ``reset``, loops/training_epoch_loop.py ``reset``, ``advance``.
    """

    schema = _LoopFields

    def __init__(self, trainer: Any, ask: Callable[[], FrameworkLoop]) -> None:
        self._trainer = trainer
        self._ask = ask  # gives the driven loop; known when the run has found its checkpoint
        self._pending: Mapping[str, Any] | None = None  # until the first batch of this launch
        self._keeps_workers = False  # of a loader for validation
        self._validated: Sequence[Mapping[str, Any]] = ()  # until the validation loaders exist
        # Epoch and RNG state of the last request for training loaders, where epochs have new ones.
        self._requested: dict[str, Any] | None = None
        # The same for validation loaders, and whether the request is to be repeated.
        self._validation_requested: dict[str, Any] | None = None
        self._repeats_validation_request = False
        self._validated_in: float | None = None
        self._lost_averages: tuple[str, ...] = ()
        self.user_state: UserState  # restored after the hooks before the first batch
        # For exports: the keys of callbacks in Lightning's checkpoints, by component.
        self.state_keys: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            **({"state_keys": self.state_keys} if self.state_keys else {}),
            "loops": self._loops(),
            "logged": as_plain(private.RESULTS.of(trainer)),
            "is_first_batch": private.IS_FIRST_BATCH.of(trainer),
            **{name: dict(metrics.of(trainer)) for name, metrics in _METRICS.items()},
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
            "requested": self._requested,
            "validation_requested": self._validation_requested,
            "validated_in": private.VALIDATION_RELOADED.of(trainer)
            if trainer.reload_dataloaders_every_n_epochs
            else None,
            "keeps_workers": self._keeps_workers
            or any(private.ITERATOR.of(each) for each in self._validation()),
            "validation": self._validated or [_states(each) for each in self._validation()],
        }

    def check_content(self, key: str, state: Any) -> None:
        super().check_content(key, state)
        saved, live = state["loops"], self._loops()
        for each in structure_mismatches(saved, live):
            raise InvalidStateError(f"{key}: loops{each.where}", found=each.found)
        for where, value, now in paired(saved, live):
            if isinstance(now, int):
                check_schema(f"{key}: loops{where}", bool if type(now) is bool else Count, value)
        modules = dict(self._trainer.lightning_module.named_modules())
        for name, each in state["logged"].items():
            meta = each["meta"]
            if meta and not each["sums"] and meta["metric_attribute"] not in modules:
                found = f"the metric {meta['metric_attribute']}"
                raise InvalidStateError(f"{key}: logged.{name}", found=found, expected="a module")

    def progress_in(self, state: Any) -> dict[str, tuple[Any, str]]:
        loops = state["loops"]
        epochs, batches = (loops[name]["current"] for name in (_EPOCHS, _BATCHES))
        if epochs["processed"] >= epochs["started"]:
            return {}  # between two epochs
        return {
            f"loops.{_EPOCHS}.current.completed": (epochs["completed"], "epoch"),
            f"loops.{_BATCHES}.current.ready": (batches["ready"], "batch"),
        }

    def _loops(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop  # its own state_dict asks the loaders, and some then draw
        return {
            **loop.epoch_loop.state_dict(prefix="epoch_loop."),
            _EPOCHS: loop.epoch_progress.state_dict(),
            "state_dict": {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores all but what the first batch decides."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.load_state_dict(dict(state["loops"]))
        loop.epoch_loop.restarting = False
        for name, metrics in _METRICS.items():
            live = metrics.of(trainer)
            live.clear()  # a tuner may have logged some
            live.update(state[name])
        trainer.should_stop = state["should_stop"]
        forget_groups(trainer)
        self._keeps_workers = state["keeps_workers"]
        self._requested = state["requested"]
        self._validation_requested = state["validation_requested"]
        if self._pending is None:  # not the second time, when Lightning has asked already
            self._repeats_validation_request = self._validation_requested is not None
        self._validated_in = state["validated_in"]
        self._validated = state["validation"]
        trainer.num_sanity_val_steps = 0
        epoch = loop.epoch_progress.current
        self._pending = state if epoch.processed < epoch.started else None
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """Continues a run of another framework."""
        loop, trainer, state = self._ask(), self._trainer, self.state_dict()
        progress = loop.progress
        is_automatic = trainer.lightning_module.automatic_optimization
        each_step = 1 if is_automatic else len(trainer.optimizers)
        begun = progress.epoch + (loop.finished is None)
        state["loops"] = loop_counts(state["loops"], progress, begun=begun, optimizers=each_step)
        state["is_first_batch"] = progress.batch == 1 if progress.batch else None
        self.load_state_dict(state)
        where = f"batch {progress.batch} of epoch {progress.epoch}"
        return (f"Lightning's loops go on at {where}; averages over this epoch begin there",)

    @property
    def was_requested(self) -> bool:
        """Whether the interrupted epoch had other loaders than the first one."""
        return self._pending is not None and self._requested is not None

    @property
    def epoch_of_request(self) -> int:
        """The epoch for which there are new training loaders, or 0."""
        return 0 if self._requested is None else int(self._requested["epoch"])

    def request(self, ask: Callable[[], Any]) -> Any:
        """The training loaders, as they were requested in the interrupted run."""
        if not self._trainer.reload_dataloaders_every_n_epochs:
            return ask()
        if not self.was_requested:
            self._requested = self._request_now()
            return ask()
        assert self._requested is not None
        # The RNG state is not restored here: the first batch does that.
        RngState().load_state_dict(self._requested["rng"])
        with in_epoch(self._trainer, self._requested["epoch"]):
            return ask()

    def request_validation(self, ask: Callable[[], Any]) -> Any:
        """The loaders for validation; a resume requests them as the interrupted run did."""
        requested = self._validation_requested
        if not self._repeats_validation_request or requested is None:
            self._validation_requested = self._request_now()
            return ask()
        self._repeats_validation_request = False
        with under_rng_state(requested["rng"]), in_epoch(self._trainer, requested["epoch"]):
            return ask()

    def _request_now(self) -> dict[str, Any]:
        progress = self._trainer.fit_loop.epoch_progress.current
        return {"epoch": progress.completed, "rng": RngState().state_dict()}

    def component(self) -> StateComponent:
        """The component of this state."""
        return StateComponent(_KEY, self, SharingPattern.PER_RANK, framework="Lightning")

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """Whether gradients of several optimizers and the work of loaders are restored."""
        trainer = self._trainer
        if not _steps_apart(trainer) or keeps_gradients(trainer):
            return loader_fidelity(trainer)
        return Fidelity.LOST, (
            "gradients that one optimizer of several keeps while another one steps, where the "
            f"{type(trainer.strategy).__name__} has them; have all step in one batch"
        )

    def end_epoch(self) -> None:
        """All batches of an epoch have logged."""
        results = private.RESULTS.of(self._trainer)
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

    def before_first_batch(self) -> None:
        """Lightning asks for the first batch of an epoch."""
        self.user_state.restore_early()  # for the loaders that are requested here
        if self._pending is not None:
            self._enter_epoch(self._pending)
        self._restore_validation()

    def _enter_epoch(self, state: Mapping[str, Any]) -> None:
        """Restores the loops in the interrupted epoch."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        self.load_state_dict(state)
        self._pending = None
        private.RESTARTS.write(trainer, False)
        if self._requested is not None:
            private.TRAIN_RELOADED.write(trainer, self._requested["epoch"])
        num_fetched = loop.epoch_loop.batch_progress.current.ready
        private.FETCHED.write(private.FETCHER.of(trainer), num_fetched)
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        private.RESULTS.write(trainer, Results(state["logged"], trainer))
        private.IS_FIRST_BATCH.write(trainer, state["is_first_batch"])
        if self._keeps_workers:  # they draw a seed when they start, and that was before
            loop.epoch_loop.val_loop.setup_data()
            for each in self._validation():
                iter(each)

    def _restore_validation(self) -> None:
        """The next validation has the order that it has in the interrupted run."""
        trainer, saved = self._trainer, self._validated
        self._validated = ()
        is_defined = private.VALIDATION_SOURCE.of(trainer).is_defined
        if any(saved) or (self._repeats_validation_request and is_defined()):
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
        validated_in, self._validated_in = self._validated_in, None
        if validated_in is not None:
            private.VALIDATION_RELOADED.write(trainer, validated_in)
        for each, states in zip(self._validation(), saved, strict=False):
            for name, generator in LoaderTraits.of(each).stateful_generators.items():
                if name in states:
                    set_generator_state(generator, states[name])

    def _validation(self) -> list[Any]:
        loader = private.VALIDATION_LOADER.of(self._trainer)
        return [] if loader is None else list(loader.flattened)


def _states(loader: Any) -> dict[str, Any]:
    """The states of a loader's generators, which decide its next order."""
    found = LoaderTraits.of(loader).stateful_generators.items()
    return {name: generator_state(each) for name, each in found}


@contextmanager
def in_epoch(trainer: Any, epoch: int) -> Iterator[None]:
    """Runs hooks as if this were the current epoch."""
    progress = trainer.fit_loop.epoch_progress.current
    now, progress.completed = progress.completed, epoch
    yield
    progress.completed = now


def forget_groups(trainer: Any) -> None:
    """The restored param groups are those of this fit, and of no later one."""
    for each in trainer.callbacks:
        if isinstance(each, callbacks.BaseFinetuning):
            private.FINETUNING_RESTARTS.write(each, False)


def keeps_gradients(trainer: Any) -> bool:
    """Whether gradients outlive a step, and can be saved.

    lightning 2.6 callbacks/stochastic_weight_avg.py steps once more, by what is left of the last
    step's, in the epoch of the batch norms.
    """
    swaps = any(isinstance(e, callbacks.StochasticWeightAveraging) for e in trainer.callbacks)
    sharding = (strategies.ModelParallelStrategy, strategies.DeepSpeedStrategy)
    return (swaps or _steps_apart(trainer)) and not isinstance(trainer.strategy, sharding)


def _steps_apart(trainer: Any) -> bool:
    return len(trainer.optimizers) > 1 and not trainer.lightning_module.automatic_optimization


def loop_counts(
    loops: Mapping[str, Any], progress: Progress, *, begun: int, optimizers: int
) -> dict[str, Any]:
    """The state of the loops, as if Lightning had run up to this progress.

    lightning 2.6 loops/progress.py; of a loop that has run nothing the counts are zeros.

    Args:
        loops: the state of loops that have run nothing.
        progress: of the run.
        begun: the epochs that were begun, with the current one.
        optimizers: how many of them step in each step.
    """
    found = copy.deepcopy(dict(loops))
    steps = progress.step * optimizers
    done = progress.epoch
    epochs = {"ready": begun, "started": begun, "processed": done, "completed": done}
    found["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    batches = found["epoch_loop.batch_progress"]
    _count(batches["total"], progress.micro_step)
    _count(batches["current"], progress.batch)
    _count(found["epoch_loop.scheduler_progress"]["total"], progress.step)
    automatic = found["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for each in (automatic["step"], automatic["zero_grad"]):
        _count(each["total"], steps)
    _count(found["epoch_loop.manual_optimization.optim_step_progress"]["total"], steps)
    found["epoch_loop.state_dict"]["_batches_that_stepped"] = progress.step
    return found


def _count(counts: dict[str, int], number: int) -> None:
    counts.update(dict.fromkeys(counts, number))


# ---------------------------------------------------------------- logged metrics


def as_plain(results: ResultCollection) -> dict[str, Any]:
    """The metrics of the current epoch as plain values; of one of a process group only sums.

    lightning 2.6 trainer/connectors/logger_connector/result.py.
    """
    waiting = results.waiting if isinstance(results, Results) else {}
    logged = {key: _plain(metric) for key, metric in results.items() if not metric.has_reset}
    return {**waiting, **logged}


def _plain(metric: Any) -> dict[str, Any]:
    meta, cache = metric.meta, private.RESULT_LAST.of(metric)
    state = {
        "sums": dict(metric.metric_state) if metric.is_tensor else {},
        # In the precision of the first log.
        "begins_with": dict(private.RESULT_DEFAULTS.of(metric)),
        "last": cache if isinstance(cache, torch.Tensor) else None,
        "meta": None,
    }
    if meta.sync.group is None:
        plain = {each.name: getattr(meta, each.name) for each in fields(meta)}
        reduce_fx, sync = plain.pop("reduce_fx"), plain.pop("_sync")
        name = reduce_fx.__name__
        state["meta"] = {
            **plain,
            "reduce_fx": name,
            "of_torch": reduce_fx is getattr(torch, name),
            "synchronizes": sync.should,
            "rank_zero_only": sync.rank_zero_only,
            "has_function": sync.fn is not Sync.no_op,
        }
    return state


class Results(ResultCollection):
    """The logged metrics of the epoch, restored from the interrupted run.

    Args:
        saved: what ``as_plain`` gave.
        trainer: the Trainer, whose module holds the torchmetrics.

    Attributes:
        waiting: what was saved of metrics of a process group, until they are logged again.
    """

    def __init__(self, saved: Mapping[str, Any], trainer: Any) -> None:
        super().__init__(training=True)
        self.waiting = {key: each for key, each in saved.items() if each["meta"] is None}
        for key, metric in _as_metrics(saved, trainer):
            super().__setitem__(key, metric)

    def take_not_logged_again(self) -> tuple[str, ...]:
        """The metrics for which nothing was logged since the resume, when their epoch ends."""
        names = tuple(self.waiting)
        self.waiting = {}
        return names

    def __setitem__(self, key: str, metric: Any) -> None:
        if key in self.waiting:
            vars(metric).update(self.waiting.pop(key)["sums"])
        super().__setitem__(key, metric)


def _as_metrics(saved: Mapping[str, Any], trainer: Any) -> Iterator[tuple[str, Any]]:
    modules = dict(trainer.lightning_module.named_modules())
    for key, state in saved.items():
        if state["meta"] is None:
            continue
        meta = dict(state["meta"])
        home, name = torch if meta.pop("of_torch") else builtins, meta.pop("reduce_fx")
        sync = Sync(
            _should=meta.pop("synchronizes"),
            rank_zero_only=meta.pop("rank_zero_only"),
            fn=trainer.strategy.reduce if meta.pop("has_function") else Sync.no_op,
        )
        metadata = Metadata(**meta, reduce_fx=getattr(home, name))
        metadata.sync = sync
        metric: Any = ResultMetric(metadata, is_tensor=bool(state["sums"]))
        private.RESULT_DEFAULTS.of(metric).update(state["begins_with"])
        vars(metric).update(state["sums"])
        private.RESULT_LAST.write(metric, state["last"])
        private.RESULT_UPDATES.write(metric, 1)
        if not metric.is_tensor:
            metric.value = modules[meta["metric_attribute"]]
        yield key, metric.to(trainer.strategy.root_device)
