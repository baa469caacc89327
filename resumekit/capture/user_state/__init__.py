"""User state: what attributes of modules, callbacks, datasets and other objects hold."""

from __future__ import annotations

from resumekit.capture.user_state.content import content_digest
from resumekit.capture.user_state.leaves import is_user_object
from resumekit.capture.user_state.library_code import attributes_set_by, attributes_set_in
from resumekit.capture.user_state.models import attribute_components, trained_parameters
from resumekit.capture.user_state.slots import Holder
from resumekit.capture.user_state.tracker import UserState

__all__ = [
    "Holder",
    "UserState",
    "attribute_components",
    "attributes_set_by",
    "attributes_set_in",
    "content_digest",
    "is_user_object",
    "trained_parameters",
]
