"""A source that draws from another one, and may have taken more from it than it handed out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.data.elastic import RANKS, follow
from resumekit.data.generators import without_prefetch
from resumekit.data.source import Source
from resumekit.data.stream_objects import Follow
from resumekit.state import Fidelity


class OuterSource(Source):
    """Its place is that of the inner source before the first batch that was not handed out.

    What was taken and not handed out stands in its state under ``ahead``: the random state that
    each such batch was fetched from, so that a resume fetches it once more.

    Args:
        loader: what the user gave.
        name: what the run calls it.
        inner: the source that it draws from.
    """

    def __init__(self, loader: Any, name: str, inner: Source) -> None:
        super().__init__(loader, name)
        self._inner = inner

    def follow_objects(self, follow: Follow) -> None:
        """Takes what makes the user state of the objects that the loader calls."""
        self._inner.follow_objects(follow)

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the position and the random numbers in it come back, and why not."""
        return self._inner.fidelity

    @property
    def geometry(self) -> dict[str, Any]:
        """That of the inner source, and what the outer loader makes of it."""
        return {**self._inner.geometry, "outer": self._geometry()}

    def end_epoch(self) -> None:
        """Moves the place to the start of the next epoch."""
        self._inner.end_epoch()  # before its iterator is closed: it sees how far the epoch came
        super().end_epoch()

    def drawn_again(self) -> tuple[Any, ...]:
        """The private generators that are in place already: the order was drawn from them again."""
        return self._inner.drawn_again()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place that a checkpoint holds; it is found when the epoch begins."""
        super().load_state_dict(state)
        if self._pending is None:
            self._inner.end_epoch()  # another loader begins an epoch

    def _fitted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = self._inner
        inner.allowed_changes = self.allowed_changes
        inner.load_state_dict({**state["inner"], **{k: state[k] for k in (RANKS,) if k in state}})
        self.changed, self.changes = inner.changed, inner.changes
        self.unexpected = inner.unexpected
        return follow(
            {**state, "inner": inner.state_dict(), "batch": inner.batch if state["batch"] else 0},
            self._geometry(),
            needed=inner.changed,
            free=inner.free,
            where=self.name,
        )

    def comparable_state(self) -> dict[str, Any]:
        """What two equal runs have in common: the state, without how far ahead workers are."""
        state = self.state_dict()
        if not self._inner.keyed:
            return state
        return {**without_prefetch(state), "inner": without_prefetch(state["inner"])}
