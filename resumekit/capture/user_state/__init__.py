"""User state: what attributes of modules, callbacks, datasets and other objects hold."""

from resumekit.capture.user_state.exclusions import attributes_set_in
from resumekit.capture.user_state.value_types import is_object_of_library, is_user_object

__all__ = ["attributes_set_in", "is_object_of_library", "is_user_object"]
