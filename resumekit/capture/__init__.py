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

from resumekit.capture.attributes import AttributeState
from resumekit.capture.components import (
    rank_buffer_components,
    registered_components,
    state_components,
)
from resumekit.capture.extras import Extras
from resumekit.capture.fingerprint import (
    Difference,
    Severity,
    differences,
    fingerprint,
)
from resumekit.capture.generator import generator_state, set_generator_state
from resumekit.capture.gradient_buckets import bucket_components, buckets_of, ddp_around
from resumekit.capture.gradients import (
    AccumulatedGradients,
    gradient_components,
    holds_gradients,
    require_gradients,
)
from resumekit.capture.horizon import horizon
from resumekit.capture.model import ModelState
from resumekit.capture.named import by_class_and_ordinal, by_key, named_states, one_or_named
from resumekit.capture.names import clean_name, clean_names, parameter_names, unwrapped
from resumekit.capture.objects import ObjectState
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.optimizer_parameters import parameter_components, uncaptured_parameters
from resumekit.capture.rng import RngState
from resumekit.capture.scaler import ScalerState
from resumekit.capture.scheduler import SchedulerState
from resumekit.capture.user_state import (
    Holder,
    UserState,
    attribute_components,
    attributes_set_by,
    content_digest,
    trained_parameters,
)

__all__ = [
    "AccumulatedGradients",
    "AttributeState",
    "Difference",
    "Extras",
    "Holder",
    "ModelState",
    "ObjectState",
    "OptimizerState",
    "RngState",
    "ScalerState",
    "SchedulerState",
    "Severity",
    "UserState",
    "attribute_components",
    "attributes_set_by",
    "bucket_components",
    "buckets_of",
    "by_class_and_ordinal",
    "by_key",
    "clean_name",
    "clean_names",
    "content_digest",
    "ddp_around",
    "differences",
    "fingerprint",
    "generator_state",
    "gradient_components",
    "holds_gradients",
    "horizon",
    "named_states",
    "one_or_named",
    "parameter_components",
    "parameter_names",
    "rank_buffer_components",
    "registered_components",
    "require_gradients",
    "set_generator_state",
    "state_components",
    "trained_parameters",
    "uncaptured_parameters",
    "unwrapped",
]
