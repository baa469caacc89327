"""File systems that do something of their own before a call reaches the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crashlab.recording import RecordingFileSystem
from resumekit.storage.directories import STAGING
from resumekit.storage.io.file_system import Entry, FileSystem, Free, ReadHandle


class Passing:
    """A file system that hands every call on; subclasses change one of them."""

    def __init__(self, inner: FileSystem) -> None:
        self._inner = inner

    def mkdir(self, path: Path) -> None:
        self._inner.mkdir(path)

    def create(self, path: Path) -> int:
        return self._inner.create(path)

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        self._inner.write(handle, buffers)

    def writeback(self, handle: int, offset: int, length: int) -> None:
        self._inner.writeback(handle, offset, length)

    def fsync(self, handle: int) -> None:
        self._inner.fsync(handle)

    def close(self, handle: int | ReadHandle) -> None:
        self._inner.close(handle)

    def fsync_dir(self, path: Path) -> None:
        self._inner.fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._inner.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._inner.link(source, target)

    def unlink(self, path: Path) -> None:
        self._inner.unlink(path)

    def rmdir(self, path: Path) -> None:
        self._inner.rmdir(path)

    def list(self, path: Path) -> list[Entry]:
        return self._inner.list(path)

    def entry(self, path: Path) -> Entry:
        return self._inner.entry(path)

    def open(self, path: Path) -> ReadHandle:
        return self._inner.open(path)

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        return self._inner.read_into(handle, offset, buffer)

    def advise_sequential(self, handle: ReadHandle) -> None:
        self._inner.advise_sequential(handle)

    def free(self, path: Path) -> Free:
        return self._inner.free(path)

    def has_atomic_rename(self, path: Path) -> bool:
        return self._inner.has_atomic_rename(path)


class RefusesLinks(Passing):
    """A file system on which links fail.

    Args:
        inner: the file system below.
        causes: the errno of each link; None for one that is made.
    """

    def __init__(self, inner: FileSystem, causes: Iterator[int | None]) -> None:
        super().__init__(inner)
        self._causes = causes

    def link(self, source: Path, target: Path) -> None:
        cause = next(self._causes)
        if cause is not None:
            raise OSError(cause, os.strerror(cause))
        super().link(source, target)


class CopiesOnRename(Passing):
    """A file system that renames a directory by a copy, one file after the other."""

    def has_atomic_rename(self, path: Path) -> bool:
        del path
        return False

    def rename(self, source: Path, target: Path) -> None:
        if self.entry(source).kind != "directory":
            super().rename(source, target)
            return
        self.mkdir(target)
        for entry in self.list(source):
            if entry.kind == "directory":
                self.rename(source / entry.name, target / entry.name)
            else:
                self.link(source / entry.name, target / entry.name)
                self.unlink(source / entry.name)
        self.rmdir(source)


class LowerLayer(Passing):
    """An overlay on which every directory but those in staging is in a lower layer."""

    def rename(self, source: Path, target: Path) -> None:
        if self.entry(source).kind == "directory" and STAGING not in source.parts:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        super().rename(source, target)


class BeforeEveryChange(Passing):
    """Calls ``before_change`` before each call of the write side."""

    def before_change(self) -> None:
        raise NotImplementedError

    def mkdir(self, path: Path) -> None:
        self.before_change()
        super().mkdir(path)

    def create(self, path: Path) -> int:
        self.before_change()
        return super().create(path)

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        self.before_change()
        super().write(handle, buffers)

    def fsync(self, handle: int) -> None:
        self.before_change()
        super().fsync(handle)

    def fsync_dir(self, path: Path) -> None:
        self.before_change()
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self.before_change()
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.before_change()
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self.before_change()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self.before_change()
        super().rmdir(path)


class Killed(BaseException):
    """The process is gone; no handler of it can do anything any more."""


class KilledAt(BeforeEveryChange):
    """Lets a number of changing calls through, and then nothing."""

    def __init__(self, inner: FileSystem, num_calls: int) -> None:
        super().__init__(inner)
        self._left = num_calls

    def before_change(self) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1


class FailsASync(Passing):
    """Lets one fsync fail.

    Args:
        inner: the file system in memory.
        number: of the fsync, of a file or a directory, from 0.
    """

    def __init__(self, inner: FileSystem, number: int) -> None:
        super().__init__(inner)
        assert isinstance(inner, RecordingFileSystem)
        self._disk = inner
        self._left = number

    def fsync(self, handle: int) -> None:
        self._maybe_fail(handle)
        super().fsync(handle)

    def fsync_dir(self, path: Path) -> None:
        self._maybe_fail(path)
        super().fsync_dir(path)

    def _maybe_fail(self, target: int | Path) -> None:
        self._left -= 1
        if self._left == -1:
            self._disk.fail_sync(target)


class FailsFrom(BeforeEveryChange):
    """Lets one changing call fail, or all from then on.

    Args:
        inner: the file system in memory.
        number: of the call, from 0.
        cause: the errno.
        for_good: whether later calls fail too.
    """

    def __init__(self, inner: FileSystem, number: int, cause: int, *, for_good: bool) -> None:
        super().__init__(inner)
        assert isinstance(inner, RecordingFileSystem)
        self._disk = inner
        self._left = number
        self._cause = cause
        self._for_good = for_good

    @property
    def has_failed(self) -> bool:
        return self._left < 0

    def before_change(self) -> None:
        if self._is_hit():
            raise OSError(self._cause, os.strerror(self._cause))

    def fsync(self, handle: int) -> None:
        if self._is_hit():
            self._disk.fail_sync(handle)
        self._inner.fsync(handle)

    def fsync_dir(self, path: Path) -> None:
        if self._is_hit():
            self._disk.fail_sync(path)
        self._inner.fsync_dir(path)

    def _is_hit(self) -> bool:
        self._left -= 1
        return self._left == -1 or (self._for_good and self._left < 0)


@dataclass
class Interruption:
    """Something that another process does before a call of this number, from 0."""

    at_call: int
    action: Callable[[], None]
    num_calls: int = 0

    @property
    def has_happened(self) -> bool:
        return self.num_calls > self.at_call

    def tick(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.at_call + 1:
            self.action()


class Interrupted(BeforeEveryChange):
    """Lets another process act at one instant."""

    def __init__(self, inner: FileSystem, interruption: Interruption) -> None:
        super().__init__(inner)
        self._interruption = interruption

    def before_change(self) -> None:
        self._interruption.tick()
