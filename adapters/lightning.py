"""Lightning: one callback, and the identical ``trainer.fit`` starts, resumes, or is done.

Example:
    saving = ResumeCallback("runs/a", save_every=500)
    L.Trainer(max_epochs=3, callbacks=[saving]).fit(module, loader)
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer
from resumekit.capture import (
    ObjectState,
    buckets_of,
    one_or_named,
    registered_components,
    state_components,
)
from resumekit.contract import Fidelity, SharingPattern, StateComponent
from resumekit.engine.driven import DrivenLoop
from resumekit.engine.options import Options
from resumekit.errors import ConfigurationError
from resumekit.requirements import require

require("lightning")

from lightning.pytorch import Callback, strategies  # noqa: E402  if it is there
from lightning.pytorch import callbacks as builtin  # noqa: E402
from lightning.pytorch.trainer.connectors.logger_connector import result  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning.pytorch.utilities.combined_loader import _ModeIterator  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.engine.options import OptionKeywords

__all__ = ["ResumeCallback"]


class ResumeCallback(Callback):
    """Saves the whole state of a fit; ``fit`` continues it in the same directory.

    Args:
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.engine.options.Options``.

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
        own: dict[str, Any] = {"extras": extras, "generators": generators, **options}
        self._make_checkpointer = partial(Checkpointer, directory, **own)
        self._ema = ema
        self._checkpointer: Checkpointer | None = None  # while a fit is under way
        self._loop: DrivenLoop | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes the last place among the callbacks, and one between Lightning and the loader."""
        if stage == "fit" and not trainer.fast_dev_run:
            _check(trainer, pl_module)
            # What the others make in on_fit_start is to be restored, and what they do in
            # on_train_end is to be saved.
            trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
            # lightning 2.6 loops/fit_loop.py setup_data takes the loader from here.
            source = trainer.fit_loop._data_source
            source.dataloader = lambda: _Loader(type(source).dataloader(source), self._begin)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Every object exists."""
        if not trainer.fast_dev_run:
            _refuse(f"fit(ckpt_path={trainer.ckpt_path!r})", trainer.ckpt_path is not None)
            self._place = _Place(trainer)
            components = _components(trainer, self._place, self._ema)
            self._checkpointer = self._make_checkpointer(components=components)
            limits = {unit: limit for unit, (limit, _) in _limits(trainer).items() if limit > 0}
            self._loop = self._checkpointer.drive(**limits)
            self._loop.resume()
            self._global_step = trainer.global_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The signals are ours again; Lightning's handler calls a collective from inside."""
        if self._checkpointer is not None:
            # lightning 2.6 trainer/connectors/signal_connector.py gives back what it found.
            trainer._signal_connector.teardown()

    def _begin(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch; Lightning asks for the first one, and all else has run."""
        if self._loop is None:  # a tuner tries some batches before the fit starts
            return iter(loader)
        _refuse("an epoch more for a run that has finished", self._loop.finished is not None)
        self._place.arrive()
        self._loop.next_epoch()
        return self._loop.batches(loader)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An optimizer-step boundary, if a step was taken."""
        if self._checkpointer is not None and trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._checkpointer.step(loss=(outputs or {}).get("loss"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Metrics of the step that is not settled yet."""
        if self._checkpointer is not None and self._reports and not trainer.sanity_checking:
            self._checkpointer.report(**trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The run is over: at its horizon, or because it was stopped."""
        if self._loop is not None:
            limits = _limits(trainer).items()
            reached = [f"{unit}={limit}" for unit, (limit, done) in limits if 0 < limit <= done]
            self._loop.finish(", ".join(reached) or f"stopped at step {trainer.global_step}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Nothing new is saved."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, None)
        self._checkpointer = self._loop = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The run directory is free for others, and the loader's workers end."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer = self._loop = None


class _Loader(CombinedLoader):
    """What the fit loop iterates: the user's loader, through the driven loop.

    ``setup_data`` asks for an iterator before an epoch has begun, and nothing may happen then: the
    user's loader would draw a random number.
    """

    def __init__(self, given: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        is_combined = isinstance(given, CombinedLoader)
        mode = given._mode if is_combined else "max_size_cycle"
        super().__init__(given.iterables if is_combined else given, mode)
        self._begin = begin

    def __iter__(self) -> Any:
        self._iterator = _InStep(self.flattened, self.limits, self._batches())
        return self

    def _state_dicts(self) -> list[dict[str, Any]]:
        """Nothing for Lightning's own checkpoints: asked, a stateful loader may draw a number."""
        return []

    def _batches(self) -> Iterator[list[Any]]:
        loaders: Any = self.flattened  # as Lightning has prepared them; limits has their lengths
        limits: Any = self.limits
        _refuse("a training loader without a length", math.inf in limits)
        if len(loaders) == 1:
            yield from ([batch] for batch in self._begin(loaders[0]))
            return
        in_step = self._mode == "min_size" or {self._mode, *limits} == {"max_size_cycle", limits[0]}
        _refuse(f"several training loaders of unequal lengths in mode {self._mode}", not in_step)
        named = {str(number): loader for number, loader in enumerate(loaders)}
        yield from (list(batches.values()) for batches in self._begin(named))


class _InStep(_ModeIterator):
    """Batches that are already side by side, where Lightning combines loaders by itself."""

    def __init__(self, loaders: Any, limits: Any, batches: Iterator[list[Any]]) -> None:
        super().__init__(loaders, limits)
        self._batches = batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batches = next(self._batches)
        self._idx += 1
        return batches, self._idx - 1, 0

    def __len__(self) -> int:
        limits: Any = self.limits
        return min(limits)  # type: ignore[no-any-return]


class _Place:
    """Where Lightning's loops are, what they decide by, and the sums of the epoch under way.

    Lightning's own way back leaves out what was due at the last batch. So the loops go into the
    interrupted epoch as into any other, and are put where they were when they ask for a batch.
    lightning 2.6 loops/fit_loop.py ``reset``, loops/training_epoch_loop.py ``reset``, ``advance``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._again: Mapping[str, Any] | None = None  # until the first batch of this launch
        self._sums: dict[str, Any] = {}  # of metrics that this launch has not logged yet
        self._keeps_workers = False  # of a loader for validation

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        results = trainer.fit_loop.epoch_loop._results.items()
        sums = {key: m.metric_state for key, m in results if m.is_tensor and not m.has_reset}
        loop = trainer.fit_loop  # its own state_dict asks the loaders, and some draw numbers then
        return {
            "loops": {
                **loop.epoch_loop.state_dict(prefix="epoch_loop."),
                "epoch_progress": loop.epoch_progress.state_dict(),
                "state_dict": {},
            },
            "sums": {**self._sums, **sums},
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "logged_metrics": dict(trainer._logger_connector._logged_metrics),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "should_stop": trainer.should_stop,
            "keeps_workers": self._keeps_workers
            or any(getattr(each, "_iterator", None) for each in self._validation()),
            # torch 2.13 nn/parallel/distributed.py: not in the forward pass after a validation.
            "syncs_buffers": getattr(trainer.model, "require_forward_param_sync", None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.load_state_dict(dict(state["loops"]))
        loop.epoch_loop.restarting = False
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        trainer._logger_connector._logged_metrics.update(state["logged_metrics"])
        trainer.should_stop = state["should_stop"]
        if state["syncs_buffers"] is not None:
            trainer.model.require_forward_param_sync = state["syncs_buffers"]
        self._keeps_workers = state["keeps_workers"]
        trainer.num_sanity_val_steps = 0
        epoch = loop.epoch_progress.current
        self._again = state if epoch.processed < epoch.started else None

    def component(self) -> StateComponent:
        """All of it, and whether what persistent workers draw comes back."""
        fidelity, reason = _fidelity(self._trainer)
        return StateComponent(
            "callbacks/lightning", self, SharingPattern.PER_RANK, fidelity=fidelity, reason=reason
        )

    def arrive(self) -> None:
        """Lightning asks for the first batch of an epoch; the sums of the former one are over."""
        self._sums.clear()
        if self._again is None:
            return
        state, loop = self._again, self._trainer.fit_loop
        self.load_state_dict(state)
        self._again = None
        loop._restarting = False  # or plateau schedulers would miss this epoch
        loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
        self._trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        self._sums.update(state["sums"])
        loop.epoch_loop._results = _Results(self._sums)
        if self._keeps_workers:  # they draw a seed when they start, and that was before
            loop.epoch_loop.val_loop.setup_data()
            for each in self._validation():
                iter(each)

    def _validation(self) -> list[Any]:
        loader = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if loader is None else list(loader.flattened)


class _Results(result._ResultCollection):
    """What the epoch has logged; each metric goes on from the interrupted run's sum.

    lightning 2.6 trainer/connectors/logger_connector/result.py ``log`` sets an item once.
    """

    def __init__(self, sums: dict[str, Any]) -> None:
        super().__init__(training=True)
        self._sums = sums

    def __setitem__(self, key: str, metric: Any) -> None:
        vars(metric).update(self._sums.pop(key, {}))
        super().__setitem__(key, metric)


class _Hooked:
    """What the module and callbacks put into a checkpoint by hooks, and the torchmetrics."""

    def __init__(self, trainer: Any) -> None:
        self._module = module = trainer.lightning_module
        hooked = [each for each in trainer.callbacks if _overrides(each, "on_save_checkpoint")]
        hooked = [each for each in hooked if not isinstance(each, builtin.WeightAveraging)]
        self._owners: list[Any] = [*((each, (trainer, module)) for each in hooked), (module, ())]

    def state_dict(self) -> dict[str, Any]:
        checkpoint = {"state_dict": self._module.state_dict()}
        for owner, arguments in self._owners:
            owner.on_save_checkpoint(*arguments, checkpoint)
        return {
            "checkpoint": {key: v for key, v in checkpoint.items() if key != "state_dict"},
            "metrics": {
                name: {**each.metric_state, "_update_count": each._update_count}
                for name, each in self._metrics()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checkpoint = {"state_dict": self._module.state_dict(), **state["checkpoint"]}
        for owner, arguments in self._owners:
            owner.on_load_checkpoint(*arguments, checkpoint)
        for name, each in self._metrics():
            vars(each).update(state["metrics"].get(name, {}))
            each.to(each.device)

    def _metrics(self) -> list[tuple[str, Any]]:
        return [each for each in self._module.named_modules() if hasattr(each[1], "_update_count")]


_STRATEGIES = (
    strategies.SingleDeviceStrategy,
    strategies.DDPStrategy,  # and DeepSpeed's, which derives from it
    strategies.ModelParallelStrategy,
)


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def _limits(trainer: Any) -> dict[str, tuple[int, int]]:
    steps = (trainer.max_steps, trainer.global_step)
    return {"epochs": (trainer.max_epochs, trainer.current_epoch), "steps": steps}


def _refuse(what: str, is_there: bool) -> None:
    if is_there:
        raise ConfigurationError("ResumeCallback", found=f"{what}, which is not available yet")


def _check(trainer: Any, module: Any) -> None:
    strategy = trainer.strategy
    _refuse(type(strategy).__name__, not isinstance(strategy, _STRATEGIES))
    sizes = getattr(strategy, "_tensor_parallel_size", 1)
    _refuse(f"tensor parallelism ({type(strategy).__name__})", sizes > 1)
    _refuse("reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs > 0)
    parameters = inspect.signature(module.training_step).parameters
    _refuse("training_step(dataloader_iter)", "dataloader_iter" in parameters)
    # These change the optimizer or the module when an epoch begins, and no resume repeats that.
    changing = (builtin.BaseFinetuning, builtin.ModelPruning, builtin.StochasticWeightAveraging)
    for each in trainer.callbacks:
        _refuse(type(each).__name__, isinstance(each, changing))


def _fidelity(trainer: Any) -> tuple[Fidelity, str]:
    """What persistent workers may lose. Of loaders that a hook makes nobody knows at the start."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.limit_val_batches and any(map(_keeps_workers, _given(epoch_loop.val_loop))):
        return Fidelity.LOST, (
            "random numbers that persistent workers of a loader for validation draw do not come "
            "back; use persistent_workers=False there"
        )
    limit, loaders = trainer.limit_train_batches, _given(trainer.fit_loop)
    if limit != 1.0 and any(_keeps_workers(each) and limit < len(each) for each in loaders):
        return Fidelity.LOST, (
            "batches that persistent workers made beyond limit_train_batches are not made again; "
            "use persistent_workers=False"
        )
    return Fidelity.EXACT, ""


def _given(loop: Any) -> list[Any]:
    """The loaders that ``fit`` was given, as far as it was."""
    source = loop._data_source
    return [] if source.is_module() else CombinedLoader(source.instance).flattened


def _keeps_workers(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _components(trainer: Any, place: _Place, ema: Any) -> tuple[StateComponent, ...]:
    callbacks = trainer.callbacks
    averaging = [each for each in callbacks if isinstance(each, builtin.WeightAveraging)]
    averages = [*(each._average_model for each in averaging), *([] if ema is None else [ema])]
    ema = one_or_named(averages) if averaging else ema
    schedulers = one_or_named([each.scheduler for each in trainer.lr_scheduler_configs])
    stateful = [each for each in callbacks if _overrides(each, "state_dict")]
    return (
        *_trained(trainer, schedulers, ema),
        place.component(),
        StateComponent("callbacks/hooks", _Hooked(trainer), SharingPattern.PER_RANK),
        *map(_as_kept, registered_components([*stateful, *filter(None, [trainer.datamodule])])),
    )


def _as_kept(component: StateComponent) -> StateComponent:
    """The component of a callback, with what Lightning's own state of it leaves out."""
    given = getattr(component.stateful, "given", None)
    for kind, kept in ((builtin.Timer, _Clock), (builtin.ModelCheckpoint, _OwnSaving)):
        if isinstance(given, kind):
            return replace(component, stateful=kept(given))
    return component


def _trained(trainer: Any, schedulers: Any, ema: Any) -> tuple[StateComponent, ...]:
    """What a step changes, as the strategy shares it among the ranks."""
    if isinstance(trainer.strategy, strategies.DeepSpeedStrategy):
        # Imports DeepSpeed, which has made this engine.
        from resumekit.frameworks.deepspeed import engine_components, require_resumable

        require_resumable(trainer.model)
        return tuple(engine_components(trainer.model, lr_scheduler=schedulers, ema=ema))
    shared = state_components(
        model=trainer.lightning_module,
        optimizer=one_or_named(trainer.optimizers),
        lr_scheduler=schedulers,
        grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
        ema=ema,
        adopt=True,
        num_ranks=trainer.world_size,
    )
    return (*shared, *buckets_of(trainer.model))


class _Clock(ObjectState):
    """The state of a ``Timer``: the time that the run took goes on with it."""

    def comparable_state(self) -> dict[str, Any]:
        """Two equal runs take different times."""
        return {}


class _OwnSaving:
    """The state of a ``ModelCheckpoint``, whose folder may have moved with the run directory.

    Lightning compares the folder and forgets the best when it is another one; and it forgets at
    which step it saved last, so that it would save that step again. lightning 2.6
    callbacks/model_checkpoint.py ``load_state_dict``, ``_should_skip_saving_checkpoint``.
    """

    def __init__(self, saving: Any) -> None:
        self._saving = saving

    def state_dict(self) -> dict[str, Any]:
        saving = self._saving
        state = {key: self._name(value) for key, value in saving.state_dict().items()}
        models = {self._name(path): score for path, score in saving.best_k_models.items()}
        last = {name: self._name(getattr(saving, name)) for name in _OF_THE_LAST_SAVE}
        return {"state": {**state, "best_k_models": models}, "last": last}

    def comparable_state(self) -> dict[str, Any]:
        """The folder is each run's own."""
        state = self.state_dict()
        return {**state, "state": {**state["state"], "dirpath": None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saving, own = self._saving, state["state"]
        former = own["dirpath"]
        paths = {key: self._path(own[key], former) for key in _PATHS}
        models = {self._path(name, former): v for name, v in own["best_k_models"].items()}
        found = {**own, **paths, "best_k_models": models, "dirpath": saving.dirpath}
        saving.load_state_dict(found)
        saving.current_score = own["current_score"]
        saving._last_global_step_saved = state["last"]["_last_global_step_saved"]
        saving._last_checkpoint_saved = self._path(state["last"]["_last_checkpoint_saved"], former)

    def _name(self, value: Any) -> Any:
        """A path below the folder without the folder; anything else as it is."""
        folder = f"{self._saving.dirpath}{os.sep}"
        return value.removeprefix(folder) if isinstance(value, str) else value

    def _path(self, name: str, former: str) -> str:
        """Where the file is now: in the folder, or where it was when the folder was another."""
        here = os.path.join(self._saving.dirpath, name)
        there = os.path.join(former, name)
        return name and (here if os.path.exists(here) or not os.path.exists(there) else there)


_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_OF_THE_LAST_SAVE = ("_last_global_step_saved", "_last_checkpoint_saved")
