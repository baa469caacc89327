"""Finds the prefixes that parameter names have on one side only: ``module.``, ``model.``."""

from __future__ import annotations

from collections.abc import Hashable, Mapping


def find_prefixes(
    first: Mapping[str, Hashable], second: Mapping[str, Hashable]
) -> tuple[str, str] | None:
    """The prefixes of the names on each side, without which all names are the same.

    Args:
        first: what each name on the first side stands for: its type and shape.
        second: the same on the second side.

    Returns:
        The two prefixes; None where no pair matches all names one to one, each with the same type
        and shape, or where they are the same as they are.
    """
    if first.keys() == second.keys() or len(first) != len(second) or not first:
        return None
    name = min(first)
    for other in sorted(second, key=len):
        prefixes = _prefixes(name, other)
        if first[name] == second[other] and _match(first, second, prefixes):
            return prefixes
    return None


def without_prefix(name: str, prefix: str) -> str:
    """The name without a prefix that it may have."""
    return name.removeprefix(prefix)


def _prefixes(name: str, other: str) -> tuple[str, str]:
    """What comes before the longest common ending of two dotted names."""
    parts, others = name.split("."), other.split(".")
    while parts and others and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return "".join(f"{part}." for part in parts), "".join(f"{part}." for part in others)


def _match(
    first: Mapping[str, Hashable], second: Mapping[str, Hashable], prefixes: tuple[str, str]
) -> bool:
    mine, theirs = prefixes
    for name, kind in first.items():
        if not name.startswith(mine):
            return False
        other = theirs + name.removeprefix(mine)
        if other not in second or second[other] != kind:
            return False
    return True
