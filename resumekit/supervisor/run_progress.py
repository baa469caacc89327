"""How far the runs of a command are, read from their directories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from resumekit.storage.directories import StepName
from resumekit.storage.store import Store


@dataclass(frozen=True)
class RunProgress:
    """How far some runs are.

    Args:
        checkpoints: the newest checkpoint of each run that has one.
        journals: the files of all attempts.
    """

    checkpoints: dict[Path, StepName]
    journals: frozenset[Path]

    def has_checkpoint_since(self, before: RunProgress) -> bool:
        """Whether a run has a newer checkpoint than it had."""
        known = before.checkpoints
        return any(path not in known or name > known[path] for path, name in self._items())

    def has_stepped_since(self, before: RunProgress) -> bool:
        """Whether an attempt has begun and trained a step."""
        from resumekit.record.journal import find_attempts  # loads torch

        new = self.journals - before.journals
        attempts = [each for path in {path.parent for path in new} for each in find_attempts(path)]
        return any(each.path in new and each.records() for each in attempts)

    def __str__(self) -> str:
        found = [f"step {name.step}" for _, name in self._items()]
        return f"newest checkpoint: {found[-1]}" if found else "no checkpoint"

    def _items(self) -> list[tuple[Path, StepName]]:
        return sorted(self.checkpoints.items())


def read_progress(directories: Iterable[Path]) -> RunProgress:
    """How far the runs in these directories are; one that is missing has not begun."""
    present = [directory for directory in directories if directory.is_dir()]
    names = {directory: Store(directory).step_names() for directory in present}
    return RunProgress(
        {directory: found[0] for directory, found in names.items() if found},
        frozenset(path for directory in present for path in directory.glob("journal/*.journal")),
    )
