"""How many steps and epochs a Trainer is to run, when part of the run lies behind it.

The Trainer counts from its arguments, as if all epochs had the batches that they have now. Of a run
that was begun with another batch size that is wrong: so many steps were made, and the rest of the
epoch under way has as many batches as are left of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Counts(NamedTuple):
    """What ``Trainer.set_initial_training_values`` gives. transformers 5.23 trainer.py."""

    num_train_epochs: int
    num_update_steps_per_epoch: int
    num_examples: int
    num_train_samples: int
    total_train_batch_size: int
    steps_in_epoch: int
    max_steps: int


@dataclass(frozen=True)
class Plan:
    """Where a run stands, and what is left of it.

    Args:
        counts: the Trainer's own numbers, for a run of one geometry.
        accumulation: the batches of an optimizer step.
        step: the optimizer steps that were made.
        epoch: the epoch under way, or the next one.
        num_used: the batches that were used of it.
        num_left: the batches that are left of it; None where nobody can know.
    """

    counts: Counts
    accumulation: int
    step: int
    epoch: int
    num_used: int
    num_left: int | None

    @property
    def batches_to_skip(self) -> int:
        """Where the Trainer goes on counting in the epoch: at the start of a window."""
        return -(-self.num_used // self.accumulation) * self.accumulation

    @property
    def epoch_under_way(self) -> dict[str, int]:
        """The length of the epoch under way, as ``Trainer._run_epoch`` takes it."""
        if self.num_left is None or not self.num_used:
            return {}
        steps_in_epoch = self.batches_to_skip + self.num_left
        return {
            "steps_in_epoch": steps_in_epoch,
            "num_update_steps_per_epoch": -(-steps_in_epoch // self.accumulation),
        }

    def horizon(self, counts: Counts) -> dict[str, int]:
        """What the run is to reach: steps, and epochs where they have a length."""
        steps = {"steps": counts.max_steps}
        return steps if self.num_left is None else {**steps, "epochs": counts.num_train_epochs}

    def changed(self, *, by_steps: bool) -> Counts:
        """The Trainer's numbers for the run as it is, begun in another geometry.

        Args:
            by_steps: the arguments ask for steps; the epochs follow from them.
        """
        counts, num_left = self.counts, self.num_left
        if num_left is None:
            return counts
        per_epoch = counts.num_update_steps_per_epoch
        is_within = self.num_used > 0
        epochs = self.epoch + is_within
        steps = self.step + (-(-num_left // self.accumulation) if is_within else 0)
        if by_steps:
            missing = max(counts.max_steps - steps, 0)
            return counts._replace(num_train_epochs=epochs - (-missing // per_epoch))
        return counts._replace(max_steps=steps + counts.max_steps - epochs * per_epoch)
