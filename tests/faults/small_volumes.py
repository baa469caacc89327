"""Real file systems, such as small ones that fill up: mounted for a test, and always unmounted."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# A mounted program may be slow to begin, and a killed process may still be in a call when it ends.
_SECONDS = 10.0


@contextmanager
def tmpfs(path: Path, *, num_bytes: int, num_inodes: int | None = None) -> Iterator[Path]:
    """A file system in memory; skips the test where mounting is not allowed."""
    inodes = "" if num_inodes is None else f",nr_inodes={num_inodes}"
    with mounted(path, "-t", "tmpfs", "-o", f"size={num_bytes}{inodes}", "tmpfs"):
        yield path


@contextmanager
def ext4(path: Path, *, num_bytes: int) -> Iterator[Path]:
    """An ext4 file system on a loop device; skips the test where that is not possible."""
    image = path.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(num_bytes)
    try:
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        with mounted(path, "-o", "loop", str(image)):
            yield path
    finally:
        image.unlink()


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """A mount at a new or empty directory; skips the test where it is refused."""
    path.mkdir(exist_ok=True)
    _run("mount", *options, str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def fuse(path: Path, *command: str) -> Iterator[None]:
    """A mount that a program serves until it is killed; skips the test where that is impossible.

    Args:
        path: a new or empty directory.
        *command: of the program, which stays in the foreground.
    """
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse")
    path.mkdir(exist_ok=True)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + _SECONDS
            while not os.path.ismount(path):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    assert process.stderr is not None
                    pytest.skip(f"nothing can be mounted here: {process.stderr.read().strip()}")
                time.sleep(0.01)
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True)
            process.kill()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if done.returncode != 0:
        pytest.skip(f"{command[0]} is refused here: {done.stderr.strip()}")


def fill(volume: Path, *, leave_bytes: int = 0) -> None:
    """Leaves so many bytes of a volume, see ``empty``."""
    filler = _filler(volume) / "bytes"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    if leave_bytes:
        os.truncate(filler, max(filler.stat().st_size - leave_bytes, 0))


def fill_inodes(volume: Path, *, leave_inodes: int = 0) -> None:
    """Leaves so many files that can be made on a volume, see ``empty``."""
    filler = _filler(volume)
    with suppress(OSError):
        for number in itertools.count():
            (filler / f"{number}").touch()
    for path in list(filler.iterdir())[:leave_inodes]:
        path.unlink()


def empty(volume: Path) -> None:
    """Removes what fills a volume."""
    shutil.rmtree(volume / "filler")


def _filler(volume: Path) -> Path:
    directory = volume / "filler"
    directory.mkdir()
    return directory
