"""From the live objects of a training run to states that can be stored, and back.

Every class here offers ``state_dict()`` (references to live tensors, no copies),
``check_state_dict(state)`` (raises StateMismatchError before anything is changed) and
``load_state_dict(state)``, which loads in place and gives a tuple of remarks: what did not come
back exactly, in words; it is empty when all did. Some have more:

- ``fingerprint()``: plain values that describe the object, to be compared at a resume;
- ``before_save()``: called on every rank when a save begins; may be collective;
- ``after_resume()``: called on every rank when all components are loaded; may be collective; gives
  remarks;
- ``start_fresh()``: a checkpoint may lack this component; gives the remarks for that case;
- ``configure(transient, limit_bytes)``: takes the options for user state, before training begins;
- ``findings()``: lines for the capture report, for state that is not in the checkpoint;
- ``put_back_with_random()``: called when the random state is set, the last act of a resume, for
  what code before the next batch may change;
- ``fidelity``: how exactly the state comes back as far as is known by now, and the reason;
- ``comparable_state()``: the state without what was read from a clock, for the judge;
- ``resplit_state_dict(states, change)``: the state of one rank is not lost when the number of ranks
  changes. ``states`` holds the states of some former ranks by rank: always rank 0's, that of
  ``change.model_rank``, and those of ``change.inherited``, which no other rank was given (each
  former rank is inherited by exactly one). It changes nothing, and gives this rank's state and the
  remarks about it; the state is then checked and loaded like any other. Without this method a
  PER_RANK component is refused by name when the number of ranks has changed.
"""

from __future__ import annotations

from resumekit.capture.averages import ObjectState
from resumekit.capture.components import (
    rank_buffer_components,
    registered_components,
    state_components,
)
from resumekit.capture.ddp_buckets import (
    GRADIENT_BUCKETS,
    bucket_components,
    buckets_of,
    ddp_around,
)
from resumekit.capture.extras import AttributeState, Extras, KnownObjects
from resumekit.capture.fingerprint import Difference, Severity, differences, fingerprint
from resumekit.capture.fsdp1 import FlatModelState
from resumekit.capture.gradients import (
    AccumulatedGradients,
    gradient_components,
    holds_gradients,
    require_gradients,
)
from resumekit.capture.model import IN_FP32, RANK_BUFFERS, TRAINED_IN, ModelState
from resumekit.capture.naming import (
    by_class_and_ordinal,
    by_key,
    clean_name,
    clean_names,
    named_states,
    one_or_named,
    parameter_names,
    unwrapped,
    wrapped_attribute,
)
from resumekit.capture.not_given import REMEDIES, Given, Unconfirmed, not_given, slot_of
from resumekit.capture.optimizer import OptimizerState, hyperparameters, inherits_load, is_host_step
from resumekit.capture.optimizer_parameters import parameter_components, uncaptured_parameters
from resumekit.capture.pipeline import merged, part_of
from resumekit.capture.restore import (
    Mismatch,
    Restorer,
    class_name,
    describe,
    fits,
    is_same_class,
    pairs_of,
    refuse,
    require_fields,
)
from resumekit.capture.rng import (
    GENERATOR_KINDS,
    RngState,
    generator_state,
    set_generator_state,
    states_of_new_rank,
)
from resumekit.capture.scaler import ScalerState
from resumekit.capture.scheduler import SchedulerState, horizon
from resumekit.capture.unchanged import PYTHON_WORDS, NumpyState, PythonState
from resumekit.capture.user_state import (
    Holder,
    UserState,
    attribute_components,
    attributes_set_by,
    content_digest,
    trained_parameters,
)

__all__ = [
    "GENERATOR_KINDS",
    "GRADIENT_BUCKETS",
    "IN_FP32",
    "PYTHON_WORDS",
    "RANK_BUFFERS",
    "REMEDIES",
    "TRAINED_IN",
    "AccumulatedGradients",
    "AttributeState",
    "Difference",
    "Extras",
    "FlatModelState",
    "Given",
    "Holder",
    "KnownObjects",
    "Mismatch",
    "ModelState",
    "NumpyState",
    "ObjectState",
    "OptimizerState",
    "PythonState",
    "Restorer",
    "RngState",
    "ScalerState",
    "SchedulerState",
    "Severity",
    "Unconfirmed",
    "UserState",
    "attribute_components",
    "attributes_set_by",
    "bucket_components",
    "buckets_of",
    "by_class_and_ordinal",
    "by_key",
    "class_name",
    "clean_name",
    "clean_names",
    "content_digest",
    "ddp_around",
    "describe",
    "differences",
    "fingerprint",
    "fits",
    "generator_state",
    "gradient_components",
    "holds_gradients",
    "horizon",
    "hyperparameters",
    "inherits_load",
    "is_host_step",
    "is_same_class",
    "merged",
    "named_states",
    "not_given",
    "one_or_named",
    "pairs_of",
    "parameter_components",
    "parameter_names",
    "part_of",
    "rank_buffer_components",
    "refuse",
    "registered_components",
    "require_fields",
    "require_gradients",
    "set_generator_state",
    "slot_of",
    "state_components",
    "states_of_new_rank",
    "trained_parameters",
    "uncaptured_parameters",
    "unwrapped",
    "wrapped_attribute",
]
