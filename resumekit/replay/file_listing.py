"""Which files a command has written that ran without an overlay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

# A listing takes about 10 microseconds a file.
MAX_FILES = 1_000_000

Listing = dict[str, tuple[int, int, int]]


def list_files(directories: Sequence[Path], *, but: Path) -> Listing | None:
    """Inode, size and time of each file; None where there are too many.

    Writes are found afterwards, not while they happen: hooks of the interpreter see none of those
    that libraries in C++ or Rust make.

    Args:
        directories: none of them inside another one.
        but: a directory that is left out.
    """
    found: Listing = {}
    for directory in directories:
        for entry in _files(str(directory), str(but)):
            status = entry.stat(follow_symlinks=False)
            found[entry.path] = (status.st_ino, status.st_size, status.st_mtime_ns)
            if len(found) > MAX_FILES:
                return None
    return found


def changed_files(before: Listing, after: Listing) -> tuple[str, ...]:
    """The paths of new, changed and removed files."""
    return tuple(sorted({path for path, _ in before.items() ^ after.items()}))


def _files(directory: str, but: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.path != but:
                    yield from _files(entry.path, but)
            else:
                yield entry
