"""Plain values that user code counts up in attributes, and that nobody saves."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)

_MAX_COMPARED = 64  # values in a container; a longer one counts as changed when their number has
_MAX_DEPTH = 8


class PlainValues:
    """Sees which attributes with plain values have changed since it was built.

    Args:
        holders: the objects by name.
        left_out: of some of them, attributes that are not looked at.
        known: dicts and lists that are saved elsewhere.
    """

    def __init__(
        self,
        holders: Mapping[str, Any],
        *,
        left_out: Mapping[str, Collection[str]] = MappingProxyType({}),
        known: Iterable[Any] = (),
    ) -> None:
        self._holders = dict(holders)
        self._left_out = dict(left_out)
        self._known = [each for each in known if type(each) in _CONTAINERS]
        self._before = self._values()

    def changed(self) -> list[str]:
        """The names of those that changed, ``holder.attribute``; each is given once."""
        now = self._values()
        names = [n for n, value in now.items() if n not in self._before or self._before[n] != value]
        for name in names:
            holder, _, attribute = name.rpartition(".")
            self._left_out[holder] = {*self._left_out.get(holder, ()), attribute}
        return names

    def remark(self, *, saved: Callable[[], Collection[str]], remedy: str) -> str:
        """What to tell of values that changed since the last call, and are in no checkpoint.

        Args:
            saved: gives the names of those that are, ``holder.attribute``.
            remedy: where to keep them.
        """
        changed = self.changed()
        lost = sorted(set(changed) - set(saved())) if changed else []
        if not lost:
            return ""
        return (
            f"{', '.join(lost)}: changed in training, in no checkpoint, so a resume begins with "
            f"what the script makes of it; {remedy}"
        )

    def _values(self) -> dict[str, Any]:
        return {
            f"{name}.{attribute}": _gist(value)
            for name, holder in self._holders.items()
            for attribute, value in getattr(holder, "__dict__", {}).items()
            if attribute not in self._left_out.get(name, ())
            and _is_plain(value)
            and not any(value is each for each in self._known)
        }


def _is_plain(value: Any) -> bool:
    leaves = islice(_leaves(value), _MAX_COMPARED)
    return all(type(each) in _SCALARS for each in leaves)


def _gist(value: Any) -> Any:
    """What two equal values have in common, and most different ones have not."""
    if type(value) not in _CONTAINERS:
        return value
    count = sum(1 for _ in _leaves(value))
    return (len(value), count, copy.deepcopy(value) if count <= _MAX_COMPARED else None)


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """What containers hold; one nested too deeply, as a part of itself is, counts as one value."""
    if type(value) not in _CONTAINERS or depth == _MAX_DEPTH:
        yield value
        return
    for each in (*value, *value.values()) if isinstance(value, dict) else value:
        yield from _leaves(each, depth + 1)
