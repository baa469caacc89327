"""A process that replays steps of a run: where it saves, and when it ends."""

from __future__ import annotations

import atexit
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from resumekit.distributed import World
from resumekit.record.comparison import Comparison, replayed
from resumekit.record.conditions import Header
from resumekit.record.journal import DIRECTORY, Record, find_attempts
from resumekit.replay_plan import ReplayPlan
from resumekit.run.options import Options


class Replay:
    """What a run does otherwise while it is replayed.

    Args:
        plan: which steps.
    """

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self._comparison: Comparison | None = None

    @classmethod
    def of_run(cls, directory: Path) -> Replay | None:
        """The replay of the run in this directory, or None."""
        plan = ReplayPlan.for_run(directory)
        return None if plan is None else cls(plan)

    @property
    def directory(self) -> Path:
        """The run directory to use instead."""
        return Path(self._plan.scratch)

    @staticmethod
    def options(options: Options) -> Options:
        """The options of the run, of which the replay begins anywhere and keeps each checkpoint."""
        return replace(options, resume_from=None, keep_latest=None)

    def note(self, header: Header, record: Record) -> None:
        """Takes a record of the journal."""
        if not self._plan.until_differs:
            return
        if self._comparison is None:
            recorded = find_attempts(Path(self._plan.directory) / DIRECTORY)
            self._comparison = replayed(header, recorded)
        self._comparison.add(record)

    def saves_after(self, step: int) -> bool:
        """Whether the run has a checkpoint of this step, to compare with."""
        return step in self._plan.saved_steps

    def ends_after(self, step: int, world: World) -> bool:
        """Whether this is the last step. Collective."""
        last = self._plan.last_step
        if last is not None and step >= last:
            return True
        if not self._plan.until_differs:
            return False
        differs = self._comparison is not None and self._comparison.difference is not None
        return any(world.gather(differs))

    @staticmethod
    def end_process() -> NoReturn:
        """Ends this process as after a signal, but with success."""
        # After the framework's own clean-up. Gloo's threads abort a process that ends with a
        # process group: "terminate called without an active exception", torch 2.13.
        atexit.register(_destroy_process_groups)
        raise SystemExit(0)


def _destroy_process_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
