"""How the ways in which a checkpoint does not fit the live objects are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from torch import Tensor

from resumekit.errors import StateMismatchError
from resumekit.serialization import FlatPart

# Renamed layers keep most of their name; below this share of common characters it is another one.
_LIKELY_RENAME = 0.5
# Names are compared for this many; with a whole model renamed, every pair would take minutes.
_MOST_SEARCHED, _MOST_CANDIDATES = 8, 500


@dataclass(frozen=True)
class Mismatch:
    """One thing that does not fit.

    Args:
        where: a name inside the component, or ``""`` for the component itself.
        found: what the checkpoint holds.
        expected: what this run has.
        remedy: what helps, where there is something better than the general advice.
    """

    where: str
    found: str
    expected: str
    remedy: str | None = None


def refuse(key: str, mismatches: Sequence[Mismatch], *, remedy: str) -> None:
    """Raises StateMismatchError for the first mismatch and counts the others; none, no error.

    Args:
        key: the component's key.
        mismatches: what does not fit.
        remedy: what helps where the mismatch has no remedy of its own.
    """
    if not mismatches:
        return
    first, others = mismatches[0], [each.where for each in mismatches[1:]]
    expected = first.expected
    if others:
        shown = ", ".join(others[:3]) + (", .." if len(others) > 3 else "")
        expected += f" (and {len(others)} more that do not fit: {shown})"
    raise StateMismatchError(
        f"{key}: {first.where}" if first.where else key,
        found=first.found,
        expected=expected,
        remedy=first.remedy or remedy,
    )


def require_fields(key: str, state: Any, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raises StateMismatchError unless the state is a dict with these fields of these types."""
    if not isinstance(state, dict):
        raise StateMismatchError(
            key, found=f"{describe(state)} in the checkpoint", expected="a dict"
        )
    for name, kind in fields.items():
        if not isinstance(state.get(name), kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise StateMismatchError(
                f"{key}: {name}",
                found=describe(state[name]) if name in state else "missing",
                expected=" or ".join(each.__name__ for each in kinds),
                remedy="The checkpoint was not written by this kind of component",
            )


def class_name(value: Any) -> str:
    """The full dotted name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_same_class(name: str, other: str) -> bool:
    """Whether two full names mean one class.

    Libraries move classes between their own modules, and a script's classes live in ``__main__`` or
    in a module, as it happens to be started: only the package and the class are compared.
    """
    package, _, kind = name.partition(".")
    other_package, _, other_kind = other.partition(".")
    is_script = "__main__" in (package, other_package)
    same_package = package == other_package or is_script
    return same_package and kind.rpartition(".")[2] == other_kind.rpartition(".")[2]


def describe(value: Any) -> str:
    """A few words for a value in an error: a tensor's dtype and shape, or a type."""
    if isinstance(value, (Tensor, FlatPart)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


def name_mismatches(
    saved: Mapping[str, str], live: Mapping[str, str], *, noun: str = "parameter"
) -> list[Mismatch]:
    """The names that only one side has; a likely rename is told with both names.

    Args:
        saved: a description (see ``describe``) of each entry in the checkpoint, by name.
        live: the same of this run.
        noun: what an entry is called.
    """
    missing = [name for name in live if name not in saved]
    unexpected = [name for name in saved if name not in live]
    found: list[Mismatch] = []
    for index, name in enumerate(missing):
        twin = None
        if index < _MOST_SEARCHED:
            alike = [other for other in unexpected if saved[other] == live[name]]
            twin = _likely_twin(name, alike[:_MOST_CANDIDATES])
        if twin is None:
            found.append(
                Mismatch(name, f"this {noun} is not in the checkpoint", f"{live[name]}, as here")
            )
            continue
        unexpected.remove(twin)
        found.append(
            Mismatch(
                name,
                f"the checkpoint has no such {noun}, but has {twin!r} of the same kind",
                f"{name!r}",
                remedy=f"Give {name!r} its old name {twin!r} back",
            )
        )
    found += [
        Mismatch(name, f"the checkpoint has this {noun} ({saved[name]})", f"no such {noun}")
        for name in unexpected
    ]
    return found


def _likely_twin(name: str, candidates: Iterable[str]) -> str | None:
    def likeness(candidate: str) -> float:
        return SequenceMatcher(None, name, candidate).ratio()

    best = max(candidates, key=likeness, default=None)
    return best if best is not None and likeness(best) >= _LIKELY_RENAME else None
