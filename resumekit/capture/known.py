"""Objects of known classes inside a framework's own state, as plain values and back."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from resumekit.capture.restore import class_name
from resumekit.errors import StateMismatchError, UnsupportedValueError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, np.ndarray, np.generic)


class Known(NamedTuple):
    """What stands for an object: the name of its class, and what it is made of."""

    kind: str
    content: Any


class KnownObjects:
    """Takes objects of known classes apart, anywhere in a nested state, and makes them again.

    A framework's state is meant for pickle, which may name any class. Here the classes are those
    given, beside ``torch.Size`` and ``torch.dtype``: an enum is its value, any other object is its
    attributes, and no code of its class runs.

    Args:
        *kinds: the classes, each with a ``__name__`` of its own.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in (*kinds, torch.Size, torch.dtype)}

    def plain(self, value: Any, *, where: str) -> Any:
        """The value with every object taken apart; tensors stay the same ones.

        Every mapping becomes a dict.

        Args:
            value: dicts, lists, tuples, plain values, tensors, arrays and known objects.
            where: what the value is called in an error.

        Raises:
            UnsupportedValueError: an object of another class; names the place.
        """
        if self._kinds.get(type(value).__name__) is type(value):
            return Known(type(value).__name__, self.plain(_content(value), where=where))
        if isinstance(value, Mapping):
            return {key: self.plain(each, where=f"{where}[{key!r}]") for key, each in value.items()}
        if type(value) in (list, tuple):
            items = enumerate(value)
            return type(value)(self.plain(each, where=f"{where}[{i}]") for i, each in items)
        if isinstance(value, Enum) or not isinstance(value, _PLAIN):
            raise UnsupportedValueError(
                where,
                found=f"an object of class {class_name(value)}",
                expected=f"plain values, tensors, or one of {', '.join(sorted(self._kinds))}",
            )
        return value

    def live(self, value: Any) -> Any:
        """The inverse of ``plain``, also after the value was stored and read back.

        Raises:
            StateMismatchError: an object of a class that is not known here.
        """
        if isinstance(value, dict):
            return {key: self.live(each) for key, each in value.items()}
        if getattr(value, "_fields", None) == Known._fields:
            if value.kind not in self._kinds:
                raise StateMismatchError(
                    "the checkpoint",
                    found=f"an object of class {value.kind}",
                    expected=f"one of {', '.join(sorted(self._kinds))}",
                )
            return _made(self._kinds[value.kind], self.live(value.content))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.live, value))
        return value


def _content(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.Size):
        return list(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else vars(value)


def _made(kind: type, content: Any) -> Any:
    if kind is torch.dtype:
        return {str(each).removeprefix("torch."): each for each in _dtypes()}[content]
    if issubclass(kind, (Enum, torch.Size)):
        return kind(content)
    made = object.__new__(kind)
    vars(made).update(content)
    return made


def _dtypes() -> list[torch.dtype]:
    return [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
