"""A save that is written in the background, as one rank sees it.

In the background nothing is collective: a rank writes its files and leaves a part; rank 0 waits for
the parts of all ranks and commits. It gives up at once for a rank whose process has ended, and for
any other after the agreement timeout. The staging directory is then removed, and the previous
checkpoint stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from resumekit.distributed import as_error
from resumekit.errors import ResumekitError, SaveError, SharedDirectoryError
from resumekit.run.saving.background import Work
from resumekit.run.saving.job import SaveJob
from resumekit.run.saving.processes import Processes
from resumekit.storage import FileEntry

# How often rank 0 looks for the parts: seldom when it takes long.
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1


class BackgroundSave:
    """One save in the background, as one rank sees it.

    Args:
        job: what is to be done.
        processes: of all ranks.

    Attributes:
        name: of the checkpoint.
        manifest: of the checkpoint, but for the files.
        micro_step: that it is of.
        files: that this rank has written; read them when ``work`` is done.
        work: in the queue of the background thread.
    """

    def __init__(self, job: SaveJob, processes: Processes) -> None:
        self.name = job.name
        self.manifest = job.manifest
        self.files: tuple[FileEntry, ...] = ()
        self.micro_step: int = job.manifest.progress["micro_step"]
        self._world = job.world
        self._processes = processes
        self._written = threading.Event()
        self._write_error: ResumekitError | None = None
        self._given_up: ResumekitError | None = None
        self._staging = job.staging
        what = f"the save at step {self.name.step}"
        self.work = Work(what, lambda: self._save(job))

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
                self._staging()
            except SharedDirectoryError:  # it is not there any more
                return
            time.sleep(_LONGEST_PAUSE_SECONDS)

    # ---------------------------------------------------------------- in the background

    def _save(self, job: SaveJob) -> ResumekitError | None:
        self._write_error = error = self._attempt(lambda: self._write(job))
        self._written.set()
        if self._world.is_first:
            error = error or self._attempt(lambda: self._commit(job))
            if error is not None:
                self._attempt(job.abandon)
        return error

    def _attempt(self, action: Callable[[], object]) -> ResumekitError | None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nobody above this would see it
            return as_error(self._world.rank, error)
        return None

    def _write(self, job: SaveJob) -> None:
        is_alone = self._world.world_size == 1
        try:
            self.files = job.write()
        except Exception as error:
            if not is_alone:
                with suppress(ResumekitError):  # rank 0 learns of it from this rank's requests too
                    job.leave_part(error=str(error))
            raise
        if not is_alone:
            job.leave_part(self.files)

    def _commit(self, job: SaveJob) -> None:
        job.commit(self.files if self._world.world_size == 1 else self._files_of_all(job))
        job.retain()
        job.empty_trash()

    def _files_of_all(self, job: SaveJob) -> tuple[FileEntry, ...]:
        parts, pause = job.parts(), _FIRST_PAUSE_SECONDS
        deadline = time.monotonic() + self._world.timeout_seconds
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
