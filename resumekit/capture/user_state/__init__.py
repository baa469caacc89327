"""User state: what attributes of modules, callbacks, datasets and other objects hold."""

from __future__ import annotations

from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.foreign import trained_parameters
from resumekit.capture.user_state.library_attributes import attributes_set_by, attributes_set_in
from resumekit.capture.user_state.secrets import is_secret
from resumekit.capture.user_state.user_state import (
    UserState,
    label_of,
)
from resumekit.capture.user_state.value_types import (
    SCALARS,
    fingerprints_of,
    is_code,
    is_left_out,
    is_object_of_library,
    is_user_object,
)
from resumekit.capture.user_state.walk import Paths, Seen, Walk, content_digest

__all__ = [
    "SCALARS",
    "Holder",
    "Paths",
    "Seen",
    "UserState",
    "Walk",
    "attributes_set_by",
    "attributes_set_in",
    "content_digest",
    "fingerprints_of",
    "is_code",
    "is_left_out",
    "is_object_of_library",
    "is_secret",
    "is_user_object",
    "label_of",
    "trained_parameters",
]
