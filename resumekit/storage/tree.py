"""Directories as a whole: made durably, compared with an inventory, removed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from resumekit.errors import CorruptCheckpointError
from resumekit.storage.io import FileSystem
from resumekit.storage.names import directories_of


def make_durably(file_system: FileSystem, directory: Path) -> None:
    """Makes a directory with its parents; it survives a power cut once this returns.

    Every parent is synced, also those that were there: whoever made them, a process that was killed
    just after or the user's ``mkdir -p``, may not have done it.

    Args:
        file_system: the seam.
        directory: an absolute path.

    Raises:
        OSError: as the failing call said.
    """
    _make(file_system, directory)
    for parent in directory.parents:
        # One that may be passed through but not read cannot be synced, nor made by us.
        with suppress(PermissionError):
            file_system.fsync_dir(parent)


def _make(file_system: FileSystem, directory: Path) -> None:
    try:
        file_system.mkdir(directory)
    except FileNotFoundError:
        if directory.parent == directory:
            raise
        _make(file_system, directory.parent)
        with suppress(FileExistsError):
            file_system.mkdir(directory)
    except FileExistsError:
        pass  # what it is shows when it is used
    except OSError:
        # A read-only or automounted parent may say something else first.
        if not exists(file_system, directory):
            raise


def exists(file_system: FileSystem, directory: Path) -> bool:
    """Whether there is a directory that can be listed."""
    try:
        file_system.list(directory)
    except OSError:
        return False
    return True


def has_directory(file_system: FileSystem, parent: Path, name: str) -> bool:
    """Whether a directory holds one of this name; a link to a directory is none.

    Raises:
        OSError: the parent could not be listed.
    """
    entries = file_system.list(parent)
    return any(entry.name == name and entry.kind == "directory" for entry in entries)


def find_difference(
    file_system: FileSystem, root: Path, sizes: Mapping[str, int], *, besides: str | None = None
) -> tuple[str, str] | None:
    """The first path at which a directory tree is not what the inventory says, and in what way.

    Args:
        file_system: the seam.
        root: the directory to look at.
        sizes: bytes of each file, by its relative path; nothing else may be there.
        besides: except for this one file, of any size.

    Returns:
        The relative path and what is wrong with it; None where all is as it should be.

    Raises:
        OSError: a directory could not be listed.
    """
    directories = directories_of(sizes)
    expected: dict[str, set[str]] = {parent: set() for parent in ("", *directories)}
    for path in (*sizes, *directories):
        expected[path.rpartition("/")[0]].add(path)
    for parent, missing in expected.items():
        prefix = f"{parent}/" if parent else ""
        for entry in file_system.list(root / parent):
            path = prefix + entry.name
            missing.discard(path)
            if path == besides and entry.kind == "file":
                continue
            if path not in sizes and path not in expected:
                return path, f"an extra {_KINDS[entry.kind]} that the manifest does not list"
            wanted = "file" if path in sizes else "directory"
            if entry.kind != wanted:
                return path, f"is a {_KINDS[entry.kind]}, expected a {wanted}"
            if path in sizes and entry.size != sizes[path]:
                return path, f"has {entry.size} bytes, expected {sizes[path]} as the manifest says"
        if missing:
            return min(missing), "is missing"
    return None


_KINDS = {"file": "file", "directory": "directory", "other": "link or special file"}


def remove_tree(file_system: FileSystem, root: Path) -> None:
    """Removes a directory with all that is in it; links are removed, not followed.

    Raises:
        OSError: as the failing call said; part of the tree may be gone.
    """
    pending = [root]
    emptied = []
    while pending:  # a loop, not a recursion: the depth is whatever is found on disk
        directory = pending.pop()
        emptied.append(directory)
        for entry in file_system.list(directory):
            if entry.kind == "directory":
                pending.append(directory / entry.name)
            else:
                file_system.unlink(directory / entry.name)
    for directory in reversed(emptied):
        file_system.rmdir(directory)


def remove_children(file_system: FileSystem, directory: Path, *, keep: frozenset[str]) -> None:
    """Removes all that is in a directory, as far as it goes.

    Args:
        file_system: the seam.
        directory: it stays.
        keep: the names to leave alone.

    Raises:
        OSError: the first failure, after everything else was tried.
    """
    failure: OSError | None = None
    for entry in file_system.list(directory):
        if entry.name in keep:
            continue
        try:
            if entry.kind == "directory":
                remove_tree(file_system, directory / entry.name)
            else:
                file_system.unlink(directory / entry.name)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def write_small(file_system: FileSystem, path: Path, data: bytes) -> None:
    """Writes a new small file; its bytes survive a power cut once this returns.

    Raises:
        OSError: as the failing call said.
    """
    handle = file_system.create(path)
    try:
        file_system.write(handle, [memoryview(data)])
        file_system.fsync(handle)
    finally:
        file_system.close(handle)


def read_small(file_system: FileSystem, path: Path, *, where: str, max_bytes: int) -> bytes:
    """All bytes of a small file that is verified by its own content.

    Args:
        file_system: the seam.
        path: the file.
        where: what error messages call it.
        max_bytes: a larger file is refused before it is read.

    Raises:
        CorruptCheckpointError: it is too large, or shorter than it was a moment ago.
        OSError: as the failing call said.
    """
    handle = file_system.open(path)
    try:
        if handle.size > max_bytes:
            raise CorruptCheckpointError(
                where, found=f"has {handle.size} bytes", expected=f"at most {max_bytes}"
            )
        content = bytearray(handle.size)
        done = 0
        while done < handle.size:
            num_bytes = file_system.read_into(handle, done, memoryview(content)[done:])
            if num_bytes == 0:
                raise CorruptCheckpointError(
                    where, found=f"ends after {done} bytes", expected=str(handle.size)
                )
            done += num_bytes
    finally:
        with suppress(OSError):
            file_system.close(handle)
    return bytes(content)
