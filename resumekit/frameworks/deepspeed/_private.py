"""The names of DeepSpeed that are not documented: the engine's and those of its optimizers.

Names with an underscore, and all that are set, are used through these constants. The others are
plain attributes that are read where they are needed; they are listed so that the probe checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from resumekit.requirements import PrivateName, faults, require

require("deepspeed")

from deepspeed import comm  # noqa: E402
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker  # noqa: E402
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # noqa: E402
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine  # noqa: E402
from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: E402
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # noqa: E402
from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: E402
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402
from deepspeed.utils.tensor_fragment import fragment_address  # noqa: E402

# The constants below are public by their names; these come from DeepSpeed.
__all__ = [
    "BF16_Optimizer",
    "CheckpointEngine",
    "DeepSpeedEngine",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "DynamicLossScaler",
    "FP16_UnfusedOptimizer",
    "LossScaler",
    "ZeroStageEnum",
    "comm",
    "fragment_address",
    "get_cuda_rng_tracker",
]

_ENGINE = "deepspeed 0.19 runtime/engine.py DeepSpeedEngine"
_STAGE_1_AND_2 = "deepspeed 0.19 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed 0.19 runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed 0.19 runtime/bf16_optimizer.py BF16_Optimizer"
_UNFUSED = "deepspeed 0.19 runtime/fp16/unfused_optimizer.py FP16_UnfusedOptimizer"
_PARTITION = "deepspeed 0.19 runtime/zero/partition_parameters.py Init._convert_to_deepspeed_param"
_LINK = "deepspeed 0.19 utils/mixed_precision_linkage.py link_hp_params"


def _listed(source: str, *names: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(name, source) for name in names)


# The norm is set by the next step only, get_global_grad_norm.
GRADIENT_NORM = PrivateName("_global_grad_norm", _ENGINE, is_written=True)
PARAM_SHAPES = PrivateName("_get_zero_param_shapes", _ENGINE, parameters=())
CHECKPOINT_ENGINE = PrivateName("checkpoint_engine", _ENGINE, is_written=True)
SAVES_PARTITIONS = PrivateName("save_non_zero_checkpoint", _ENGINE, is_written=True)
# is_gradient_accumulation_boundary; the first is not in 0.19.0.
IS_MANAGED = PrivateName("managed_gradient_accumulation", _ENGINE, (), is_optional=True)
NUM_UNMANAGED = PrivateName("_unmanaged_backward_count", _ENGINE, is_optional=True)
SET_BOUNDARY = PrivateName("_is_gradient_accumulation_boundary", _ENGINE)

_OF_ENGINE = (
    GRADIENT_NORM,
    PARAM_SHAPES,
    CHECKPOINT_ENGINE,
    SAVES_PARTITIONS,
    IS_MANAGED,
    NUM_UNMANAGED,
    SET_BOUNDARY,
    *_listed(_ENGINE, "param_names", "torch_autocast_z0_gradscaler"),
    PrivateName("set_train_batch_size", _ENGINE, ("train_batch_size",)),
)

# step, independent_gradient_partition_epilogue: which gradients are kept for the next step.
IS_COMPACT = PrivateName("_use_compact_grad_partition_buffer", _STAGE_1_AND_2, ("group_idx",))
# clear_backward_seen_flag, partition_grads.
HAS_REDUCED = PrivateName("_epilogue_ran_this_backward", _STAGE_3)
# The moments of safe_get_full_optimizer_state; else linked at the next step. BF16_Optimizer too.
IS_LINKED = PrivateName("_hp_optimizer_states_linked", _STAGE_1_AND_2, is_written=True)
LINK = PrivateName("_lazy_init_hp_params_optimizer_state", _STAGE_1_AND_2, parameters=())
# Where a parameter's elements are in this rank's partition of its group; None where it has none.
FRAGMENT = PrivateName("_hp_mapping", _LINK)

_IN_GROUPS = (IS_LINKED, LINK, PrivateName("update_lp_params", _STAGE_1_AND_2, parameters=()))

_OF_OPTIMIZERS: Mapping[type, tuple[PrivateName, ...]] = {
    DeepSpeedZeroOptimizer: (
        *_IN_GROUPS,
        IS_COMPACT,
        *_listed(_STAGE_1_AND_2, "bit16_groups", "dp_process_group", "cpu_offload"),
        *_listed(_STAGE_1_AND_2, "micro_step_id", "all_grad_tensors", "averaged_gradients"),
    ),
    BF16_Optimizer: (*_IN_GROUPS, *_listed(_BF16, "bf16_groups", "dp_process_group")),
    DeepSpeedZeroOptimizer_Stage3: (
        HAS_REDUCED,
        *_listed(_STAGE_3, "fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id"),
        *_listed(_STAGE_3, "dp_process_group", "micro_step_id"),
        PrivateName("checkpoint_event_prologue", _STAGE_3, parameters=()),
        PrivateName("checkpoint_event_epilogue", _STAGE_3, parameters=()),
    ),
    FP16_UnfusedOptimizer: _listed(_UNFUSED, "fp16_groups", "fp32_groups", "fused_lamb_legacy"),
}

_OF_CUT_PARAMETERS = (
    *_listed(_PARTITION, "ds_tensor", "ds_shape", "ds_numel", "ds_process_group"),
    PrivateName("partition_numel", _PARTITION, parameters=()),
)


def engine_faults(engine: Any) -> Iterator[str]:
    """What of these names an engine and its optimizer do not have as the tested version does.

    Args:
        engine: what ``deepspeed.initialize`` returns first.
    """
    zero = engine.optimizer
    yield from faults(engine, _OF_ENGINE)
    yield from faults(zero, _OF_OPTIMIZERS.get(type(zero), ()))
    trained = next((each for each in engine.module.parameters() if each.requires_grad), None)
    if trained is None:
        return
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        yield from faults(trained, _OF_CUT_PARAMETERS)
    elif isinstance(zero, (DeepSpeedZeroOptimizer, BF16_Optimizer)) and hasattr(zero, "optimizer"):
        yield from faults(trained, (FRAGMENT,))
