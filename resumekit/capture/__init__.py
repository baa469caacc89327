"""From the live objects of a training run to states that can be stored, and back.

Every state class inherits ``ComponentState``, which documents the hooks.
"""

from __future__ import annotations

from resumekit.capture.ddp_buckets import (
    GRADIENT_BUCKETS,
    bucket_components,
    buckets_of,
    ddp_around,
)
from resumekit.capture.fingerprint import SettingChange, Severity, differences, fingerprint
from resumekit.capture.fsdp1 import FlatModelState
from resumekit.capture.global_rng import (
    PYTHON_WORDS,
    NumpyState,
    PythonState,
    accelerator_in_use,
    read_devices,
    set_device_state,
)
from resumekit.capture.gradients import (
    AccumulatedGradients,
    gradient_keys,
    require_gradients,
)
from resumekit.capture.model import (
    IN_FP32,
    RANK_BUFFERS,
    TRAINED_IN,
    ModelState,
    by_class_and_ordinal,
    by_clean_name,
    by_key,
    clean_name,
    frozen_parameters,
    one_or_named,
    unwrapped,
)
from resumekit.capture.nested_state import (
    Mismatch,
    Restorer,
    class_name,
    fits,
    is_same,
    is_same_class,
    merge_states,
    merged_optimizers,
    refuse,
    require_fields,
)
from resumekit.capture.objects import AttributeState, Extras, KnownObjects, ObjectState, ScalerState
from resumekit.capture.optimizer import (
    OptimizerState,
    inherits_load,
    is_host_step,
    pairs_of,
    part_of,
    restore_groups,
)
from resumekit.capture.rng import (
    GENERATOR_TYPES,
    RngState,
    generator_state,
    set_generator_state,
    states_of_new_rank,
)
from resumekit.capture.scheduler import SchedulerState
from resumekit.capture.slots import (
    OPTIMIZER_PARAMETERS,
    attribute_components,
    is_training,
    parameter_components,
    rank_buffer_components,
    registered_components,
    slot_of,
    state_components,
    uncaptured_parameters,
)
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.exclusions import (
    attributes_set_by,
    is_secret,
    trained_parameters,
)
from resumekit.capture.user_state.user_state import UserState, label_of
from resumekit.capture.user_state.value_types import (
    SCALARS,
    fingerprints_of,
    is_code,
    is_left_out,
    is_library,
    is_user_object,
)
from resumekit.capture.user_state.walk import Paths, Seen, Walk, content_digest

__all__ = [
    "GENERATOR_TYPES",
    "GRADIENT_BUCKETS",
    "IN_FP32",
    "OPTIMIZER_PARAMETERS",
    "PYTHON_WORDS",
    "RANK_BUFFERS",
    "SCALARS",
    "TRAINED_IN",
    "AccumulatedGradients",
    "AttributeState",
    "Extras",
    "FlatModelState",
    "Holder",
    "KnownObjects",
    "Mismatch",
    "ModelState",
    "NumpyState",
    "ObjectState",
    "OptimizerState",
    "Paths",
    "PythonState",
    "Restorer",
    "RngState",
    "ScalerState",
    "SchedulerState",
    "Seen",
    "SettingChange",
    "Severity",
    "UserState",
    "Walk",
    "accelerator_in_use",
    "attribute_components",
    "attributes_set_by",
    "bucket_components",
    "buckets_of",
    "by_class_and_ordinal",
    "by_clean_name",
    "by_key",
    "class_name",
    "clean_name",
    "content_digest",
    "ddp_around",
    "differences",
    "fingerprint",
    "fingerprints_of",
    "fits",
    "frozen_parameters",
    "generator_state",
    "gradient_keys",
    "inherits_load",
    "is_code",
    "is_host_step",
    "is_left_out",
    "is_library",
    "is_same",
    "is_same_class",
    "is_secret",
    "is_training",
    "is_user_object",
    "label_of",
    "merge_states",
    "merged_optimizers",
    "one_or_named",
    "pairs_of",
    "parameter_components",
    "part_of",
    "rank_buffer_components",
    "read_devices",
    "refuse",
    "registered_components",
    "require_fields",
    "require_gradients",
    "restore_groups",
    "set_device_state",
    "set_generator_state",
    "slot_of",
    "state_components",
    "states_of_new_rank",
    "trained_parameters",
    "uncaptured_parameters",
    "unwrapped",
]
