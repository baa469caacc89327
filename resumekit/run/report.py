"""What a resume found and did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resumekit.capture import Difference
from resumekit.state import CaptureLine


@dataclass(frozen=True)
class Rejection:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class ResumeReport:
    """What ``resume()`` found and did.

    Args:
        resumed: whether a checkpoint was loaded; False for a fresh start.
        step: the optimizer step that the run continues from; 0 for a fresh start.
        path: the checkpoint's directory, or None.
        components: each component of the checkpoint and how exactly it came back.
        differences: what differs between the run that saved and this one.
        changes: what became of the ranks' own states where the number of ranks has changed.
        not_needed: what the checkpoint holds for the loop of another framework, and was left out.
        rejected: newer checkpoints that were passed over.
        finished: why the run is over, if it is.
    """

    resumed: bool
    step: int = 0
    path: Path | None = None
    components: tuple[CaptureLine, ...] = ()
    differences: tuple[Difference, ...] = ()
    changes: tuple[str, ...] = ()
    not_needed: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    finished: str | None = None

    def __str__(self) -> str:
        if not self.resumed:
            return "starting"
        if self.finished is not None:
            place = f"step {self.step} ({self.finished})"
            return f"nothing to do, the run finished at {place}: {self.path}"
        return f"resuming at step {self.step} from {self.path}"
