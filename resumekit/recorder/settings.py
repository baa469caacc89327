"""What the judge asks of the recorder in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RecorderSettings:
    """Settings of one launch, as JSON in the list of activations.

    Args:
        directory: where each process writes its records.
        positions: a directory with one file per rank: the known weights of this run, by step;
            empty in a launch that continues nothing.
        kill: the point at which a process kills itself, as ``KillPoint`` reads it.
        digest_every: states are digested at every n-th step.
    """

    directory: str
    positions: str = ""
    kill: str = ""
    digest_every: int = 1

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> RecorderSettings:
        """The settings in a list of activations."""
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the list of activations."""
        return asdict(self)

    def positions_of(self, rank: int) -> Path | None:
        """The known weights of a rank; None when the launch continues nothing."""
        return Path(self.positions) / f"rank-{rank:05d}.json" if self.positions else None
