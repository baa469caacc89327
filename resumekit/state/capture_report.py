"""What a checkpoint holds of each component, and how exactly that is restored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from resumekit.errors import InexactError


class SharingPattern(str, Enum):
    """How a component's state is distributed over the ranks; it alone decides who writes."""

    GLOBAL = "global"  # one state for the job, held by rank 0
    REPLICATED = "replicated"  # the same state on every rank, written once
    PER_RANK = "per_rank"  # every rank has its own
    PER_GROUP = "per_group"  # one state for each process group, the same on all of its ranks
    PER_NODE = "per_node"  # one state for each node, the same on all of its ranks
    SHARDED = "sharded"  # every rank holds a part of one logical state


class Fidelity(str, Enum):
    """How a component is restored, from the best to the worst."""

    EXACT = "exact"  # the same bits
    EQUIVALENT = "equivalent"  # the same distribution
    UNKNOWN = "unknown"  # nothing shows whether it changes, or whether it is restored
    LOST = "lost"  # not at all


@dataclass(frozen=True)
class CaptureLine:
    """One line of the capture report.

    Args:
        key: the component, or what is not in the checkpoint.
        fidelity: how it is restored; None where the run has no such state.
        reason: why it is not exact.
        sharing_pattern: the component's.
        is_hint: a warning that ``strict=True`` accepts: the source could not be read.
        is_at_source: about a location in the user's source; the reason is the whole message.
    """

    key: str
    fidelity: Fidelity | None
    reason: str = ""
    sharing_pattern: SharingPattern | None = None
    is_hint: bool = False
    is_at_source: bool = False

    def __str__(self) -> str:
        if self.is_at_source:
            return f"{self.key}: {self.reason}"
        word = self.fidelity.value if self.fidelity else "none"
        return f"{self.key}: {word}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class CaptureReport:
    """What a checkpoint of this run will hold and how exactly each part is restored."""

    lines: tuple[CaptureLine, ...]

    @property
    def inexact(self) -> tuple[CaptureLine, ...]:
        """The lines that are present and not exact."""
        return tuple(line for line in self.lines if line.fidelity not in (None, Fidelity.EXACT))

    def require_exact(self) -> None:
        """Raises InexactError when any part of the run would not be restored exactly."""
        refused = [line for line in self.inexact if not line.is_hint]
        if refused:
            raise InexactError(
                "strict=True",
                found="; ".join(map(str, refused)),
                expected="every part of the run exact",
                remedy="Follow the reasons, or drop strict",
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {
            line.key: {
                "fidelity": line.fidelity.value if line.fidelity else None,
                "reason": line.reason,
            }
            for line in self.lines
        }

    def __str__(self) -> str:
        return "; ".join(str(line) for line in self.lines)
