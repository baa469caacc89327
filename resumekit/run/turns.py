"""Which of several loops leads: a save is made when that one is asked for its next batch.

A resumed process runs the user's code from the top. It comes to the place of a checkpoint only if
that place is the first at which a loop is asked for a batch. Where several loops are under way at
once, by hand or one inside the other, that is so for one of them:

- the loop that has the horizon, ``batches(..., epochs=E)`` or ``batches(..., steps=N)``;
- inside ``epochs()`` the one that was asked first in the epoch and is not used up yet.

The others follow it; a save that comes due while one of them is asked waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resumekit.errors import LoopError


class Turns:
    """The loops of the epoch under way, by the names of their loaders; a part of a run's state.

    Attributes:
        main: the loaders of the loop that has the horizon; empty inside ``epochs()``.
        asked: inside ``epochs()``, the loaders of this epoch in the order they were asked first.
    """

    def __init__(self) -> None:
        self.main: tuple[str, ...] = ()
        self.asked: list[str] = []
        self._over: set[str] = set()  # used up in this epoch
        self._fetched: set[str] = set()  # in this epoch, by this process

    @property
    def leader(self) -> str | None:
        """The first loader of the loop that leads, or None while none is under way."""
        if self.main:
            return self.main[0]
        return next(iter(self.under_way), None)

    @property
    def under_way(self) -> list[str]:
        """Inside ``epochs()``, the loaders that were asked in this epoch and are not used up."""
        return [name for name in self.asked if name not in self._over]

    def ask(self, names: Sequence[str], *, follows: bool) -> bool:
        """A loop is asked for a batch.

        Args:
            names: its loaders.
            follows: it never leads.

        Returns:
            False if it has none: its part of the epoch was used up before the checkpoint.

        Raises:
            LoopError: a resumed process could not come to this place again.
        """
        if names[0] in self._over and not self._fetched:
            return False
        if not self.main and not follows:
            self._take_place(names)
        leader = self.leader
        if leader not in names and leader not in self._fetched:
            raise LoopError(
                f"batches(name={names[0]!r})",
                found="asked for a batch before the loop that leads"
                if leader is None
                else f"asked for a batch before {leader!r}, which leads",
                expected="first of all in each iteration a batch of the loop itself",
                remedy="Call next() on it inside the loop, after the loop's own batch",
            )
        return True

    def _take_place(self, names: Sequence[str]) -> None:
        is_second_pass = names[0] in self._over
        self._over.difference_update(names)
        self.asked.extend(name for name in names if name not in self.asked)
        if is_second_pass and not set(self.asked) - self._over - set(names):
            raise LoopError(
                f"batches(name={names[0]!r})",
                found="gone through a second time in one epoch",
                expected="once, unless another loop is under way around it",
                remedy="Give the second loop a name of its own",
            )

    def leads(self, names: Sequence[str]) -> bool:
        """Whether the loop over these loaders leads."""
        return self.leader in names

    def fetched(self, names: Iterable[str]) -> None:
        """A batch goes to the loop: from here on the loops stand where they stood."""
        self._fetched.update(names)

    def ended(self, names: Iterable[str]) -> None:
        """A loop inside ``epochs()`` has used up its loaders."""
        self._over.update(names)

    def is_alone(self, names: Iterable[str]) -> bool:
        """Whether this epoch had no other loop yet."""
        return set(self.asked) == set(names) and not self._over

    def next_epoch(self) -> None:
        """An epoch of ``epochs()`` ends."""
        self.asked = []
        self._over.clear()
        self._fetched.clear()

    def state_dict(self) -> dict[str, Any]:
        """The loops of the epoch under way."""
        return {"asked": list(self.asked), "over": sorted(self._over)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the loops of an interrupted epoch."""
        self.asked = list(state["asked"])
        self._over = set(state["over"])
