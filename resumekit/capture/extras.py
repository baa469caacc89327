"""Values and objects of the user's own that belong to the run's state."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from resumekit.capture.restore import Mismatch, Restorer, describe, refuse, require_fields
from resumekit.state import Stateful


class Extras:
    """The state of a live dict: plain values, and objects with ``state_dict``.

    Objects are loaded in place. A plain value is replaced under its key; a list, dict, set, deque
    or tensor that can hold the saved one is filled in place instead, because other code may hold
    it. A plain value that only the checkpoint has is added.

    Args:
        live: the user's dict; it is read at each save and written at a load.
        key: the component's key, for errors.
    """

    def __init__(self, live: dict[Any, Any], *, key: str = "extras") -> None:
        self.live = live
        self.key = key

    def state_dict(self) -> dict[str, Any]:
        """The values themselves and the objects' states, not copies."""
        return {
            "values": {k: v for k, v in self.live.items() if not isinstance(v, Stateful)},
            "objects": {k: v.state_dict() for k, v in self.live.items() if isinstance(v, Stateful)},
        }

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a key is an object on one side only, or an object refuses its state.
        """
        require_fields(self.key, state, {"values": dict, "objects": dict})
        mismatches = []
        for name, saved in state["objects"].items():
            live = self.live.get(name)
            if not isinstance(live, Stateful):
                found = describe(live) if name in self.live else "nothing"
                mismatches.append(
                    Mismatch(repr(name), "the state of an object in the checkpoint", found)
                )
            elif (check := getattr(live, "check_state_dict", None)) is not None:
                check(saved)
        for name, live in self.live.items():
            if isinstance(live, Stateful) and name not in state["objects"]:
                found = "a plain value" if name in state["values"] else "not in the checkpoint"
                mismatches.append(
                    Mismatch(repr(name), found, f"the state of a {type(live).__name__}")
                )
        remedy = 'Give extras the same objects as before, or pass exclude={"extras"}'
        refuse(self.key, mismatches, remedy=remedy)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Puts every value and object back.

        Returns:
            What did not come back exactly: values that the checkpoint does not have.
        """
        restore = Restorer()
        for name, saved in state["objects"].items():
            self.live[name].load_state_dict(restore(None, saved))
        for name, saved in state["values"].items():
            self.live[name] = _replaced(restore, self.live.get(name), saved)
        return tuple(
            f"{name!r} is not in the checkpoint and keeps its value"
            for name, value in self.live.items()
            if name not in state["values"] and not isinstance(value, Stateful)
        )


def _replaced(restore: Restorer, live: Any, saved: Any) -> Any:
    """The saved value: in the live container if it is of the same kind, else by itself."""
    if isinstance(saved, Tensor):
        return restore(live if isinstance(live, Tensor) else None, saved)
    value = restore(None, saved)
    if type(live) is not type(saved):
        return value
    if isinstance(live, (dict, OrderedDict, defaultdict, Counter, set)):
        live.clear()
        live.update(value)
        return live
    if isinstance(live, (list, deque)):
        live.clear()
        live.extend(value)
        return live
    return value
