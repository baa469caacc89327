"""The file system interface: every read and write of a run directory goes through a ``FileSystem``.

Tests replace it: by one in memory that replays every state that a power cut may leave, and by one
that fails at a chosen call.

In a power cut each call promises what POSIX promises: data survives after ``fsync`` of the file, a
name (or its removal) after ``fsync_dir`` of its directory, and nothing else has an order.

The local file system reads and writes large aligned memory directly (O_DIRECT) where it can; all
other bytes go through the page cache. Nothing else differs: a file grows by appending, and fsync
makes its bytes durable.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from resumekit.errors import (
    DirectoryError,
    InsufficientSpaceError,
    ResumekitError,
    SaveError,
    UnreadableCheckpointError,
)
from resumekit.log import logger
from resumekit.storage.io.direct import FUSE, DirectIO, type_of_file_system

Kind = Literal["file", "directory", "other"]

# Takes the bytes of one read or write. The threads that read and write call it, also at once.
Observer: TypeAlias = Callable[[int], None]


@dataclass(frozen=True)
class Entry:
    """One name in a directory. Links, pipes, devices and sockets are ``other``.

    Args:
        name: the last part of the path.
        kind: what the name itself is; links are never followed.
        size: bytes of a file; 0 for everything else.
    """

    name: str
    kind: Kind
    size: int = 0


@dataclass(frozen=True)
class ReadHandle:
    """A regular file that is open for reading.

    Args:
        number: whatever the file system knows it by.
        size: its bytes when it was opened.
    """

    number: int
    size: int


@dataclass(frozen=True)
class Free:
    """Room left on a file system.

    Args:
        num_bytes: bytes that this user may still write.
        num_inodes: files and directories that may still be created; None without a limit.
    """

    num_bytes: int
    num_inodes: int | None


class FileSystem(Protocol):
    """The calls that resumekit makes. Each one raises OSError as the system call would."""

    def mkdir(self, path: Path) -> None:
        """Creates one directory; the parent must exist, the path must not."""
        ...

    def create(self, path: Path) -> int:
        """A handle of a new, empty file; the path must not exist, not even as a dangling link."""
        ...

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        """Appends all bytes of all buffers (flat, unsigned bytes)."""
        ...

    def writeback(self, handle: int, offset: int, length: int) -> None:
        """A hint to begin writing these bytes to the device; it promises nothing."""
        ...

    def fsync(self, handle: int) -> None:
        """The file's bytes survive a power cut once this returns."""
        ...

    def close(self, handle: int | ReadHandle) -> None:
        """Closes the handle, also when this raises."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """The names in this directory survive a power cut once this returns."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Renames atomically. A file replaces a file; a directory needs a free target."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Gives a file one more name; the target must not exist, and links are not followed."""
        ...

    def unlink(self, path: Path) -> None:
        """Removes one name that is not a directory."""
        ...

    def rmdir(self, path: Path) -> None:
        """Removes one empty directory."""
        ...

    def list(self, path: Path) -> list[Entry]:
        """The names in a directory, sorted."""
        ...

    def entry(self, path: Path) -> Entry:
        """One name, as its directory's list has it; FileNotFoundError where there is none."""
        ...

    def open(self, path: Path) -> ReadHandle:
        """A handle for reading; the last part of the path must be a regular file, not a link."""
        ...

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        """Bytes read into the front of the buffer; 0 only at the end of the file."""
        ...

    def advise_sequential(self, handle: ReadHandle) -> None:
        """A hint that the file will be read from front to back."""
        ...

    def free(self, path: Path) -> Free:
        """The room left on the file system that holds this directory."""
        ...

    def has_atomic_rename(self, path: Path) -> bool:
        """Whether a directory is renamed as a whole on the file system that holds this one."""
        ...


