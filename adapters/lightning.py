"""Lightning: one callback, and the identical ``trainer.fit`` starts, resumes, or is done.

Example:
    saving = ResumeCallback("runs/a", save_every=500)
    L.Trainer(max_epochs=3, callbacks=[saving]).fit(module, loader)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer
from resumekit.capture import (
    buckets_of,
    one_or_named,
    registered_components,
    state_components,
)
from resumekit.contract import SharingPattern, StateComponent
from resumekit.engine.driven import DrivenLoop
from resumekit.engine.options import Options
from resumekit.errors import ConfigurationError
from resumekit.requirements import require

require("lightning")

from lightning.pytorch import Callback, strategies  # noqa: E402  if it is there
from lightning.pytorch import callbacks as builtin  # noqa: E402
from lightning.pytorch.trainer.connectors.logger_connector import result  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

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
        super().__init__(given.iterables if is_combined else given, "max_size_cycle")
        self._begin = begin

    def __iter__(self) -> Any:
        loaders: Any = self.flattened  # as Lightning has prepared them; limits has their lengths
        self.flattened = [self._batches(each) for each in loaders]
        super().__iter__()
        self.flattened = loaders
        return self

    def _batches(self, loader: Any) -> Iterator[Any]:
        _refuse("several training loaders", len(self.flattened) > 1)
        _refuse("a training loader without a length", self.limits == [math.inf])
        yield from self._begin(loader)


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
        return {
            "loops": {**trainer.fit_loop.state_dict(), "state_dict": {}},
            "sums": {**self._sums, **sums},
            "metrics": dict(trainer._logger_connector._callback_metrics),
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
        trainer.should_stop = state["should_stop"]
        if state["syncs_buffers"] is not None:
            trainer.model.require_forward_param_sync = state["syncs_buffers"]
        self._keeps_workers = state["keeps_workers"]
        trainer.num_sanity_val_steps = 0
        epoch = loop.epoch_progress.current
        self._again = state if epoch.processed < epoch.started else None

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
    plain = isinstance(strategy, (strategies.SingleDeviceStrategy, strategies.DDPStrategy))
    _refuse(type(strategy).__name__, not plain or strategy.restore_checkpoint_after_setup)
    _refuse("reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs > 0)
    parameters = inspect.signature(module.training_step).parameters
    _refuse("training_step(dataloader_iter)", "dataloader_iter" in parameters)
    # These change the optimizer or the module when an epoch begins, and no resume repeats that.
    changing = (builtin.BaseFinetuning, builtin.ModelPruning, builtin.StochasticWeightAveraging)
    for each in trainer.callbacks:
        _refuse(type(each).__name__, isinstance(each, changing))


def _components(trainer: Any, place: _Place, ema: Any) -> tuple[StateComponent, ...]:
    callbacks = trainer.callbacks
    averaging = [each for each in callbacks if isinstance(each, builtin.WeightAveraging)]
    averages = [*(each._average_model for each in averaging), *([] if ema is None else [ema])]
    stateful = [each for each in callbacks if _overrides(each, "state_dict")]
    return (
        *state_components(
            model=trainer.lightning_module,
            optimizer=one_or_named(trainer.optimizers),
            lr_scheduler=one_or_named([each.scheduler for each in trainer.lr_scheduler_configs]),
            grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
            ema=one_or_named(averages) if averaging else ema,
            adopt=True,
            num_ranks=trainer.world_size,
        ),
        *buckets_of(trainer.model),
        StateComponent("callbacks/lightning", place, SharingPattern.PER_RANK),
        StateComponent("callbacks/hooks", _Hooked(trainer), SharingPattern.PER_RANK),
        *registered_components([*stateful, *filter(None, [trainer.datamodule])]),
    )
