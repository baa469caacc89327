"""The counters of the logical run, as a component of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from resumekit.distributed import World
from resumekit.layout import Shares
from resumekit.run.turns import Turns
from resumekit.state import ComponentState, Progress

T = TypeVar("T")


class Counters(ComponentState):
    """How far the run is, how far it is to go, and whether it is finished.

    Samples and tokens are counted locally and summed over the ranks by ``fold``.

    Attributes:
        finished: why the run is over, or None.
        horizon: what the loop was asked for, e.g. ``{"epochs": 3}``.
        turns: the loops of the epoch under way.
    """

    def __init__(self) -> None:
        self._counts = Progress().as_dict()
        self._local_samples = 0
        self._local_tokens = 0
        self.finished: str | None = None
        self.horizon: dict[str, int] = {}
        self.turns = Turns()
        self._is_within_window = False
        self._window_samples: list[Any] = []
        self._knows_window = True
        self._knew_window = True

    @property
    def progress(self) -> Progress:
        """The counts; samples and tokens as of the last ``fold``."""
        return Progress(**self._counts)

    @property
    def step(self) -> int:
        """The optimizer-step boundaries that were passed."""
        return self._counts["step"]

    def count_batch(self, num_samples: int, *, follows: bool = False) -> None:
        """One batch was handed to the loop, or to what draws from a loader beside it."""
        if not follows:
            self._counts["micro_step"] += 1
        self._local_samples += num_samples
        self._is_within_window = True

    def count_tokens(self, num_tokens: int) -> None:
        """So many tokens were used by this rank."""
        self._local_tokens += num_tokens

    def count_step(self) -> None:
        """One optimizer-step boundary was passed."""
        self._counts["step"] += 1
        self._is_within_window = False
        self._knew_window, self._knows_window = self._knows_window, True

    @property
    def saw_whole_step(self) -> bool:
        """Whether this process has used all batches of the step that was counted last."""
        return self._knew_window

    def samples_so_far(self, num_ranks: int) -> int:
        """The samples of the run; since the last ``fold`` as many on every rank as on this one."""
        return self._counts["samples"] + self._local_samples * num_ranks

    def is_within_window(self) -> bool:
        """Whether batches were used since the last step."""
        return self._is_within_window

    def note_samples(self, indices: Any) -> None:
        """Remembers the samples of the accumulation window under way, for a trace."""
        if indices is not None:
            several = isinstance(indices, (list, tuple))
            self._window_samples.extend(indices if several else [indices])

    def take_samples(self) -> tuple[list[Any], bool]:
        """The samples of the window that ends, and whether this process has seen all of them."""
        samples, self._window_samples = self._window_samples, []
        return samples, self._knew_window

    def move_to(self, epoch: int, batch: int) -> None:
        """The place of the next batch."""
        self._counts["epoch"], self._counts["batch"] = epoch, batch

    def fold(self, world: World, shares: Shares, message: T) -> list[T]:
        """Adds what was used since the last fold, once for ranks of the same data. Collective.

        Args:
            world: the ranks.
            shares: which of them take the same data.
            message: of this rank, for all ranks.

        Returns:
            The messages of all ranks, in rank order.
        """
        used = world.gather((self._local_samples, self._local_tokens, message))
        counted = [used[rank] for rank in shares.first_ranks]
        self._counts["samples"] += sum(samples for samples, _, _ in counted)
        self._counts["tokens"] += sum(tokens for _, tokens, _ in counted)
        self._local_samples = self._local_tokens = 0
        return [each for _, _, each in used]

    def state_dict(self) -> dict[str, Any]:
        """The counts, the horizon, and why the run is over if it is."""
        return {
            "progress": dict(self._counts),
            "horizon": dict(self.horizon),
            "finished": self.finished,
            "loops": self.turns.state_dict(),
            "within_window": self._is_within_window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the counts of a checkpoint."""
        self._counts = Progress.from_dict(state["progress"]).as_dict()
        self._local_samples = self._local_tokens = 0
        self.horizon = dict(state["horizon"])
        self.finished = state["finished"]
        self.turns.load_state_dict(state["loops"])
        self._is_within_window = state["within_window"]
        self._window_samples = []
        self._knows_window = not self._is_within_window
