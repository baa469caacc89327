"""What a Trainer, its module and its callbacks must be like, so that a fit can be followed."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from pathlib import Path
from typing import Any

from resumekit.adapters._lightning_package import CombinedLoader, Trainer, callbacks, strategies
from resumekit.errors import ConfigurationError
from resumekit.state import Fidelity

_STRATEGIES = (
    strategies.SingleDeviceStrategy,
    strategies.DDPStrategy,  # and DeepSpeed's, which derives from it
    strategies.ModelParallelStrategy,
)

# lightning 2.6 tuner/lr_finder.py and tuner/batch_size_scaling.py: what they have put back.
_OF_TUNERS = (".lr_find_", ".scale_batch_size_")

_SPREADING = (strategies.ModelParallelStrategy, strategies.DeepSpeedStrategy)


def check(trainer: Any, module: Any) -> None:
    """Returns when a fit with these settings can be continued exactly.

    Raises:
        ConfigurationError: names the setting that cannot be followed.
    """
    is_same_package = issubclass(type(trainer), Trainer)
    if not is_same_package:
        raise ConfigurationError(
            "ResumeCallback",
            found=f"a Trainer of {type(trainer).__module__.partition('.')[0]}",
            expected=f"one of {Trainer.__module__.partition('.')[0]}",
            remedy="Import one of the two packages alone, before resumekit.adapters.lightning",
        )
    strategy = trainer.strategy
    name = type(strategy).__name__
    why = "Lightning runs it on a GPU alone, where nobody has measured it; ModelParallelStrategy is"
    refuse(name, isinstance(strategy, strategies.FSDPStrategy), f"{why} FSDP2")
    why = "what its ranks hold is not known; DDP, ModelParallelStrategy and DeepSpeedStrategy are"
    refuse(name, not isinstance(strategy, _STRATEGIES), why)
    sizes = getattr(strategy, "_tensor_parallel_size", 1)
    why = "the ranks that share a batch take the same data, which is not followed"
    refuse(f"tensor parallelism ({name})", sizes > 1, why)
    parameters = inspect.signature(module.training_step).parameters
    why = "the module fetches batches by itself, between the places that a run can be saved at"
    refuse("training_step(dataloader_iter)", "dataloader_iter" in parameters, why)
    why = "it puts others in the place of parameters while the run goes on"
    for each in trainer.callbacks:
        refuse(type(each).__name__, isinstance(each, callbacks.ModelPruning), why)


def check_path(path: Any) -> None:
    """Returns when Lightning restores nothing by itself.

    Raises:
        ConfigurationError: it does.
    """
    is_tuners = path is not None and Path(path).name.startswith(_OF_TUNERS)
    why = "a run is continued from its own directory alone"
    refuse(f"fit(ckpt_path={path!r})", path is not None and not is_tuners, why)


def refuse(what: str, is_there: bool, why: str) -> None:
    """Refuses something by name.

    Raises:
        ConfigurationError: it is there.
    """
    if is_there:
        raise ConfigurationError("ResumeCallback", found=f"{what}: {why}")


def limits_of(trainer: Any) -> dict[str, tuple[int, int]]:
    """How far the fit goes, and how far it is; a limit below 1 is none."""
    steps = (trainer.max_steps, trainer.global_step)
    return {"epochs": (trainer.max_epochs, trainer.current_epoch), "steps": steps}


def keeps_gradients(trainer: Any) -> bool:
    """Whether gradients outlive a step, and can be saved.

    lightning 2.6 callbacks/stochastic_weight_avg.py steps once more, by what is left of the last
    step's, in the epoch of the batch norms.
    """
    swaps = any(isinstance(e, callbacks.StochasticWeightAveraging) for e in trainer.callbacks)
    return (swaps or _steps_apart(trainer)) and not isinstance(trainer.strategy, _SPREADING)


def _steps_apart(trainer: Any) -> bool:
    return len(trainer.optimizers) > 1 and not trainer.lightning_module.automatic_optimization


def fidelity_of(trainer: Any) -> tuple[Fidelity, str]:
    """What is lost, if anything. Loaders that a hook makes are known when it was called."""
    if _steps_apart(trainer) and not keeps_gradients(trainer):
        return Fidelity.LOST, (
            "gradients that one optimizer of several keeps while another one steps, where the "
            f"{type(trainer.strategy).__name__} has them; have all step in one batch"
        )
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.limit_val_batches and any(map(_keeps_workers, _given(epoch_loop.val_loop))):
        return Fidelity.LOST, (
            "random numbers that persistent workers of a loader for validation draw do not come "
            "back; use persistent_workers=False there"
        )
    kept = filter(_keeps_workers, _given(trainer.fit_loop))
    if not all(_is_used_up(each, trainer.limit_train_batches) for each in kept):
        return Fidelity.LOST, (
            "batches that persistent workers made beyond limit_train_batches are not made again; "
            "use persistent_workers=False"
        )
    return Fidelity.EXACT, ""


def _given(loop: Any) -> list[Any]:
    """The loaders that ``fit`` was given, or that a hook has made so far."""
    source = loop._data_source
    if not source.is_module():
        return list(CombinedLoader(source.instance).flattened)
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def _keeps_workers(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _is_used_up(loader: Any, limit: int | float) -> bool:
    """Whether an epoch takes all of its batches."""
    if isinstance(limit, float):
        return limit >= 1.0
    return isinstance(loader.dataset, Sized) and limit >= len(loader)
