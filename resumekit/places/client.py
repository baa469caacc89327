"""Calls to a place that may be away, slow, or never return.

Each call runs in a daemon thread. One that shows no progress for ``STALL_SECONDS`` is abandoned
there: nothing can interrupt it, and it ends at its next block, if it ever gets there. After an
error the place is opened again, as connections and credentials expire.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

from resumekit.errors import (
    CheckpointError,
    ConfigurationError,
    MissingDependencyError,
    PlaceError,
    ResumekitError,
)
from resumekit.places.place import Place
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import Observer
from resumekit.storage.manifest import Manifest, StepReader
from resumekit.storage.retention import RetentionPolicy

STALL_SECONDS = 60.0
_MAX_ABANDONED = 3
_T = TypeVar("_T")


class OpenPlace(Protocol):
    """The copies in one place. Each call may raise any error of the location."""

    def names(self) -> list[StepName]:
        """The complete copies, newest first."""
        ...

    def manifest(self, name: StepName) -> Manifest:
        """The verified manifest of a copy."""
        ...

    def blocks(self, name: StepName, entry: FileEntry) -> Iterator[memoryview]:
        """The bytes of a file, each block valid until the next; not verified."""
        ...

    def put(self, source: StepReader, retention: RetentionPolicy, observer: Observer) -> None:
        """Copies a checkpoint and verifies the copy; then removes what retention does not keep.

        Args:
            source: the checkpoint.
            retention: which copies stay; this one always does.
            observer: takes the number of bytes of each block.
        """
        ...


class PlaceClient:
    """One place; used by one thread at a time.

    Args:
        place: which one.
        open_place: makes a connection.

    The methods are those of ``OpenPlace``. They raise PlaceError where the place does not answer or
    refuses, without credentials in its text, and CheckpointError where the copy or the source is
    damaged.
    """

    def __init__(self, place: Place, open_place: Callable[[Place], OpenPlace]) -> None:
        self.place = place
        self._open_place = open_place
        self._opened: OpenPlace | None = None
        self._abandoned: list[threading.Thread] = []

    def names(self) -> list[StepName]:
        return self._call(lambda place, _: place.names())

    def manifest(self, name: StepName) -> Manifest:
        return self._call(lambda place, _: place.manifest(name))

    def blocks(self, name: StepName, entry: FileEntry) -> Iterator[memoryview]:
        iterator = self._call(lambda place, _: place.blocks(name, entry))
        while (block := self._call(lambda *_: next(iterator, None))) is not None:
            yield block

    def put(self, source: StepReader, retention: RetentionPolicy, observer: Observer) -> None:
        self._call(lambda place, noted: place.put(source, retention, noted), observer)

    def _call(
        self, action: Callable[[OpenPlace, Observer], _T], observer: Observer = lambda _: None
    ) -> _T:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise self._error("earlier calls have not returned yet")
        call = _Call(lambda noted: action(self._connected(), noted), observer)
        try:
            return call.result()
        except (CheckpointError, ConfigurationError, MissingDependencyError, PlaceError):
            self._opened = None
            raise
        except _StalledError:
            self._abandoned.append(call.thread)
            self._opened = None
            raise self._error(f"no answer for {STALL_SECONDS:g} seconds") from None
        except Exception as error:  # noqa: BLE001 - each store has errors of its own
            self._opened = None
            kind = "" if isinstance(error, ResumekitError) else f"{type(error).__name__}: "
            # Without the cause, which a traceback would show with its credentials.
            raise self._error(kind + " ".join(str(error).split())) from None

    def _connected(self) -> OpenPlace:
        if self._opened is None:
            self._opened = self._open_place(self.place)
        return self._opened

    def _error(self, found: str) -> PlaceError:
        return PlaceError(str(self.place), found=self.place.without_secrets(found))


class _StalledError(Exception):
    """A call made no progress, or its thread was abandoned for that."""


class _Call(Generic[_T]):
    """One call in a daemon thread of its own.

    Args:
        action: what it does; it calls what it is given for each block.
        observer: takes the number of bytes of each block.
    """

    def __init__(self, action: Callable[[Observer], _T], observer: Observer) -> None:
        self._action, self._observer = action, observer
        self._outcome: Future[_T] = Future()
        self._is_abandoned = False
        self._last_progress = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="resumekit-place", daemon=True)

    def result(self) -> _T:
        """Makes the call; its result, or its error."""
        self.thread.start()
        while not wait([self._outcome], timeout=self._seconds_left()).done:
            if self._seconds_left() <= 0:
                self._is_abandoned = True
                raise _StalledError
        return self._outcome.result()

    def _seconds_left(self) -> float:
        return max(self._last_progress + STALL_SECONDS - time.monotonic(), 0)

    def _note(self, num_bytes: int) -> None:
        if self._is_abandoned:
            raise _StalledError
        self._last_progress = time.monotonic()
        self._observer(num_bytes)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # of the main thread
        try:
            self._outcome.set_result(self._action(self._note))
        except BaseException as error:  # noqa: BLE001 - it is raised by `result`
            self._outcome.set_exception(error)
