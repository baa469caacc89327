"""Objects in the state of an optimizer, such as the projectors of GaLore: their attributes.

Only of a class that needs no call to be made, and that the module of the optimizer's class defines
or imports: there a resume finds it again, whose optimizer has no state yet. A checkpoint names no
module that is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from resumekit.capture.nested_state import Restorer, class_name
from resumekit.capture.user_state.encoding import LiveClasses, can_be_made

_CLASS, _ATTRIBUTES = "object of class", "attributes"


class ObjectsInState:
    """The objects of one optimizer.

    Args:
        optimizer: any.
    """

    def __init__(self, optimizer: Any) -> None:
        self._classes = LiveClasses((optimizer,))

    def as_plain(self, values: Any) -> Any:
        """The values of a parameter's state, each object as its class and its live attributes."""
        if not (isinstance(values, dict) and any(map(self._is_object, values.values()))):
            return values
        return {
            name: {_CLASS: class_name(value), _ATTRIBUTES: vars(value)}
            if self._is_object(value)
            else value
            for name, value in values.items()
        }

    def _is_object(self, value: Any) -> bool:
        kind: Any = type(value)
        may_be = hasattr(value, "__dict__") and can_be_made(kind)
        return may_be and self._classes.get(class_name(value)) is kind

    def not_made(self, values: Any) -> Iterator[tuple[Any, str]]:
        """Those of the saved values of a parameter whose class is not there, with its name."""
        for name, value in values.items() if isinstance(values, dict) else ():
            if _is_plain(value) and self._kind(value) is None:
                yield name, value[_CLASS]

    def _kind(self, saved: dict[str, Any]) -> type | None:
        found = self._classes.get(saved[_CLASS])
        return found if found is not None and can_be_made(found) else None

    def restored(self, live: Any, saved: Any, restore: Restorer) -> Any:
        """The object of a saved value; None where the value is none of an object.

        Args:
            live: the present value, which stays where it is of the same class.
            saved: the value.
            restore: of this load.
        """
        kind = self._kind(saved) if _is_plain(saved) else None
        if kind is None:
            return None
        made = live if type(live) is kind else object.__new__(kind)
        attributes = restore(dict(vars(made)), saved[_ATTRIBUTES])
        vars(made).clear()
        vars(made).update(attributes)
        return made


def _is_plain(saved: Any) -> bool:
    is_dict = isinstance(saved, dict) and saved.keys() == {_CLASS, _ATTRIBUTES}
    return is_dict and isinstance(saved[_CLASS], str) and isinstance(saved[_ATTRIBUTES], dict)
