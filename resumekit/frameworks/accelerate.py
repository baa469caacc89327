"""The components of what an Accelerator has prepared, whichever way the model is distributed.

The Trainer of transformers has an Accelerator too, so two adapters use this.
"""

from __future__ import annotations

from typing import Any

from resumekit.capture.slots import state_components
from resumekit.distributed import require_all_ranks
from resumekit.errors import ConfigurationError
from resumekit.requirements import PrivateName
from resumekit.state import StateComponent

MODELS = PrivateName("_models", "accelerate 1.15 accelerator.py Accelerator")
ENGINE = PrivateName(
    "deepspeed_engine_wrapped",
    "accelerate 1.15 accelerator.py Accelerator._prepare_deepspeed",
    is_optional=True,  # without DeepSpeed
)

# accelerate 1.15 utils/dataclasses.py DistributedType: the model is replicated, sharded as DTensors
# (FSDP2) or flat parameters (FSDP1), or partitioned by DeepSpeed.
_SUPPORTED = frozenset({"NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"})

# accelerate 1.15 parallelism_config.py ParallelismConfig: ranks of one group that take the same
# batch, or parts of one sequence.
_SIZES = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism",
}


def accelerator_components(
    accelerator: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, ema: Any
) -> tuple[StateComponent, ...]:
    """The state of the objects that were prepared; called after ``prepare``.

    Each slot takes one object or a dict of named ones: what Accelerate's wrappers of optimizers
    and schedulers have inside, not the wrappers. Under DeepSpeed model and optimizer are the
    engine's.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        model: modules, wrapped or not.
        optimizer: optimizers.
        lr_scheduler: schedulers.
        ema: averaged models, or objects with ``state_dict``.

    Raises:
        ConfigurationError: see ``require_supported``; or DeepSpeed's engine uses something that
            cannot be resumed yet.
    """
    require_supported(accelerator)
    wrapped = ENGINE.of(accelerator)
    if wrapped is not None:
        _require_one_engine(accelerator, wrapped.engine)
        # Imports DeepSpeed, which has made this engine.
        from resumekit.frameworks.deepspeed import engine_components, require_resumable

        require_resumable(wrapped.engine)
        return tuple(engine_components(wrapped.engine, lr_scheduler=lr_scheduler, ema=ema))
    return state_components(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        grad_scaler=accelerator.scaler,
        ema=ema,
        num_ranks=accelerator.num_processes,
    )


def require_supported(accelerator: Any) -> None:
    """Raises ConfigurationError unless a model that is distributed so can be saved.

    Raises:
        ConfigurationError: it cannot; names the way.
    """
    # accelerate 1.15 state.py PartialState._prepare_backend: without cpu=True no CPU is a rank.
    require_all_ranks(
        "accelerator",
        accelerator.num_processes,
        remedy="Without GPUs pass Accelerator cpu=True, or TrainingArguments use_cpu=True",
    )
    kind = str(accelerator.distributed_type.value)
    if kind not in _SUPPORTED:
        _refuse(f"distributed type {kind}")
    # Version 2, or the optimizer sees the model's parameters, not what they are flattened into.
    keeps_parameters = kind != "FSDP" or accelerator.is_fsdp2
    if not (keeps_parameters or accelerator.state.fsdp_plugin.use_orig_params):
        _refuse(
            "FSDP version 1 with use_orig_params=False",
            remedy="Pass use_orig_params=True to FullyShardedDataParallelPlugin, or fsdp_version=2",
        )
    sizes = accelerator.parallelism_config
    for name, what in _SIZES.items():
        if getattr(sizes, name, 1) > 1:
            _refuse(f"{what} ({name}={getattr(sizes, name)})")


def _require_one_engine(accelerator: Any, engine: Any) -> None:
    # accelerate 1.15 accelerator.py _prepare_deepspeed lists all, and backward() knows the first.
    engines = [each for each in MODELS.of(accelerator) if isinstance(each, type(engine))]
    if any(each is not engine and each.optimizer is not None for each in engines):
        _refuse("more than one DeepSpeed engine that is trained")


def _refuse(found: str, remedy: str | None = None) -> None:
    raise ConfigurationError(
        "accelerator", found=f"{found}, which is not available yet", remedy=remedy
    )
