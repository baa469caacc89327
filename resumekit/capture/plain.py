"""Plain values that user code counts up in attributes, and that nobody saves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set)

_MAX_COMPARED = 64  # items of a container; a longer one counts as changed when its length has


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
    if type(value) in _CONTAINERS:
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return all(type(each) in _SCALARS for each in items[:_MAX_COMPARED])
    return type(value) in _SCALARS


def _gist(value: Any) -> Any:
    """What two equal values have in common, and most different ones have not."""
    if type(value) not in _CONTAINERS:
        return value
    return (len(value), value.copy() if len(value) <= _MAX_COMPARED else None)
