"""A mount like that of an object store: a directory is renamed by a copy, one file at a time.

Started as a program: ``python copying_mount.py ROOT MOUNT [CALL]``. What is written to the mount is
in the root. The program ends without a word before the change of that number, as if its machine
had stopped. ``python copying_mount.py ROOT MOUNT network SECONDS`` is a mount as of a network file
system, whose names are cached for so many seconds.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from typing import Any

import mfusepy

_TIMES = ("st_atime", "st_mtime", "st_ctime")
_PLAIN = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")


class CopyingMount(mfusepy.Operations):  # type: ignore[misc]
    """Hands every call to a directory; one call after the other.

    Args:
        root: the directory.
        last: the number of the change before which the process ends; 0 for none.
    """

    use_ns = True

    def __init__(self, root: str, last: int) -> None:
        self._root, self._last, self._num_changes = root, last, 0

    def _path(self, path: str) -> str:
        return self._root + path

    def _changed(self, path: str) -> str:
        """The path in the root, of a change that is made next."""
        self._num_changes += 1
        if self._num_changes == self._last:
            os._exit(1)
        return self._path(path)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._path(path))
        times = {name: getattr(status, f"{name}_ns") for name in _TIMES}
        return times | {name: getattr(status, name) for name in _PLAIN}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def statfs(self, path: str) -> dict[str, Any]:
        status = os.statvfs(self._path(path))
        return {name: getattr(status, name) for name in dir(status) if name.startswith("f_")}

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags & ~getattr(os, "O_DIRECT", 0))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._changed(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._changed(path)
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._changed(path)
        return 0  # the machine below does not stop

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._changed(path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._changed(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._changed(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._changed(path))

    def rename(self, old: str, new: str) -> None:
        if os.path.isdir(self._path(old)):
            self.mkdir(new, 0o777)
            for name in os.listdir(self._path(old)):
                self.rename(f"{old}/{name}", f"{new}/{name}")
            self.rmdir(old)
        else:
            shutil.copyfile(self._path(old), self._changed(new))
            self.unlink(old)


class NetworkMount(CopyingMount):
    """What the client of a network file system may do; a rename is atomic.

    Bytes are in the root once their file is synced or closed, or its size is asked for. The names
    and sizes that other clients have changed are seen once the kernel's caches expire. Every third
    file that is opened is stale. libfuse renames a file that is unlinked while it is open.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root, 0)
        self._unwritten: dict[str, list[tuple[bytes, int]]] = {}
        self._num_opened, self._stale = 0, set[int]()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._write_back(path)
        return super().getattr(path, fh)

    def open(self, path: str, flags: int) -> int:
        self._write_back(path)
        number = super().open(path, flags)
        self._num_opened += 1
        if self._num_opened % 3 == 0:
            self._stale.add(number)
        return number

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if fh in self._stale:
            raise OSError(errno.ESTALE, "stale")
        return super().read(path, size, offset, fh)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._unwritten.setdefault(path, []).append((data, offset))
        return len(data)

    def flush(self, path: str, fh: int) -> int:
        self._write_back(path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return self.flush(path, fh)

    def release(self, path: str, fh: int) -> int:
        self._write_back(path)
        self._stale.discard(fh)
        return super().release(path, fh)

    def rename(self, old: str, new: str) -> None:
        self._write_back(old)
        os.rename(self._path(old), self._path(new))

    def _write_back(self, path: str) -> None:
        for data, offset in self._unwritten.pop(path, ()):
            with open(self._path(path), "r+b") as file:
                file.seek(offset)
                file.write(data)


if __name__ == "__main__":
    root, mount, *last = sys.argv[1:]
    operations: CopyingMount
    caches: dict[str, float] = {}
    if last[:1] == ["network"]:
        operations = NetworkMount(root)
        names = ("attr_timeout", "entry_timeout", "negative_timeout")
        caches = dict.fromkeys(names, float(last[1]))
    else:
        operations = CopyingMount(root, int(last[0]) if last else 0)
    mfusepy.FUSE(operations, mount, foreground=True, nothreads=True, **caches)
