"""Faults on demand: a file system whose chosen call fails, or kills the process.

A plan is a list of points separated by commas::

    17=kill          SIGKILL before the 17th write-side call
    17=EIO           the 17th write-side call fails with EIO and is not made
    17+=ENOSPC       all later ones too
    write:3=torn     the 3rd write writes half of its bytes, then SIGKILL
    open:1=EACCES    any call can be named; read-side calls only so
    1+=log           every write-side call is logged on standard error before it is made

A call that kills is logged too: ``failpoint: 17 rename .staging/...``, with its number.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resumekit.errors import ConfigurationError
from resumekit.storage import store
from resumekit.storage.io.file_system import Entry, FileSystem, Free, LocalFileSystem, ReadHandle
from resumekit.testing.task import load_function

WRITE_CALLS = (
    *("mkdir", "create", "write", "fsync", "fsync_dir", "rename", "link", "unlink", "rmdir"),
)
_OTHER_CALLS = (
    "writeback",
    "close",
    "list",
    "entry",
    "open",
    "read_into",
    "advise_sequential",
    "free",
)
_ACTIONS = ("kill", "torn", "log")
_PLAN = "failpoints"


@dataclass(frozen=True)
class Failpoint:
    """What happens at one call.

    Args:
        number: which call, from 1.
        action: ``kill``, ``torn``, ``log``, or the name of an errno.
        call: the name of the calls that are counted; None counts all of the write side.
        sticky: whether later calls fail too.
    """

    number: int
    action: str
    call: str | None = None
    sticky: bool = False

    def hits(self, number: int) -> bool:
        """Whether the call of this number is meant."""
        return number == self.number or (self.sticky and number > self.number)


_POINT = re.compile(r"(?:([a-z_]+):)?([1-9][0-9]{0,8})(\+?)=(\w+)")


def parse_failpoints(text: str) -> tuple[Failpoint, ...]:
    """The plan of a text.

    Raises:
        ConfigurationError: a point is invalid.
    """
    return tuple(_parse_point(part.strip()) for part in text.split(",") if part.strip())


def _parse_point(text: str) -> Failpoint:
    match = _POINT.fullmatch(text)
    if match is None:
        raise ConfigurationError(_PLAN, found=repr(text), expected="[call:]number[+]=action")
    call, number, plus, action = match.groups()
    if call is not None and call not in WRITE_CALLS + _OTHER_CALLS:
        raise ConfigurationError(
            _PLAN, found=f"call {call!r}", expected=f"one of {', '.join(WRITE_CALLS)}"
        )
    if action not in _ACTIONS and action not in errno.errorcode.values():
        expected = "kill, torn, log, or an errno such as EIO"
        raise ConfigurationError(_PLAN, found=f"action {action!r}", expected=expected)
    return Failpoint(int(number), action, call, bool(plus))


class FailpointFileSystem:
    """Another file system that fails where the plan says so.

    Args:
        inner: the one that does the work.
        plan: the points; each counts the calls made through this object.
    """

    def __init__(self, inner: FileSystem, plan: Sequence[Failpoint] = ()) -> None:
        self._inner = inner
        self._plan = tuple(plan)
        self._created: dict[int, Path] = {}
        self.counts: Counter[str] = Counter()

    @property
    def num_write_calls(self) -> int:
        """Write-side calls made so far, failed ones included."""
        return sum(self.counts[call] for call in WRITE_CALLS)

    def mkdir(self, path: Path) -> None:
        self._reach("mkdir", path)
        self._inner.mkdir(path)

    def create(self, path: Path) -> int:
        self._reach("create", path)
        handle = self._inner.create(path)
        self._created[handle] = path
        return handle

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        point = self._next_point("write", self._created.get(handle))
        if point is not None and point.action == "torn":
            self._inner.write(handle, _first_half(buffers))
        _act(point)
        self._inner.write(handle, buffers)

    def writeback(self, handle: int, offset: int, length: int) -> None:
        self._reach("writeback")
        self._inner.writeback(handle, offset, length)

    def fsync(self, handle: int) -> None:
        _act(self._next_point("fsync", self._created.get(handle)))
        self._inner.fsync(handle)

    def close(self, handle: int | ReadHandle) -> None:
        point = self._next_point("close")
        self._inner.close(handle)  # as close(2): the descriptor is closed even on an error
        _act(point)

    def fsync_dir(self, path: Path) -> None:
        self._reach("fsync_dir", path)
        self._inner.fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._reach("rename", source)
        self._inner.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._reach("link", target)
        self._inner.link(source, target)

    def unlink(self, path: Path) -> None:
        self._reach("unlink", path)
        self._inner.unlink(path)

    def rmdir(self, path: Path) -> None:
        self._reach("rmdir", path)
        self._inner.rmdir(path)

    def list(self, path: Path) -> list[Entry]:
        self._reach("list", path)
        return self._inner.list(path)

    def entry(self, path: Path) -> Entry:
        self._reach("entry", path)
        return self._inner.entry(path)

    def open(self, path: Path) -> ReadHandle:
        self._reach("open", path)
        return self._inner.open(path)

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        self._reach("read_into")
        return self._inner.read_into(handle, offset, buffer)

    def advise_sequential(self, handle: ReadHandle) -> None:
        self._reach("advise_sequential")
        self._inner.advise_sequential(handle)

    def free(self, path: Path) -> Free:
        self._reach("free", path)
        return self._inner.free(path)

    def has_atomic_rename(self, path: Path) -> bool:
        return self._inner.has_atomic_rename(path)

    def _reach(self, call: str, path: Path | None = None) -> None:
        _act(self._next_point(call, path), path)

    def _next_point(self, call: str, path: Path | None = None) -> Failpoint | None:
        self.counts[call] += 1
        for point in self._plan:
            is_any = point.call is None and call in WRITE_CALLS
            number = self.num_write_calls if is_any else self.counts[call]
            if (is_any or point.call == call) and point.hits(number):
                if point.action in _ACTIONS:
                    sys.stderr.write(f"failpoint: {number} {call} {path or ''}\n")
                    sys.stderr.flush()
                return point
        return None


def failing(text: str) -> Callable[[], FailpointFileSystem]:
    """A function that makes a local file system with the faults of this plan."""
    plan = parse_failpoints(text)
    return lambda: FailpointFileSystem(LocalFileSystem(), plan)


def launch(
    directory: str, *, target: str, failpoints: str, rank: int | None = None, **options: Any
) -> None:
    """Calls a training function of another file, whose run directories fail by this plan.

    Args:
        directory: its first argument.
        target: the function, as from ``target_of``.
        failpoints: the plan.
        rank: the only rank with faults; None for all ranks.
        options: the other arguments of the function.
    """
    if rank is None or rank == int(os.environ.get("RANK", "0")):
        store.LocalFileSystem = failing(failpoints)  # type: ignore[misc,assignment]
    load_function(target)(directory, **options)


def _act(point: Failpoint | None, path: Path | None = None) -> None:
    if point is None or point.action == "log":
        return
    if point.action in ("kill", "torn"):
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, point.action)
    raise OSError(number, os.strerror(number), None if path is None else str(path))


def _first_half(buffers: Sequence[memoryview]) -> list[memoryview]:
    left = sum(buffer.nbytes for buffer in buffers) // 2
    half = []
    for buffer in buffers:
        half.append(buffer[:left])
        left -= min(left, buffer.nbytes)
    return half
