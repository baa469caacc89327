"""Copies in the memory of a node, which outlive the process, and not the machine.

They are a run directory in shared memory, ``/dev/shm/resumekit-<uid>-<run id>``: readable by this
user alone, with a link to the run directory that the copies belong to.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from resumekit.errors import ResumekitError, SaveError
from resumekit.storage.directories import LOCK
from resumekit.storage.io.file_system import save_errors
from resumekit.storage.ownership import PosixLock
from resumekit.storage.store import Store

ROOT = Path("/dev/shm")
_LINK = "run"
SPARE = "spare"  # files of removed copies, whose pages are used again


def find_memory(run_id: str) -> Path | None:
    """The directory with the copies of a run; None where this user has none."""
    path = _path(run_id)
    return path if _is_ours(path) else None


def create_memory(run_id: str, directory: Path) -> Path:
    """A new directory for the copies of a run.

    Args:
        run_id: of the run, which has none.
        directory: the run directory.

    Raises:
        SaveError: there is no shared memory, or something else has the name.
    """
    _remove_ownerless()
    path = _path(run_id)
    with save_errors(path):
        if not ROOT.is_dir():
            raise SaveError(str(ROOT), found="there is no such directory")
        path.mkdir(mode=0o700)  # fails where the name is taken
        (path / _LINK).symlink_to(directory)
        (path / SPARE).mkdir()
    return path


def remove_memory(run_id: str) -> None:
    """Removes the copies of a run, if there are any."""
    if _is_ours(_path(run_id)):
        shutil.rmtree(_path(run_id), ignore_errors=True)


def _remove_ownerless() -> None:
    """Removes the copies of runs whose directory is gone, and which no process writes."""
    prefix = _path("").name
    for path in ROOT.glob(f"{prefix}*"):
        if not _is_ours(path):
            continue
        run_id, lock = path.name.removeprefix(prefix), PosixLock(wait_seconds=0)
        try:
            is_owned = Store(Path(os.readlink(path / _LINK))).recorded_run_id() == run_id
            if not is_owned and lock.acquire(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)
        except (OSError, ResumekitError):  # nothing is known of it: it stays
            continue
        finally:
            lock.release()


def _path(run_id: str) -> Path:
    return ROOT / f"resumekit-{os.getuid()}-{run_id}"


def _is_ours(path: Path) -> bool:
    """Whether it is a directory that this user alone can use: anybody may create names there."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return is_private and found.st_uid == os.getuid()
