"""The save in flight: what is left of it after its safe point, on each rank and for all of them.

A job refers to no live object of the training but to the leaves of its payloads.

In the background nothing is collective: a rank writes its files and leaves a part; rank 0 waits for
the parts of all ranks and commits. It gives up at once for a rank whose process has ended, and for
any other after the agreement timeout. The staging directory is then removed, and the previous
checkpoint stays.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from resumekit.distributed import World, as_error, from_rank
from resumekit.errors import ResumekitError, SaveError, SharedDirectoryError
from resumekit.log import logger, warn
from resumekit.progress_display import human_bytes
from resumekit.run.saving.background import Work, add_work
from resumekit.run.saving.snapshot import Snapshot
from resumekit.serialization.writing import Payload
from resumekit.storage.commit import Staging
from resumekit.storage.files import FileEntry
from resumekit.storage.io.pipeline import num_threads
from resumekit.storage.manifest import Manifest
from resumekit.storage.parts import Part
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

Payloads = Sequence[Payload]


# How often rank 0 looks for the parts: seldom when it takes long.
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1


class SaveJob:
    """One save of one rank: made at once by its methods, or in the background by ``start``.

    Args:
        world: the ranks.
        store: where the checkpoint goes.
        staging: looks for the staging directory; a rank may find that it does not see it.
        payloads: what this rank writes.
        manifest: of the checkpoint, but for the files.
        retention: which old checkpoints are kept.
        save_number: counts the saves of this attempt, the same on all ranks.

    Attributes:
        files: that this rank has written, once ``write`` has returned.
        work: in the queue of the background thread, once it was started.
        removal: of old checkpoints, the same, once this one is committed. Rank 0 only.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        staging: Callable[[], Staging],
        payloads: Payloads,
        manifest: Manifest,
        retention: RetentionPolicy,
        save_number: int,
    ) -> None:
        self.store, self.staging, self.payloads = store, staging, payloads
        self.manifest, self.name = manifest, manifest.name
        self.files: tuple[FileEntry, ...] = ()
        self.work: Work
        self.removal: Work | None = None
        self._processes: Processes
        self._world, self._retention, self._save_number = world, retention, save_number
        self._written = threading.Event()
        self._write_error: ResumekitError | None = None
        self._given_up: ResumekitError | None = None

    def write(self) -> tuple[FileEntry, ...]:
        """This rank's lines of the inventory, once its files survive a power cut.

        Raises:
            SaveError: a file could not be written.
            SharedDirectoryError: this rank does not see what rank 0 has made.
        """
        staging = self.staging()
        with staging.writing():
            # No tuple of a generator: a list of all objects would break it while it grows.
            self.files = tuple([entry for each in self.payloads for entry in each.write(staging)])
        return self.files

    def commit(self, files: Iterable[FileEntry]) -> None:
        """Makes the checkpoint of all ranks' files. Rank 0 only.

        Raises:
            OwnershipLostError: another attempt owns the directory now.
            SaveError: nothing was committed.
        """
        self.store.commit(self.staging(), replace(self.manifest, files=tuple(files)))

    def abandon(self) -> None:
        """Removes what was written. Rank 0 only."""
        self.store.abandon(self.staging())

    # The new checkpoint is committed: an old one that cannot be removed does not undo that.

    def retain_now(self) -> None:
        """Removes old checkpoints with their files. Rank 0 only.

        Raises:
            SaveError: they could not be removed.
        """
        self.store.retain(self._retention)
        self.store.empty_trash()

    def retain(self) -> None:
        """Removes old checkpoints; their files in the background. Rank 0 only."""
        _logged(lambda: self.store.retain(self._retention))
        store = self.store
        self.removal = Work("the removal of old files", lambda: _logged(store.empty_trash))
        add_work(self.removal)

    # ---------------------------------------------------------------- one rank waits for it

    @property
    def has_failed(self) -> bool:
        """Whether it is known on this rank to have failed."""
        is_over = self.work.is_done and self.work.wait() is not None
        return is_over or self._write_error is not None

    def wait_until_written(self) -> ResumekitError | None:
        """Waits for this rank's files; the error that they ended with, or None."""
        self._written.wait()
        return self._write_error

    def give_up(self, error: ResumekitError) -> None:
        """Rank 0 waits no longer for the parts of others, and does not commit."""
        self._given_up = error

    def wait_for_first(self) -> None:
        """Waits until rank 0 has committed or removed the staging directory, or does neither."""
        deadline = time.monotonic() + self._world.timeout_seconds
        first = self._world.ranks[:1]
        while time.monotonic() < deadline and not self._processes.ended(first):
            try:
                self.staging()
            except SharedDirectoryError:  # it is not there any more
                return
            time.sleep(_LONGEST_PAUSE_SECONDS)

    # ---------------------------------------------------------------- in the background

    def start(self, processes: Processes) -> None:
        """Hands it to the background thread; ``processes`` are those of all ranks."""
        self._processes = processes
        # The queue may keep the work for long, which forgets the job, and so the run directory.
        self.work = Work(f"the save at step {self.name.step}", self._save)
        add_work(self.work)

    def _save(self) -> ResumekitError | None:
        """Writes this rank's files; rank 0 then commits the checkpoint of all ranks."""
        self._write_error = error = self._attempt(self._write)
        self._written.set()
        if self._world.is_first:
            error = error or self._attempt(self._commit)
            if error is not None:
                self._attempt(self.abandon)
        self.payloads = ()
        return error

    def _attempt(self, action: Callable[[], object]) -> ResumekitError | None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nobody above this would see it
            return as_error(self._world.rank, error)
        return None

    def _write(self) -> None:
        try:
            self.write()
        except Exception as error:
            with suppress(ResumekitError):  # rank 0 learns of it from this rank's requests too
                self._leave_part((), str(error))
            raise
        self._leave_part(self.files)

    def _leave_part(self, files: tuple[FileEntry, ...], error: str | None = None) -> None:
        """Reports to rank 0 what this rank has written, or why it has not."""
        if self._world.world_size > 1:
            manifest, number = self.manifest, self._save_number
            run_id, attempt, rank = manifest.run_id, manifest.attempt, self._world.rank
            part = Part(run_id, attempt, manifest.step, number, rank, files, error)
            self.staging().leave_part(part)

    def _commit(self) -> None:
        self.commit(self.files if self._world.world_size == 1 else self._files_of_all())
        self.retain()

    def _files_of_all(self) -> tuple[FileEntry, ...]:
        parts = self.staging().parts(
            run_id=self.manifest.run_id,
            attempt=self.manifest.attempt,
            save_number=self._save_number,
            world_size=self._world.world_size,
        )
        pause, deadline = _FIRST_PAUSE_SECONDS, time.monotonic() + self._world.timeout_seconds
        while not parts.look():
            if self._given_up is not None:
                raise self._given_up
            ended = self._processes.ended(parts.missing)
            if (ended or time.monotonic() > deadline) and not parts.look():
                raise self._missing(ended or parts.missing, has_ended=bool(ended))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return parts.files()

    def _missing(self, ranks: Sequence[int], *, has_ended: bool) -> SaveError:
        waited = f"has not written its part after {self._world.timeout_seconds:g} seconds"
        return SaveError(
            f"rank {ranks[0]}",
            found="its process ended before its part was written" if has_ended else waited,
            expected="the parts of all ranks",
            remedy="Start the job again: it continues from its newest checkpoint",
        )


