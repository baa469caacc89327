"""Slots that hold one object or several, and the names of those that their owner did not name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from resumekit.capture.names import unwrapped
from resumekit.errors import DeclarationError
from resumekit.state import Slot, Stateful


def by_key(slot: Slot, given: Any) -> dict[str, Any]:
    """The objects of a slot by component key: ``slot`` for one, ``slot/<name>`` for named ones.

    Args:
        slot: the slot.
        given: what the user gave: an object, a mapping of name to object, or None.

    Raises:
        DeclarationError: a list (objects without names could come back swapped), or a name that
            cannot be part of a key, or an object without ``state_dict``.
    """
    if given is None:
        return {}
    key_of_slot = slot.value
    if isinstance(given, (list, tuple, set, frozenset)):
        raise DeclarationError(
            key_of_slot,
            found=f"a {type(given).__name__} of objects without names",
            expected="one object, or a dict of named ones",
            remedy=f'Pass {key_of_slot}={{"first": .., "second": ..}}',
        )
    if isinstance(given, Mapping) and not isinstance(given, Stateful):
        found = {f"{key_of_slot}/{_checked(slot, name)}": value for name, value in given.items()}
    else:
        found = {key_of_slot: given}
    for key, value in found.items():
        if not isinstance(value, Stateful):
            raise DeclarationError(
                key,
                found=f"a {type(value).__name__}",
                expected="an object with state_dict and load_state_dict",
            )
    return found


def named_states(
    slot: Slot, given: Any, wrap: Callable[[Any, str], Stateful]
) -> dict[str, Stateful]:
    """The captured state of each object of a slot, by component key.

    Args:
        slot: the slot.
        given: an object, a mapping of name to object, or None.
        wrap: makes the captured state from an object and its component key.

    Raises:
        DeclarationError: see ``by_key``.
    """
    return {key: wrap(value, key) for key, value in by_key(slot, given).items()}


def one_or_named(objects: Sequence[Any]) -> Any:
    """What a slot takes, from a framework's list: nothing, the one object, or named ones."""
    if len(objects) < 2:
        return objects[0] if objects else None
    return by_class_and_ordinal(objects)


def by_class_and_ordinal(objects: Iterable[Any]) -> dict[str, Any]:
    """Names for objects that a framework keeps in a list: ``Adam-0``, ``Adam-1``, ``Linear-0``."""
    counts: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for each in objects:
        bare = unwrapped(each) if isinstance(each, nn.Module) else each
        kind = type(bare).__name__
        named[f"{kind}-{counts[kind]}"] = each
        counts[kind] += 1
    return named


def _checked(slot: Slot, name: Any) -> str:
    if isinstance(name, str) and name and "/" not in name:
        return name
    raise DeclarationError(
        slot.value, found=f"the name {name!r}", expected="a non-empty string without '/'"
    )