_TRANSIENT = (errno.EIO, errno.ESTALE)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _retried(read: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A call that reads, made once more after an error that may be gone by then."""

    @functools.wraps(read)
    def attempt(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return read(*arguments, **options)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
        return read(*arguments, **options)

    return attempt


class LocalFileSystem:
    """The operating system's calls; large aligned memory is transferred by direct I/O.

    A read that fails with EIO or ESTALE is tried once more; a write never is.
    """

    def __init__(self) -> None:
        self._sync_file_range = _find_sync_file_range()
        self._direct = DirectIO()
        self._observer: Observer | None = None
        self._syncs_directories = True  # as far as is known

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Calls the observer for each read and write in the body."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _report(self, num_bytes: int) -> None:
        observer = self._observer
        if observer is not None:
            observer(num_bytes)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        self._direct.opened(descriptor, path)
        return descriptor

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        while pending:
            written = self._direct.write(handle, pending)
            if written == 0:
                raise OSError(errno.EIO, "write made no progress")
            pending = _after(pending, written)
            self._report(written)

    def writeback(self, handle: int, offset: int, length: int) -> None:
        if self._sync_file_range is not None and not self._direct.is_direct(handle):
            # Its result does not matter: fsync writes the rest.
            self._sync_file_range(handle, offset, length, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, handle: int) -> None:
        _fsync(handle)

    def close(self, handle: int | ReadHandle) -> None:
        descriptor = handle.number if isinstance(handle, ReadHandle) else handle
        self._direct.closing(descriptor)
        os.close(descriptor)

    def fsync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fsync(descriptor)
        except OSError as error:
            # Not a failed sync: some FUSE file systems have none for directories.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
            if self._syncs_directories:
                self._syncs_directories = False
                logger.info("%s cannot be synced: a power cut may undo the newest save", path)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    @_retried
    def list(self, path: Path) -> list[Entry]:
        entries = []
        with os.scandir(path) as found:
            for item in found:
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed meanwhile by another process
                entries.append(_entry(item.name, status))
        return sorted(entries, key=lambda entry: entry.name)

    @_retried
    def entry(self, path: Path) -> Entry:
        return _entry(path.name, os.lstat(path))

    @_retried
    def open(self, path: Path) -> ReadHandle:
        # O_NONBLOCK: opening a pipe must fail below, not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._direct.opened(descriptor, path)
        return ReadHandle(descriptor, status.st_size)

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        try:
            num_bytes = self._direct.read(handle.number, offset, buffer)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            num_bytes = self._read_again(handle, offset, buffer)
        self._report(num_bytes)
        return num_bytes

    def _read_again(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        """One read through a descriptor of its own: a stale one stays stale."""
        path = self._direct.path_of(handle.number)
        again = self.open(path)
        try:
            if again.size != handle.size:
                raise OSError(errno.ESTALE, "replaced by another file", str(path))
            return os.preadv(again.number, [buffer], offset)
        finally:
            self.close(again)

    def advise_sequential(self, handle: ReadHandle) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.number, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def free(self, path: Path) -> Free:
        status = os.statvfs(path)
        # btrfs and others count no inodes: they report none at all.
        num_inodes = status.f_favail if status.f_files else None
        return Free(status.f_bavail * status.f_frsize, num_inodes)

    def has_atomic_rename(self, path: Path) -> bool:
        # Mounted object stores are FUSE; most of them copy and delete one file after the other.
        return type_of_file_system(path) != FUSE


_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin write-out of dirty pages, do not wait for it


def _after(buffers: list[memoryview], written: int) -> list[memoryview]:
    """The buffers without their first ``written`` bytes."""
    for index, buffer in enumerate(buffers):
        if written < buffer.nbytes:
            return [buffer[written:], *buffers[index + 1 :]]
        written -= buffer.nbytes
    return []


def _fsync(descriptor: int) -> None:
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:  # macOS: fsync alone leaves the bytes in the drive's cache
        fcntl.fcntl(descriptor, full_sync)


def _entry(name: str, status: os.stat_result) -> Entry:
    if stat.S_ISREG(status.st_mode):
        return Entry(name, "file", status.st_size)
    if stat.S_ISDIR(status.st_mode):
        return Entry(name, "directory")
    return Entry(name, "other")


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    # Linux only, and not in Python's os module.
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = function
    return found


def observed(file_system: FileSystem, observer: Observer) -> AbstractContextManager[None]:
    """Calls the observer for each read and write in the body, if this file system can."""
    if isinstance(file_system, LocalFileSystem):
        return file_system.observed(observer)
    return nullcontext()


def read_fully(file_system: FileSystem, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
    """Bytes read into the buffer: all of it, or fewer where the file ends."""
    done = 0
    while done < buffer.nbytes:
        num_bytes = file_system.read_into(handle, offset + done, buffer[done:])
        if num_bytes == 0:
            break
        done += num_bytes
    return done


MAKE_ROOM = "Free space first; then a lower keep_latest keeps it free"
_CHOOSE = "Choose a directory that this job may write to"
_FULL = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), MAKE_ROOM)
_DENIED = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _CHOOSE)
_NO_LOCKS = {errno.ENOLCK: 'If no other job ever uses it, pass lock="none"'}
_REMEDIES = {SaveError: _FULL, DirectoryError: {**_FULL, **_DENIED, **_NO_LOCKS}}
_Failure = type[SaveError] | type[UnreadableCheckpointError] | type[DirectoryError]


def save_errors(path: Path | str) -> AbstractContextManager[None]:
    """Turns an OSError of the body into SaveError.

    Raises:
        SaveError: names the path and the cause; ``errno`` is the cause's.
        InsufficientSpaceError: the same, where the disk or the quota is full.
    """
    return _os_errors(SaveError, str(path), "be written")


def read_errors(where: str) -> AbstractContextManager[None]:
    """Turns an OSError of the body into UnreadableCheckpointError: it is no proof of damage.

    Raises:
        UnreadableCheckpointError: names the file and the cause.
    """
    return _os_errors(UnreadableCheckpointError, where, "be read")


def directory_errors(directory: Path, doing: str) -> AbstractContextManager[None]:
    """Turns an OSError of the body into DirectoryError.

    Args:
        directory: the run directory.
        doing: the attempted action, e.g. ``"be created"``.

    Raises:
        DirectoryError: names the directory, the cause and, where it is known, the path in it.
    """
    return _os_errors(DirectoryError, str(directory), doing)


@contextmanager
def _os_errors(kind: _Failure, where: str, doing: str) -> Iterator[None]:
    try:
        yield
    except ResumekitError:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(kind, {}).get(error.errno or 0)
        kind = InsufficientSpaceError if kind is SaveError and remedy is MAKE_ROOM else kind
        failure = kind(where, found=f"could not {doing}: {describe(error)}", remedy=remedy)
        failure.errno = error.errno
        raise failure from error


def describe(error: OSError) -> str:
    """The operating system's description, e.g. ``ENOSPC (No space left on device)``."""
    number = error.errno
    if number is None:
        return str(error)
    text = f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
    return f"{text} at {error.filename}" if error.filename else text
