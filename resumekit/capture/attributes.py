"""Plain attributes of a framework's object: counters, flags, sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from resumekit.capture.restore import require_fields
from resumekit.errors import StateMismatchError


class AttributeState:
    """Named attributes of one object, as they are; whoever holds the object finds them there again.

    Args:
        given: the object; its attributes can be set.
        names: of the attributes: plain values or tensors.
        key: the component's key, for errors.
    """

    def __init__(self, given: Any, names: Iterable[str], *, key: str) -> None:
        self._given = given
        self._names = tuple(names)
        self.key = key

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies."""
        return {name: getattr(self._given, name) for name in self._names}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: an attribute is missing.
        """
        require_fields(self.key, state, {})
        missing = [name for name in self._names if name not in state]
        if missing:
            raise StateMismatchError(
                self.key,
                found=f"the checkpoint has no {', '.join(missing)}",
                expected=", ".join(self._names),
                remedy="The checkpoint was written with another version of the framework",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Sets every attribute; a tensor goes to the device of the one that it replaces.

        Returns:
            What did not come back exactly: nothing.
        """
        for name in self._names:
            live, value = getattr(self._given, name), state[name]
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                value = value.to(live.device)
            setattr(self._given, name, value)
        return ()
