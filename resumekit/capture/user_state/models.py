"""The user state of a run's models: what their ``state_dict`` does not hold."""

from __future__ import annotations

from typing import Any

from resumekit.capture.named import by_key
from resumekit.capture.user_state.slots import Holder
from resumekit.capture.user_state.tracker import UserState
from resumekit.contract import Slot, StateComponent

_SUFFIX = "attributes"


def attribute_components(model: Any) -> tuple[StateComponent, ...]:
    """The attributes of modules as components: each rank has its own.

    They are flags (``requires_grad``, ``training``), buffers with ``persistent=False``, and
    attributes. A module with ``get_extra_state`` says itself which of its attributes are state.

    Args:
        model: a module, or a dict of named ones, as the script has made them.
    """
    return tuple(
        UserState(
            {key.replace("/", "."): Holder(module, is_component=True)}, key=f"{key}/{_SUFFIX}"
        ).component()
        for key, module in by_key(Slot.MODEL, model).items()
    )
