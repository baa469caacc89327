"""Copies the committed checkpoints of a run to its places, beside the training.

Each place has a thread of its own, so that one that stalls does not stop the copies to others. The
newest checkpoint that is due is next: where saves are faster than a place, some are left out. From
its commit until its copy is complete, or a newer one is next, retention of the run directory leaves
a checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from resumekit.errors import CheckpointError, DirectoryError, ResumekitError
from resumekit.log import logger, warn
from resumekit.places.client import PlaceClient
from resumekit.storage.directories import StepName
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 300.0


class Mirror:
    """The copies of one launch. Rank 0 only.

    Args:
        store: the run directory, which this rank owns.
        clients: of the places, each with the newest name that it holds.
        retention: of the run directory.
    """

    def __init__(
        self,
        store: Store,
        clients: Sequence[tuple[PlaceClient, StepName | None]],
        retention: RetentionPolicy,
    ) -> None:
        self._store = store
        self._uploads = [Upload(store, *each, retention) for each in clients]
        self._offer_newest(is_last=False)  # the launch before may not have copied it
        store.on_commit = self.offer

    def offer(self, name: StepName) -> None:
        """A checkpoint is committed; copies it where it is due. Returns at once."""
        for upload in self._uploads:
            upload.offer(name, is_last=False)

    def finish(self, seconds: float) -> None:
        """Copies the newest checkpoint everywhere, waits for that, and logs what is not done.

        Args:
            seconds: how long to wait at most.
        """
        self._offer_newest(is_last=True)
        deadline = time.monotonic() + seconds
        for upload in self._uploads:
            missing = upload.finish(deadline)
            if missing is not None:
                warn(
                    "RK-851",
                    "not mirrored when this launch ends: %s. To copy it: resumekit mirror %s %s",
                    *(missing, self._store.directory, upload.place),
                )
        self._store.on_commit = None

    def _offer_newest(self, *, is_last: bool) -> None:
        names: list[StepName] = []
        with suppress(DirectoryError):  # the disk is gone, and its copies are what is left
            names = self._store.step_names()
        for upload in self._uploads if names else ():
            upload.offer(names[0], is_last=is_last)


class _Limit:
    """Keeps one copy to a bandwidth.

    Args:
        bytes_per_second: on average, since it was made.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte, self._next = 1 / bytes_per_second, time.monotonic()

    def wait(self, num_bytes: int) -> None:
        """Returns when so many bytes more may be sent."""
        self._next += num_bytes * self._seconds_per_byte
        time.sleep(max(self._next - time.monotonic(), 0))


class Upload:
    """The copies to one place.

    Args:
        store: the run directory.
        client: of the place; only the thread of this object uses it from now on.
        newest: that the place holds.
        retention: of the run directory; that of the place differs in ``keep_latest``.
    """

    def __init__(
        self,
        store: Store,
        client: PlaceClient,
        newest: StepName | None,
        retention: RetentionPolicy,
    ) -> None:
        self.place = place = client.place
        self._store, self._client = store, client
        self._retention = RetentionPolicy(
            place.keep_latest or retention.keep_latest, retention.keep_best, retention.keep_every
        )
        self._cadence = place.cadence
        self._last, self._last_time = newest, time.monotonic()  # that was copied, or is next
        self._next: StepName | None = None
        self._current: StepName | None = None
        self._is_ending = self._is_over = self._has_failed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def offer(self, name: StepName, *, is_last: bool) -> None:
        """Makes a checkpoint the next one to copy, if it is due. Its commit was just now.

        Args:
            name: of the checkpoint.
            is_last: it is due in any case.
        """
        with self._change:
            if name == self._last or not (is_last or self._is_due(name)):
                return
            self._store.pin(name)
            self._drop_next()
            self._next, self._last, self._last_time = name, name, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="resumekit-mirror", daemon=True
                )
                with suppress(RuntimeError):  # no thread can be started: at exit, or too many
                    self._thread.start()
            self._change.notify_all()

    def finish(self, deadline: float) -> StepName | None:
        """Waits until the next checkpoint is copied; the one that is not, or None.

        Args:
            deadline: of ``time.monotonic()``.
        """
        with self._change:
            self._is_ending = True
            self._change.notify_all()
            while not self._is_idle() and time.monotonic() < deadline:
                self._change.wait(deadline - time.monotonic())
            self._is_over = True
            missing = self._next or self._current
            self._drop_next()
            return missing

    def _is_idle(self) -> bool:
        is_running = self._thread is not None and self._thread.is_alive()
        return not is_running or (self._next is None and self._current is None)

    def _is_due(self, name: StepName) -> bool:
        if self._last is None:
            return True
        interval, num_steps = self._cadence.interval_seconds, self._cadence.num_steps
        if interval is not None:
            return time.monotonic() - self._last_time >= interval
        # After a rewind the steps begin again below the last one.
        return num_steps is None or not 0 <= name.step - self._last.step < num_steps

    def _drop_next(self) -> None:
        if self._next is not None:
            self._store.unpin(self._next)
            self._next = None

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # of the main thread
        pause = _FIRST_PAUSE_SECONDS
        while (name := self._take()) is not None:
            is_done = self._copy(name)
            with self._change:
                self._current = None
                if is_done or self._next is not None:
                    self._store.unpin(name)
                else:
                    self._next = name
                self._change.notify_all()
                pause = _FIRST_PAUSE_SECONDS if is_done else pause
                if is_done:
                    continue
                if not threading.main_thread().is_alive():  # no connection can be made at exit
                    return
                self._change.wait_for(lambda: self._is_ending, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                if self._is_ending:
                    self._change.wait(_FIRST_PAUSE_SECONDS)

    def _take(self) -> StepName | None:
        """Waits for the next checkpoint; None once there will be none."""
        with self._change:
            self._change.wait_for(lambda: self._next is not None or self._is_over)
            if self._is_over:
                return None
            self._current, self._next = self._next, None
            return self._current

    def _copy(self, name: StepName) -> bool:
        """Whether the checkpoint needs no further attempt."""
        began = time.monotonic()
        try:
            limit = _Limit(self.place.bytes_per_second)
            self._client.put(self._store.open_step(name), self._retention, limit.wait)
        except CheckpointError as error:
            warn("RK-851", "%s is not mirrored to %s: %s", name, self.place, error)
            return True
        except ResumekitError as error:
            if not self._has_failed:
                warn("RK-851", "not mirrored yet, training continues: %s", error)
            self._has_failed = True
            return False
        if self._has_failed:
            logger.info("%s answers again", self.place)
            self._has_failed = False
        logger.debug("%s mirrored to %s, %.1f s", name, self.place, time.monotonic() - began)
        return True
