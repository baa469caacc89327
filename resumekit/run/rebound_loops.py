"""Variables that training has rebound to another loader's batches, which no checkpoint can hold.

The position of each loader is saved under its name. Which loop a variable, an attribute or an item
refers to is not: a resumed launch has what the code before the first batch binds there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import ReferenceType, ref

from resumekit.capture import Walk
from resumekit.data import Source
from resumekit.run.loops import Batches, Epochs
from resumekit.state import CaptureLine, Fidelity

_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_ITEMS = 1000  # of a container that is looked through


@dataclass(frozen=True)
class BoundLoop:
    """The loop that a variable refers to, without keeping it alive.

    Args:
        reference: the loop.
        sources: the loaders that it draws from.
    """

    reference: ReferenceType[Batches]
    sources: tuple[Source, ...]

    @classmethod
    def of_loop(cls, loop: Batches) -> BoundLoop:
        return cls(ref(loop), loop.sources)

    def is_same(self, other: BoundLoop | None) -> bool:
        """Whether both refer to one loop."""
        return other is not None and self.reference() is other.reference()

    def draws_as(self, other: BoundLoop | None) -> bool:
        """Whether both give the same batches: they draw from the same loaders."""
        if other is None or len(self.sources) != len(other.sources):
            return False
        return all(a is b for a, b in zip(self.sources, other.sources, strict=True))


@dataclass(frozen=True)
class BoundLoops:
    """All loops that variables, attributes and items refer to, by path.

    Args:
        loops: by path.
        paths: those of all values that were looked at.
    """

    loops: Mapping[str, BoundLoop] = field(default_factory=dict)
    paths: frozenset[str] = frozenset()

    @classmethod
    def among(cls, walk: Walk, variables: Mapping[str, Any]) -> BoundLoops:
        """Those that a walk has found, or that are items of variables; also items of containers.

        Args:
            walk: of the user state.
            variables: by path. Those that contain loops are no user state.
        """
        values = {path: each.value for path, each in walk.seen.items()}
        values.update((path, each) for path, each in variables.items() if has_loop(each))
        loops = {path: each for key, value in values.items() for path, each in _loops(key, value)}
        return cls({p: BoundLoop.of_loop(e) for p, e in loops.items()}, frozenset(values))


def _loops(path: str, value: Any) -> Iterator[tuple[str, Batches]]:
    if isinstance(value, Batches):
        yield path, value
    elif type(value) in _CONTAINERS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in islice(items, _MAX_ITEMS):
            if isinstance(each, Batches):
                yield f"{path}[{key!r}]", each


def has_loop(value: Any) -> bool:
    """Whether it is a list or the like of the run's own loops: their positions are saved."""
    if type(value) not in _CONTAINERS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(each, (Batches, Epochs)) for each in islice(items, _MAX_ITEMS))


class ReboundLoops:
    """Compares the loops that variables refer to with those that a resumed launch would have."""

    def __init__(self) -> None:
        self._script: BoundLoops | None = None  # what the code before the loop binds
        self._at_epoch = BoundLoops()
        self._expected: dict[str, BoundLoop] | None = None  # inside an epoch
        self._paths: frozenset[str] = frozenset()

    def begin_epoch(self, now: BoundLoops) -> None:
        """``epochs()`` gives an epoch."""
        self._script = now if self._script is None else self._script
        self._at_epoch = now

    def end_epoch(self) -> None:
        """``epochs()`` is asked for the next epoch."""
        self._expected = None

    def enter(self, now: BoundLoops) -> None:
        """A loop is asked for its first batch: a resume runs the code before it again.

        What that code has bound since the epoch began, it binds again. All else is as the script
        binds it before the first epoch.
        """
        if self._script is None:  # there is no epochs()
            self._script = self._at_epoch = now
        if self._expected is None:
            self._expected, self._paths = dict(self._script.loops), now.paths
            changed = {
                path: each
                for path, each in now.loops.items()
                if not each.is_same(self._at_epoch.loops.get(path))
            }
            self._at_epoch = BoundLoops()
        else:  # a further loop of the epoch, and the code between the two
            changed = {p: each for p, each in now.loops.items() if p not in self._paths}
        self._expected.update(changed)

    def lines(self, now: BoundLoops) -> Iterator[CaptureLine]:
        """A line for each path that refers to another loop than it would after a resume."""
        script = {} if self._script is None else self._script.loops
        expected = script if self._expected is None else self._expected
        for path, each in now.loops.items():
            loop = each.reference()
            if loop is None or loop.needs_no_variable:
                continue
            if not each.draws_as(expected.get(path)):
                reason = (
                    "training rebound it to other batches(); create all of them before the loop"
                )
                yield CaptureLine(path, Fidelity.LOST, f"{reason} and choose by a number")
