"""What is deleted of a run: which checkpoints, chosen from names and metrics, and how.

A deleted checkpoint is renamed into ``.staging`` at once. Its bytes go later, and only when the
rename is durable: otherwise a power cut could restore the name of half a checkpoint. Before that it
restores a whole one, so only the removal of the bytes waits for the sync. Where the sync failed,
nothing proves that the rename ever will be durable, as a failed sync is never retried: that
checkpoint stays in ``.staging`` until the next attempt.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resumekit.errors import ConfigurationError
from resumekit.storage.directories import STAGING, StepName, remove_tree
from resumekit.storage.io.file_system import FileSystem, Kind, save_errors


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints to keep; the newest one always stays.

    Args:
        keep_latest: how many of the newest steps; None keeps everything.
        keep_best: how many of the steps with the best metric; 0 keeps none of them.
        keep_every: multiples of it are kept for ever; None for none.

    Raises:
        ConfigurationError: a number out of range.
    """

    keep_latest: int | None = 2
    keep_best: int = 1
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("keep_latest", self.keep_latest, 1),
            ("keep_best", self.keep_best, 0),
            ("keep_every", self.keep_every, 1),
        ):
            if value is not None and (type(value) is not int or value < minimum):
                raise ConfigurationError(
                    name, found=repr(value), expected=f"an integer of at least {minimum}"
                )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as retention sees it.

    Args:
        name: of its step directory.
        metric: the manifest's ``{"name", "mode", "value"}``, if there is one.
    """

    name: StepName
    metric: Mapping[str, str] | None = None


def select_deletions(
    checkpoints: Sequence[Checkpoint], policy: RetentionPolicy
) -> frozenset[StepName]:
    """The checkpoints to delete under the policy.

    Earlier revisions of a step are deleted. Where a run changed its metric or its mode, the best of
    each are kept. Of equal values the earlier is better, and a NaN is never among the best.

    Args:
        checkpoints: of this run, verified, in any order.
        policy: what to keep.
    """
    if policy.keep_latest is None or not checkpoints:
        return frozenset()
    last_revisions = {item.name.step: item for item in sorted(checkpoints, key=_name)}
    current = sorted(last_revisions.values(), key=_name)
    kept = {item.name for item in current[-policy.keep_latest :]}
    for ranked in _rankings(current):
        kept |= set(ranked[: policy.keep_best])
    if policy.keep_every is not None:
        kept |= {item.name for item in current if item.name.step % policy.keep_every == 0}
    return frozenset(item.name for item in checkpoints) - kept


def may_delete(names: Sequence[StepName], policy: RetentionPolicy) -> frozenset[StepName]:
    """The most that the policy can delete, whatever their metrics are and whichever are damaged."""
    return select_deletions([Checkpoint(name) for name in names], policy)


def _name(checkpoint: Checkpoint) -> tuple[int, int]:
    return checkpoint.name.step, checkpoint.name.revision


def _rankings(current: Sequence[Checkpoint]) -> list[list[StepName]]:
    """The names of the checkpoints with each metric and mode, the best one first."""
    values: dict[tuple[str, str], list[tuple[float, StepName]]] = {}
    for item in current:
        if item.metric is None:
            continue
        value = float.fromhex(item.metric["value"])
        if not math.isnan(value):
            mode = item.metric["mode"]
            cost = value if mode == "min" else -value
            values.setdefault((item.metric["name"], mode), []).append((cost, item.name))
    return [[name for _, name in sorted(rows)] for rows in values.values()]


# ---------------------------------------------------------------- moved to the trash, then removed


class Trash:
    """The trash of one attempt. Rank 0 only, and one thread at a time.

    Args:
        file_system: the file system.
        directory: the run directory.
    """

    def __init__(self, file_system: FileSystem, directory: Path) -> None:
        self._file_system = file_system
        self._directory = directory
        self._taken: list[Path] = []  # renamed, and not synced yet
        self._removable: list[Path] = []  # renamed durably
        self._unsure: set[str] = set()  # names in staging whose sync has failed

    def take(self, names: Sequence[StepName]) -> None:
        """Renames step directories away; ``empty`` makes that durable before it removes a byte.

        Raises:
            SaveError: names the path and the cause. Every checkpoint is whole or gone.
        """
        for name in names:
            target = self._directory / STAGING / f"trash-{name}-{uuid.uuid4().hex[:12]}"
            with save_errors(self._directory / str(name)):
                self._file_system.rename(self._directory / str(name), target)
            self._taken.append(target)

    def sync(self) -> None:
        """Makes the renames durable. Before any other sync of the run directory, which may fail.

        Raises:
            SaveError: it failed; what was taken stays until the next attempt.
        """
        taken, self._taken = self._taken, []
        if taken:
            with save_errors(self._directory):
                self._sync({path.name for path in taken})
            self._removable += taken

    def empty(self) -> None:
        """Removes the bytes of what was taken; continues after an error.

        Raises:
            SaveError: the first failure. The next ``sweep`` removes the rest.
        """
        self.sync()
        failure: Exception | None = None
        while self._removable:
            path = self._removable.pop(0)
            try:
                with save_errors(path):
                    remove_tree(self._file_system, path)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def sweep(self, keep: Set[str]) -> None:
        """Removes everything from staging, as far as it goes.

        Args:
            keep: names in staging that are in use.
        """
        staging = self._directory / STAGING
        durable = {path.name for path in self._removable}
        self._removable.clear()
        self._taken.clear()
        with suppress(OSError):
            entries = self._file_system.list(staging)
            stale = [item for item in entries if item.name not in keep | self._unsure]
            others = {item.name for item in stale} - durable
            if others and not self._is_synced(others):
                stale = [item for item in stale if item.name in durable]
            for item in stale:
                with suppress(OSError):
                    self._remove(staging / item.name, item.kind)

    def _is_synced(self, names: Set[str]) -> bool:
        # A checkpoint that was renamed away must be gone for good before its files go.
        try:
            self._sync(names)
        except OSError:
            return False
        return True

    def _remove(self, path: Path, kind: Kind) -> None:
        if kind == "directory":
            remove_tree(self._file_system, path)
        else:
            self._file_system.unlink(path)

    def _sync(self, names: Set[str]) -> None:
        try:
            self._file_system.fsync_dir(self._directory)
        except OSError:
            self._unsure.update(names)
            raise
