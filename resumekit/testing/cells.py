"""What is to be tested: a training function, its options, and where it is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from signal import Signals
from typing import Any, Literal

from resumekit.testing.task import target_of


@dataclass(frozen=True)
class KillPoint:
    """A place in a run at which its processes are killed by SIGKILL, or asked to leave.

    Args:
        event: ``"step"``: the step was counted, and nothing of it is saved yet; ``"checkpoint"``:
            the checkpoint of that step was committed a moment ago.
        number: the optimizer step.
        rank: the rank that dies first; None lets whichever comes there first.
        signal: ``"SIGKILL"``, or one that asks the run to leave: then the rank gets it there, and
            every rank must end with the exit status ``128 +`` its number.
    """

    event: Literal["step", "checkpoint"]
    number: int
    rank: int | None = None
    signal: str = "SIGKILL"

    @classmethod
    def step(cls, number: int, *, rank: int | None = None, signal: str = "SIGKILL") -> KillPoint:
        """Right after a step, before anything that follows it."""
        return cls("step", number, rank, signal)

    @classmethod
    def checkpoint(
        cls, number: int, *, rank: int | None = None, signal: str = "SIGKILL"
    ) -> KillPoint:
        """Right after the checkpoint of a step was committed."""
        return cls("checkpoint", number, rank, signal)

    @classmethod
    def nowhere(cls, signal: str) -> KillPoint:
        """No place of a run: the signal is sent by somebody else."""
        return cls("step", -1, -1, signal)

    @property
    def exit_status(self) -> int:
        """What a process ends with: minus the signal that killed it, or the status it chose."""
        number = int(Signals[self.signal])
        return -number if self.signal == "SIGKILL" else 128 + number

    def __str__(self) -> str:
        place = f"{self.event}:{self.number}"
        return place if self.signal == "SIGKILL" else f"{place}:{self.signal}"


@dataclass(frozen=True)
class Cell:
    """One cell of a test matrix.

    Args:
        function: the training function, ``function(directory, **options)``: at the top level of a
            file, or as ``"module:function"``. Each call must start, resume or do nothing, as the
            directory says.
        options: keyword arguments for it; plain JSON values.
        world_size: ranks; each is a process with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
            ``MASTER_ADDR`` and ``MASTER_PORT`` set.
        kills: one launch is killed at each of these, in this order; the last launch is left alone.
    """

    function: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    kills: tuple[KillPoint, ...] = ()

    @property
    def target(self) -> str:
        """The text by which another process finds the function."""
        return target_of(self.function)

    @property
    def run_key(self) -> str:
        """Equal for cells whose uninterrupted runs are the same."""
        return json.dumps([self.target, dict(self.options), self.world_size], sort_keys=True)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        kills = ", ".join(map(str, self.kills))
        name = self.target.rpartition(":")[2]
        return f"{name}({options}) on {self.world_size} rank(s), killed at [{kills}]"
