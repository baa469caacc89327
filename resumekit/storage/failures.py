"""The operating system's errors, told as resumekit's own: which path, what happened, what helps."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resumekit.errors import DirectoryError, ResumekitError, SaveError, UnreadableCheckpointError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def saving(path: Path | str) -> Iterator[None]:
    """Turns an OSError of the body into SaveError.

    Raises:
        SaveError: names the path and the cause; ``errno`` is the cause's.
    """
    try:
        yield
    except ResumekitError:
        raise
    except OSError as error:
        remedy = "Free space, or lower keep_latest" if error.errno in _NO_ROOM else None
        failure = SaveError(str(path), found=f"could not be written: {cause(error)}", remedy=remedy)
        failure.errno = error.errno
        raise failure from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turns an OSError of the body into UnreadableCheckpointError: it proves no damage.

    Raises:
        UnreadableCheckpointError: names the file and the cause.
    """
    try:
        yield
    except ResumekitError:
        raise
    except OSError as error:
        failure = UnreadableCheckpointError(where, found=f"could not be read: {cause(error)}")
        failure.errno = error.errno
        raise failure from error


@contextmanager
def using(directory: Path, doing: str) -> Iterator[None]:
    """Turns an OSError of the body into DirectoryError.

    Args:
        directory: the run directory.
        doing: what was tried, e.g. ``"be created"``.

    Raises:
        DirectoryError: names the directory, the cause and, where it is known, the path in it.
    """
    try:
        yield
    except ResumekitError:
        raise
    except OSError as error:
        forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        failure = DirectoryError(
            str(directory),
            found=f"could not {doing}: {cause(error)}",
            remedy="Choose a directory that this job may write to" if forbidden else None,
        )
        failure.errno = error.errno
        raise failure from error


def cause(error: OSError) -> str:
    """What the operating system says, e.g. ``ENOSPC (No space left on device)``."""
    number = error.errno
    if number is None:
        return str(error)
    text = f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
    return f"{text} at {error.filename}" if error.filename else text
