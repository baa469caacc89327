"""What is to be tested: a training function, its options, and where it is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from resumekit.testing.task import target_of


@dataclass(frozen=True)
class KillPoint:
    """A place in a run at which its processes are killed by SIGKILL.

    Args:
        event: ``"step"``: the step was counted, and nothing of it is saved yet; ``"checkpoint"``:
            the checkpoint of that step was committed a moment ago.
        number: the optimizer step.
        rank: the rank that dies first; None lets whichever comes there first.
    """

    event: Literal["step", "checkpoint"]
    number: int
    rank: int | None = None

    @classmethod
    def step(cls, number: int, *, rank: int | None = None) -> KillPoint:
        """Right after a step, before anything that follows it."""
        return cls("step", number, rank)

    @classmethod
    def checkpoint(cls, number: int, *, rank: int | None = None) -> KillPoint:
        """Right after the checkpoint of a step was committed."""
        return cls("checkpoint", number, rank)

    def __str__(self) -> str:
        return f"{self.event}:{self.number}"


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