def _logged(removal: Callable[[], object]) -> None:
    try:
        removal()
    except SaveError as error:
        warn("RK-842", "old checkpoints could not be removed: %s", error)


# ---------------------------------------------------------------- the collective acts

_NUM_MEASURED = 3


class Demand(NamedTuple):
    """What a save of one rank takes.

    Args:
        node: of the rank.
        num_bytes: of its files.
        num_files: that it writes.
        copy_bytes: of a copy in memory.
        growth: how many of these are not allocated yet.
    """

    node: str
    num_bytes: int
    num_files: int
    copy_bytes: int
    growth: int


class SaveInFlight:
    """The save of one run that is in the background, if there is one; at most one is.

    Args:
        world: the ranks.
        must_fit: save in the background only where the copy fits into the memory.

    Attributes:
        num_skipped: the saves that were skipped because one was in flight.
        snapshot: the memory that the saves use.
    """

    def __init__(self, world: World, *, must_fit: bool) -> None:
        self._world = world
        self._must_fit = must_fit
        self._save: SaveJob | None = None
        self._removal: Work | None = None
        self._processes: Processes | None = None  # known from the first save on
        self.snapshot = Snapshot()
        self._sizes: list[int] | None = None  # of the copies of all ranks, once accepted or not
        self._accepts = False
        self._num_threads = 1  # that copy, once the ranks of the node are known
        self._number = 0
        self.num_skipped = 0
        self._seconds: deque[float] = deque(maxlen=_NUM_MEASURED)

    @property
    def step(self) -> int | None:
        """Of the save in flight; None without one. The same on all ranks."""
        return None if self._save is None else self._save.name.step

    @property
    def manifest(self) -> Manifest | None:
        """Of the save in flight, but for the files; None without one. The same on all ranks."""
        return None if self._save is None else self._save.manifest

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread still works on it. Other ranks may know otherwise."""
        return self._save is not None and not self._save.work.is_done

    @property
    def has_failed(self) -> bool:
        """Whether it has failed on this rank. Other ranks may know otherwise."""
        return self._save is not None and self._save.has_failed

    @property
    def last_seconds(self) -> float:
        """How long the last one was written; 0 before there was one."""
        return self._seconds[-1] if self._seconds else 0.0

    @property
    def longest_seconds(self) -> float:
        """How long the slowest of the last saves was written."""
        return max(self._seconds, default=0.0)

    def details(self) -> dict[str, int]:
        """What a manifest says of the saves that were skipped."""
        return {"skipped_saves": self.num_skipped} if self.num_skipped else {}

    def next_number(self) -> int:
        """The number of the next save, the same on all ranks."""
        self._number += 1
        return self._number

    def demand(self, payloads: Payloads) -> Demand:
        """What the save of these payloads takes on this rank."""
        copy_bytes = self.snapshot.needed_bytes(payloads)
        return Demand(
            self._world.node,
            sum(payload.num_bytes for payload in payloads),
            sum(payload.num_files for payload in payloads),
            copy_bytes,
            self.snapshot.growth(copy_bytes),
        )

    def accepts(self, demands: Sequence[Demand]) -> bool:
        """Whether the ranks copy their state. Collective; logs the size once.

        Args:
            demands: of each rank.
        """
        sizes = [each.copy_bytes for each in demands]
        if sizes == self._sizes:
            return self._accepts
        mine = demands[self._world.ranks.index(self._world.rank)]
        here = [each for each in demands if each.node == mine.node]
        self._num_threads = num_threads(len(here))
        others = sum(each.growth for each in here) - mine.growth
        accepted = not self._must_fit or all(
            self._world.gather(self.snapshot.fits(mine.copy_bytes, others))
        )
        if self._world.is_first and (self._sizes is None or accepted != self._accepts):
            of_node = f", {human_bytes(sum(each.copy_bytes for each in here))} on its node"
            several = of_node if len(here) > 1 else ""
            size = f"{human_bytes(mine.copy_bytes)} on rank 0{several}"
            logger.info(
                "async saves keep a copy of the state in host memory: %s"
                if accepted
                else "saves are synchronous, a copy of the state does not fit into memory: %s",
                size,
            )
        self._sizes, self._accepts = sizes, accepted
        return accepted

    def copy(self, payloads: Payloads) -> None:
        """Copies all that this rank writes: training may change it once this returns."""
        assert self._save is None, "the copy of the save in flight is being written"
        self.snapshot.take(payloads, num_threads=self._num_threads)

    def start(self, job: SaveJob) -> None:
        """Hands the save to the background thread. Collective the first time."""
        assert self._save is None, "at most one save is in flight"
        if self._processes is None:
            self._processes = Processes.of(self._world)
        self._save = job
        job.start(self._processes)

    def committed(self, job: SaveJob) -> None:
        """The store may not be changed until the old files of this save are removed."""
        self._removal = job.removal

    def wait_for_removal(self) -> None:
        """Waits until the store may be changed again."""
        removal, self._removal = self._removal, None
        if removal is not None and not removal.is_abandoned:
            removal.wait()

    def finish(self) -> SaveJob | None:
        """Waits for the save in flight on all ranks. Collective.

        Returns:
            That save, durable now; None where none was in flight.

        Raises:
            ResumekitError: on every rank, what failed; it names the rank.
            RankLostError: a rank has died, or does not answer.
        """
        save = self._save
        if save is None:
            return None
        errors = self._world.gather(save.wait_until_written())
        for rank, error in zip(self._world.ranks, errors, strict=True):
            if error is not None:
                save.give_up(error if self._world.world_size == 1 else from_rank(rank, error))
                break
        failure = self._world.broadcast(save.work.wait() if self._world.is_first else None)
        save.work.wait()
        save.work.is_reported = True
        self._seconds.append(save.work.seconds)
        self._save = None
        self.committed(save)
        if failure is not None:
            if self._world.is_first:
                save.abandon()  # the others may have written after rank 0 gave up
            # What a rank has found, rather than what rank 0 has read of it in the rank's part.
            for rank, error in zip((*self._world.ranks, 0), (*errors, failure), strict=True):
                if error is not None:
                    raise error if rank == self._world.rank else from_rank(rank, error)
        return save

    def wait_for_own(self) -> None:
        """Waits until this rank has done its part, on rank 0 all; raises nothing."""
        if self._save is not None and not self._save.work.is_abandoned:
            self._save.work.wait()
            self.committed(self._save)
        self.wait_for_removal()

    def wait_alone(self) -> None:
        """Waits until the save in flight is committed, or has failed; raises nothing.

        Not collective: another rank than the first waits until the staging directory is gone.
        """
        self.wait_for_own()
        if self._save is not None and not self._world.is_first:
            self._save.wait_for_first()


# ---------------------------------------------------------------- the processes of the ranks

# Which have ended, as far as one node can see. No collective but the exchange.
#
# Not psutil: ranks compare start times, and create_time() of psutil 7.2 adds the time of the boot,
# which moves when the clock of the node is set. A number of ticks since the boot never changes.
_ENDED = "ZX"  # states in /proc/<pid>/stat of a process that runs no more


@dataclass(frozen=True)
class ProcessId:
    """A process, also when its number is given to another one later.

    Args:
        node: its host among those of the job.
        pid: its number there.
        started: when it began, in clock ticks since the boot; empty where the system has no /proc.
    """

    node: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls, node: str) -> ProcessId:
        """This process."""
        _, started = _look(os.getpid()) or ("", "")
        return cls(node, os.getpid(), started)

    @property
    def has_ended(self) -> bool:
        """Whether there is no such process on this node any more."""
        found = _look(self.pid)
        if found is None:
            return True
        state, started = found
        return started != self.started or state in _ENDED


class Processes:
    """The processes of all ranks.

    Args:
        node: of this rank.
        by_rank: the process of each rank.
    """

    def __init__(self, node: str, by_rank: dict[int, ProcessId]) -> None:
        # A process of another container may be on this node and yet invisible.
        self._watched = {
            rank: process
            for rank, process in by_rank.items()
            if process.node == node and not process.has_ended
        }

    @classmethod
    def of(cls, world: World) -> Processes:
        """The processes of the job. Collective."""
        every = world.gather(ProcessId.of_this_process(world.node))
        processes = cls(world.node, dict(zip(world.ranks, every, strict=True)))
        world.gather(None)  # all have looked while all were alive: from now on a rank may end
        return processes

    def ended(self, ranks: Collection[int]) -> list[int]:
        """Those of some ranks whose process has ended; of other nodes' nothing is known."""
        watched = ((rank, self._watched[rank]) for rank in ranks if rank in self._watched)
        return [rank for rank, process in watched if process.has_ended]


def _look(pid: int) -> tuple[str, str] | None:
    """State and start time of a process, both empty without /proc; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ("", "") if _exists(pid) else None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
