"""Changes of the prefixes of parameter names between a checkpoint and a run.

A framework adds a prefix to every name when a user's class holds the model as an attribute
(``self.model = net``), and a wrapper does the same. Names are compared, never shapes: layers that
look alike are not exchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")

# Of the names that `nearest_prefixes` compares; it runs before an error only.
_MOST_PREFIXES = 40


@dataclass(frozen=True)
class Renaming:
    """The names of a checkpoint as this run has them.

    Args:
        prefixes: of the names, saved to live. The longest one counts; "" is one of every name.
        names: every name, saved to live.
    """

    prefixes: Mapping[str, str]
    names: Mapping[str, str]

    @classmethod
    def of(cls, prefixes: Mapping[str, str], saved: Iterable[str]) -> Renaming:
        """The renaming of these names."""
        return cls(prefixes, {name: _replaced(name, prefixes) or name for name in saved})

    def __str__(self) -> str:
        """As a message shows it: ``model.* -> *``."""
        return ", ".join(f"{then}* -> {now}*" for then, now in self.prefixes.items())

    def keys(self, values: Mapping[str, T]) -> dict[str, T]:
        """Values by saved name, by live name."""
        return {self.names.get(name, name): value for name, value in values.items()}

    def listed(self, names: Iterable[str]) -> list[str]:
        """Saved names as live ones."""
        return [self.names.get(name, name) for name in names]

    def path(self, path: str) -> str | None:
        """The path of a module, or of an attribute of one; None for one without a prefix."""
        moved = _replaced(f"{path}." if path else "", self.prefixes)
        return None if moved is None else moved.removesuffix(".")

    def merged_names(self) -> list[str]:
        """Saved names that would get the live name of another one."""
        first: dict[str, str] = {}
        return [then for then, now in self.names.items() if first.setdefault(now, then) != then]


def _replaced(name: str, prefixes: Mapping[str, str]) -> str | None:
    found = max((each for each in prefixes if name.startswith(each)), key=len, default=None)
    return None if found is None else prefixes[found] + name[len(found) :]


def common_prefix_change(saved: Collection[str], live: Collection[str]) -> Renaming | None:
    """The change of one prefix of all names that makes the saved names the live ones.

    There is at most one. What a change leaves of each name is the same, so that two changes differ
    in the length of the new prefix only; then the live names would differ in length in all.

    Returns:
        The renaming; None if there is none, or if the names are equal.
    """
    then, now = _prefix_of_all(saved), _prefix_of_all(live)
    if {name[len(then) :] for name in saved} != {name[len(now) :] for name in live}:
        return None
    then, now = _without_common_end(then, now)
    return Renaming.of({then: now}, saved) if then != now else None


def nearest_prefixes(saved: Collection[str], live: Collection[str]) -> dict[str, str]:
    """The change of one prefix, of some or all names, after which the most names are equal.

    Returns:
        The prefix, saved to live; empty where no change makes a name equal, or several as many.
    """
    then, now = set(saved) - set(live), set(live) - set(saved)
    best, most = set[tuple[str, str]](), 1
    for old in _prefixes(then):
        ends = {name[len(old) :] for name in then if name.startswith(old)}
        for new in _prefixes(now):
            num_equal = sum(name.startswith(new) and name[len(new) :] in ends for name in now)
            if num_equal > most:
                best, most = set(), num_equal
            if num_equal == most:
                best.add(_without_common_end(old, new))
    return dict(best) if len(best) == 1 else {}


def _prefix_of_all(names: Collection[str]) -> str:
    """The longest dotted prefix that all names have; empty, or with a dot at its end."""
    paths = [name.split(".")[:-1] for name in names]
    first, last = min(paths, default=[]), max(paths, default=[])
    common = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(f"{part}." for part, _ in common)


def _without_common_end(then: str, now: str) -> tuple[str, str]:
    """Two dotted prefixes without the parts at their end that are equal."""
    old, new = then.split(".")[:-1], now.split(".")[:-1]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return "".join(f"{part}." for part in old), "".join(f"{part}." for part in new)


def _prefixes(names: Iterable[str]) -> list[str]:
    """The first dotted prefixes of names, the shortest ones first."""
    found = {""}
    for name in names:
        parts = name.split(".")[:-1]
        found |= {"".join(f"{part}." for part in parts[: n + 1]) for n in range(len(parts))}
    return sorted(found, key=lambda each: (each.count("."), each))[:_MOST_PREFIXES]
