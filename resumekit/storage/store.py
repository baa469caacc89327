"""The run directory: its owner, its checkpoints, and how a checkpoint is saved and deleted.

::

    runs/a/
      step-00000500/    committed: complete, or absent
      latest            for people only
      quarantine/       damaged checkpoints, each with the reason in a file
      owner.json        the run's id and its current attempt
      .lock             held by the live owner
      .staging/         checkpoints being written; never read; cleaned by the owner

Rank 0 alone acquires, stages, commits, retains and quarantines. Every rank may read.

A background save commits, retains and empties the trash in a thread of its own. Until that thread
is done, the main thread may read, but not stage: two threads that change the directory at the same
time are a ``LoopError``. Any thread may read, pin and unpin.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DirectoryInUseError,
    ForeignCheckpointError,
    NoUsableCheckpointError,
    SaveError,
    SharedDirectoryError,
)
from resumekit.log import logger, warn
from resumekit.storage.commit import Staging, Trash, check_space
from resumekit.storage.committed import list_steps
from resumekit.storage.directories import (
    LOCK,
    STAGING,
    StepName,
    directories_of,
    has_directory,
    make_durable,
    name_few,
)
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import (
    FileSystem,
    LocalFileSystem,
    Observer,
    directory_errors,
    observed,
    save_errors,
)
from resumekit.storage.manifest import Manifest, StepReader
from resumekit.storage.ownership import (
    POLL_SECONDS,
    DirectoryLock,
    OneThread,
    Owner,
    PosixLock,
    check_owner,
    find_run_id,
    read_owner,
    unrelated_names,
    write_owner,
)
from resumekit.storage.quarantine import list_quarantined, quarantine_step
from resumekit.storage.retention import Checkpoint, RetentionPolicy, may_delete, select_deletions


class Store:
    """The checkpoints of one run.

    Args:
        directory: the run directory; created by ``acquire``.
        file_system: by default the local one.
        lock: excludes other jobs; by default a POSIX record lock.

    Attributes:
        unrelated_names: a few of the names that ``acquire`` found in a directory that no
            run had used yet.
        on_commit: is called with each checkpoint right after its commit, before any retention.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        file_system: FileSystem | None = None,
        lock: DirectoryLock | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._file_system = LocalFileSystem() if file_system is None else file_system
        self._lock = PosixLock() if lock is None else lock
        self.unrelated_names = ""
        self._has_warned = False
        self._record: Owner | None = None  # of the attempt that this rank is part of
        self._owner: Owner | None = None  # the same, while this rank owns the directory
        self._in_flight: set[str] = set()
        self._is_in_place = False
        self._trash = Trash(self._file_system, self.directory)
        self._pins: Counter[StepName] = Counter()
        self._pins_change = threading.Lock()  # held for a few instructions
        self._one_thread = OneThread(self.directory)
        self._verified: dict[StepName, Checkpoint] = {}
        self._committed: StepName | None = None
        self.on_commit: Callable[[StepName], None] | None = None

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        """Calls the observer with the bytes of each read and write in the body."""
        return observed(self._file_system, observer)

    # Who owns the directory

    def acquire(self, *, run_id: str | None = None, attempt: str | None = None) -> Owner:
        """The record of this attempt, which owns the directory until ``release``. Rank 0 only.

        Creates a missing directory and removes what earlier attempts left in staging.

        Args:
            run_id: for a directory that no run has used; None for a new run.
            attempt: of another directory of the run, which this one belongs to; None for a new one.

        Raises:
            DirectoryInUseError: another live job owns it; names the job.
            DirectoryError: it is read-only, not a directory, cannot be locked, or holds
                checkpoints of another program; nothing was changed.
            CheckpointError: the owner record is damaged, and no checkpoint gives the run's id, as
                they are unreadable now or of a newer format.
        """
        with directory_errors(self.directory, "be created"):
            make_durable(self._file_system, self.directory)
        with directory_errors(self.directory, "be read"):
            self.unrelated_names = unrelated_names(self._file_system, self.directory)
        with directory_errors(self.directory, "be locked"):
            locked = self._lock.acquire(self.directory / LOCK)
        if not locked:
            raise self._in_use()
        try:
            with self._one_thread, directory_errors(self.directory, "be used"):
                self._take_over(run_id, attempt)
        except BaseException:
            self._lock.release()
            raise
        assert self._owner is not None
        return self._owner

    def _take_over(self, run_id: str | None, attempt: str | None) -> None:
        if not has_directory(self._file_system, self.directory, STAGING):
            self._file_system.mkdir(self.directory / STAGING)
        found = find_run_id(self._file_system, self.directory)
        owner = Owner.of_this_process(found or run_id, attempt)
        write_owner(self._file_system, self.directory, owner)
        self._owner = self._record = owner
        self._in_flight, self._verified, self._committed = set(), {}, None
        self._is_in_place = not self._file_system.has_atomic_rename(self.directory)
        if self._is_in_place:
            logger.info("%s is on FUSE: a checkpoint counts once it has a manifest", self.directory)
        self._trash = Trash(self._file_system, self.directory, is_in_place=self._is_in_place)
        self._trash.sweep(frozenset())

    def _in_use(self) -> DirectoryInUseError:
        with suppress(OSError):
            owner = read_owner(self._file_system, self.directory)
            if owner is not None:
                is_ours = (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
                return DirectoryInUseError(
                    str(self.directory),
                    found=f"in use by {owner}" + (", which is this process" if is_ours else ""),
                    remedy="Call close() on the first Checkpointer"
                    if is_ours
                    else "Wait for it, stop it, or give this job another directory",
                )
        return DirectoryInUseError(str(self.directory), found="in use by another job")

    def recorded_run_id(self) -> str | None:
        """The id of the run that has used the directory; None for no run, or no directory.

        Raises:
            DirectoryError: it could not be read.
            CheckpointError: as of ``acquire``.
        """
        with directory_errors(self.directory, "be read"):
            try:
                return find_run_id(self._file_system, self.directory)
            except FileNotFoundError:
                return None

    def join(self, run_id: str, attempt: str, *, wait_seconds: float = 5.0) -> None:
        """Joins rank 0's attempt. Every rank except rank 0.

        Args:
            run_id: from rank 0's ``acquire``.
            attempt: from rank 0's ``acquire``.
            wait_seconds: how long a network file system may take to show rank 0's writes.

        Raises:
            SharedDirectoryError: this rank does not see rank 0's directory.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            with directory_errors(self.directory, "be read"):
                owner = read_owner(self._file_system, self.directory)
            if owner is not None and (owner.run_id, owner.attempt) == (run_id, attempt):
                self._record = owner
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        raise SharedDirectoryError(
            str(self.directory),
            found="no owner record" if owner is None else f"the owner record of {owner}",
            expected=f"that of attempt {attempt}, which rank 0 wrote",
            remedy="Choose a run directory that all ranks see",
        )

    def release(self) -> None:
        """Releases the directory, if it was acquired."""
        self._owner = None
        self._lock.release()

    @property
    def run_id(self) -> str:
        """The run's id, once ``acquire`` or ``join`` has returned."""
        return self._joined.run_id

    @property
    def attempt(self) -> str:
        """The attempt's id, once ``acquire`` or ``join`` has returned."""
        return self._joined.attempt

    @property
    def _joined(self) -> Owner:
        if self._record is None:
            raise ConfigurationError(str(self.directory), found="neither acquired nor joined")
        return self._record

    def _require_owner(self) -> Owner:
        if self._owner is None:
            raise ConfigurationError(
                str(self.directory), found="not acquired", expected="rank 0, after acquire()"
            )
        return self._owner

    # What is in it

    def step_names(self) -> list[StepName]:
        """The names of all committed step directories, newest first; content is not checked.

        Raises:
            DirectoryError: the run directory cannot be listed.
        """
        with directory_errors(self.directory, "be read"):
            return list_steps(self._file_system, self.directory)

    def open_step(self, name: StepName) -> StepReader:
        """A step directory whose manifest is verified, and whose files are as it lists them.

        Other files in it are ignored; the first of them are the subject of one warning.

        Raises:
            CheckpointNotFoundError: there is no such directory.
            CorruptCheckpointError: proven damage.
            ForeignCheckpointError: the checkpoint of another run.
            FormatVersionError: a newer version of resumekit wrote it.
            UnreadableCheckpointError: it could not be read.
        """
        reader = StepReader(self._file_system, self.directory, name)
        if reader.unlisted and not self._has_warned and self._record == self._owner:
            self._has_warned = True  # only rank 0 of a run warns
            files = name_few(reader.unlisted)
            warn("RK-832", "%s: files that are not in its manifest: %s", reader.path, files)
        if self._record is not None and reader.manifest.run_id != self._record.run_id:
            raise self._foreign(reader.manifest)
        return reader

    def open_newest(
        self, names: Sequence[StepName] | None = None
    ) -> tuple[StepReader, list[CheckpointError]]:
        """The newest checkpoint that can be opened, and why newer ones cannot.

        Args:
            names: of those to try, newest first; all by default.

        Raises:
            CheckpointNotFoundError: there is none, or a live run deletes one meanwhile.
            DirectoryError: the run directory cannot be listed.
            NoUsableCheckpointError: there are some, and none can be opened.
        """
        rejected: list[CheckpointError] = []
        for name in self.step_names() if names is None else names:
            try:
                return self.open_step(name), rejected
            except CheckpointNotFoundError:  # an older one that is left may be much older
                raise
            except CheckpointError as error:
                rejected.append(error)
        if found := "; ".join(str(error).rstrip(".") for error in rejected):
            raise NoUsableCheckpointError(str(self.directory), found=found)
        raise CheckpointNotFoundError(str(self.directory), found="no checkpoint")

    def _foreign(self, manifest: Manifest) -> ForeignCheckpointError:
        return ForeignCheckpointError(
            str(manifest.name),
            found=f"belongs to the run {manifest.run_id}",
            expected=f"this directory's run {self.run_id}",
            remedy="Keep each run in a directory of its own",
        )

    def quarantine(self, name: StepName, error: CorruptCheckpointError) -> Path:
        """Where a damaged step directory is now, with the reason beside it. Rank 0 only.

        Args:
            name: of the step directory.
            error: the proof of the damage.

        Raises:
            ConfigurationError: the error proves no damage.
            OwnershipLostError: another attempt has taken the directory over.
            DirectoryError: it could not be moved.
        """
        owner = self._require_owner()
        with self._one_thread, directory_errors(self.directory, f"put {name} into quarantine"):
            check_owner(self._file_system, self.directory, owner)
            with suppress(SaveError):
                self._trash.sync()
            target = quarantine_step(self._file_system, self.directory, name, error)
        self._verified.pop(name, None)
        return target

    def quarantined(self) -> list[str]:
        """The names of the directories in quarantine, sorted.

        Raises:
            DirectoryError: the quarantine cannot be listed.
        """
        with directory_errors(self.directory, "be read"):
            return list_quarantined(self._file_system, self.directory)

    # How a checkpoint gets there

    def next_name(self, step: int) -> StepName:
        """The name for the next save of this step; a committed directory is never replaced."""
        revisions = [name.revision for name in self.step_names() if name.step == step]
        return StepName(step, max(revisions, default=-1) + 1)

    def stage(
        self,
        name: StepName,
        *,
        num_bytes: int,
        num_files: int,
        directories: Sequence[str],
        with_parts: bool = False,
    ) -> Staging:
        """An empty staging directory for a new checkpoint. Rank 0 only.

        Args:
            name: what it will be called once it is committed.
            num_bytes: of all ranks' files together.
            num_files: of all ranks together.
            directories: relative sub-directories that will be needed.
            with_parts: whether the ranks will report by part files.

        Raises:
            InsufficientSpaceError: there is no room; nothing is left of it.
            OwnershipLostError: another attempt has taken the directory over.
            SaveError: names the path and the cause.
        """
        owner = self._require_owner()
        with self._one_thread:
            with save_errors(self.directory):
                check_owner(self._file_system, self.directory, owner)
            self._trash.sweep(frozenset(self._in_flight))
            num_inodes = num_files + len(directories) + 1 + with_parts
            check_space(
                self._file_system, self.directory, num_bytes=num_bytes, num_files=num_inodes
            )
            staging = Staging.new(
                self._file_system,
                self.directory,
                name,
                attempt=owner.attempt,
                directories=directories,
                with_parts=with_parts,
                is_in_place=self._is_in_place,
            )
            self._in_flight.add(staging.name)
            try:
                staging.make_directories()
            except BaseException:
                self._abandon(staging)
                raise
            return staging

    def attach(self, staging_name: str) -> Staging:
        """The staging directory that rank 0 has made. Every rank but rank 0.

        Raises:
            SharedDirectoryError: this rank does not see it.
        """
        return Staging.attach(self._file_system, self.directory, staging_name)

    def commit(self, staging: Staging, manifest: Manifest) -> Path:
        """The step directory, durable once this returns. Rank 0 only.

        When it fails, the staging directory is removed and earlier checkpoints are untouched.

        Args:
            staging: every file in it has been finished, by every rank.
            manifest: lists those files.

        Raises:
            OwnershipLostError: another attempt has taken the directory over.
            SaveError: names the path and the cause.
            UnsupportedValueError: the manifest holds a value that could not be read back.
        """
        return self._commit(staging, manifest, is_copy=False)

    def commit_copy(
        self,
        manifest: Manifest,
        write: Callable[[Staging, FileEntry], object],
        *,
        num_bytes: int = 0,
    ) -> Path:
        """The step directory of a copied checkpoint, durable once this returns. Rank 0 only.

        Args:
            manifest: of this run; its attempt may be another one.
            write: writes a file of it.
            num_bytes: how many are checked for first; links need none.

        Raises:
            ForeignCheckpointError: the manifest is of another run.
            CheckpointError: a file is damaged, or cannot be read; as ``write`` raises it.
            SaveError: writing failed; nothing was committed.
            OwnershipLostError: another attempt has taken the directory over.
        """
        if manifest.run_id != self.run_id:
            raise self._foreign(manifest)
        staging = self.stage(
            manifest.name,
            num_bytes=num_bytes,
            num_files=len(manifest.files),
            directories=directories_of(entry.path for entry in manifest.files),
        )
        try:
            with staging.writing():
                for entry in manifest.files:
                    write(staging, entry)
        except BaseException:
            self.abandon(staging)
            raise
        return self._commit(staging, manifest, is_copy=True)

    def _commit(self, staging: Staging, manifest: Manifest, *, is_copy: bool) -> Path:
        owner = self._require_owner()
        with self._one_thread:
            try:
                path = staging.commit(manifest, owner, is_copy=is_copy)
            except BaseException:
                self._abandon(staging)
                raise
            self._in_flight.discard(staging.name)
            self._verified[staging.step] = Checkpoint(staging.step, manifest.metric)
            self._committed = staging.step
            if self.on_commit is not None:
                self.on_commit(staging.step)
            return path

    def abandon(self, staging: Staging) -> None:
        """Removes a staging directory as far as it goes; the next save removes the rest. Rank 0."""
        with self._one_thread:
            self._abandon(staging)

    def _abandon(self, staging: Staging) -> None:
        self._in_flight.discard(staging.name)
        staging.discard()
        with suppress(OSError):
            staging.remove()

    # How old checkpoints go

    def pin(self, name: StepName) -> None:
        """Keeps retention from this checkpoint until ``unpin``, because it is being read. Rank 0.

        One that is deleted already stays deleted. Pins are counted, and end with the process.
        """
        with self._pins_change:
            self._pins[name] += 1

    def unpin(self, name: StepName) -> None:
        """Undoes one ``pin``; a later ``retain`` may delete the checkpoint."""
        with self._pins_change:
            assert self._pins[name] > 0, f"{name} is not pinned"
            self._pins -= Counter([name])  # drops names without a pin

    def retain(self, policy: RetentionPolicy) -> list[StepName]:
        """The checkpoints that were deleted under the policy, oldest first. Rank 0 only.

        They are renamed away; ``empty_trash`` frees their space. Does nothing before this
        attempt's first commit: until then nothing proves that the newest checkpoint is durable.
        Only verified checkpoints of this run are ever deleted, and none that is pinned.

        Raises:
            OwnershipLostError: another attempt has taken the directory over.
            SaveError: something could not be renamed; all checkpoints that stay are untouched.
        """
        owner = self._require_owner()
        with self._one_thread:
            if self._committed is None:
                return []
            deletions = self.unneeded(policy, latest=self._committed)
            if deletions:
                self._delete(deletions, owner)
            return deletions

    def unneeded(self, policy: RetentionPolicy, *, latest: StepName) -> list[StepName]:
        """The checkpoints that the policy does not keep, oldest first, without ``latest``.

        All are verified and of this run, and none is pinned. Deletes nothing.

        Raises:
            DirectoryError: the run directory cannot be listed.
        """
        names = self.step_names()
        with self._pins_change:
            kept = {latest, *self._pins}
        if not may_delete(names, policy) - kept:
            return []
        return sorted(select_deletions(self._list_verified(names), policy) - kept)

    def delete(self, names: Sequence[StepName]) -> None:
        """Deletes checkpoints with their bytes. Rank 0 only.

        Args:
            names: of ``unneeded``, whose ``latest`` this attempt has committed, or has read whole.

        Raises:
            OwnershipLostError: another attempt has taken the directory over.
            SaveError: something could not be removed; all checkpoints that stay are untouched.
        """
        owner = self._require_owner()
        with self._one_thread:
            self._delete(names, owner)
            self._trash.empty()

    def prune(self, policy: RetentionPolicy, *, latest: StepName) -> StepName | None:
        """The oldest checkpoint that is not needed, deleted with its bytes; None where all are.

        The newest and the best stay, and those that the policy keeps for ever. Allowed before the
        first commit of this attempt: ``acquire`` has synced the names of what earlier ones
        committed. See ``unneeded`` and ``delete``.
        """
        least = replace(policy, keep_latest=1, keep_best=max(policy.keep_best, 1))
        oldest = self.unneeded(least, latest=latest)[:1]
        self.delete(oldest)
        return oldest[0] if oldest else None

    def _delete(self, names: Sequence[StepName], owner: Owner) -> None:
        """Renames checkpoints away, which are verified."""
        with save_errors(self.directory):
            check_owner(self._file_system, self.directory, owner)
        for name in names:
            self._verified.pop(name)
        self._trash.take(names)

    def empty_trash(self) -> None:
        """Removes the bytes of deleted checkpoints, which may take long. Rank 0 only.

        What is left, also by a kill, is removed by the next ``stage`` or ``acquire``.

        Raises:
            SaveError: something could not be removed; no checkpoint is affected.
        """
        self._require_owner()
        with self._one_thread:
            self._trash.empty()

    def _list_verified(self, names: Sequence[StepName]) -> list[Checkpoint]:
        """Those of these checkpoints that verify and are of this run; each is opened once."""
        run_id = self.recorded_run_id() if self._record is None else self.run_id
        for name in names:
            if name not in self._verified:
                with suppress(CheckpointError):
                    manifest = self.open_step(name).manifest
                    if manifest.run_id == run_id:
                        self._verified[name] = Checkpoint(name, manifest.metric)
        return [self._verified[name] for name in names if name in self._verified]
