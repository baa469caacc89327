"""Directories of a run: the names in them, whole trees, and small files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resumekit.errors import ConfigurationError, CorruptCheckpointError
from resumekit.storage.io.file_system import FileSystem, read_fully

MANIFEST = "manifest.json"
LATEST = "latest"
OWNER = "owner.json"
LOCK = ".lock"
STAGING = ".staging"
QUARANTINE = "quarantine"
TRAININGS = "trainings.json"  # of a command that begins several: which has which run

_STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})(?:-r([1-9][0-9]{0,5}))?")
_MAX_NAME_BYTES = 255  # of one part, on every common file system
_MAX_PATH_BYTES = 1024
_SPECIAL_PARTS = frozenset(("", ".", ".."))


@dataclass(frozen=True, order=True)
class StepName:
    """The name of a step directory; orders by age.

    Args:
        step: optimizer steps.
        revision: 0, or higher where a step was saved again; nothing is replaced.
    """

    step: int
    revision: int = 0

    def __str__(self) -> str:
        suffix = f"-r{self.revision}" if self.revision else ""
        return f"step-{self.step:08d}{suffix}"

    @classmethod
    def parse(cls, text: str) -> StepName | None:
        """The step name of this text, or None; every name has exactly one spelling."""
        match = _STEP_NAME.fullmatch(text)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2] or 0))

    @classmethod
    def from_text(cls, text: str) -> StepName:
        """The step name of a user's text.

        Raises:
            ConfigurationError: it is not a step name.
        """
        name = cls.parse(text)
        if name is None:
            raise ConfigurationError(
                repr(text), found="not a step name", expected="'step-00000500'"
            )
        return name


def path_problem(path: str) -> str | None:
    """Why this cannot be the path of a file in a step directory; None when it can."""
    parts = path.split("/")
    if not _SPECIAL_PARTS.isdisjoint(parts):
        return "is not a plain relative path"
    if "\\" in path or not path.isprintable():
        return "holds a backslash or an unprintable character"
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "is not Unicode"
    if len(encoded) > _MAX_PATH_BYTES or any(
        len(part) > _MAX_NAME_BYTES for part in encoded.split(b"/")
    ):
        return "is too long"
    if path == MANIFEST:
        return "is the manifest's own"
    return None


def paths_problem(paths: Iterable[str]) -> str | None:
    """Why these cannot be the files of one step directory; None when they can.

    Two spellings of one name (upper and lower case, composed and decomposed characters) are one
    file on some file systems, and a name cannot be both a file and a directory.
    """
    spelling = {_folded(MANIFEST): MANIFEST}
    directories: set[str] = set()
    files: set[str] = set()
    for path in paths:
        problem = path_problem(path)
        if problem is not None:
            return f"{path[:80]!r} {problem}"
        for prefix in (path, *_new_directories(path, directories)):
            if spelling.setdefault(_folded(prefix), prefix) != prefix:
                return f"{path[:80]!r} is another spelling of {spelling[_folded(prefix)][:80]!r}"
        if path in files:
            return f"{path[:80]!r} is listed twice"
        files.add(path)
    for path in (files | {MANIFEST}) & directories:
        return f"{path[:80]!r} is both a file and a directory"
    return None


def directories_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Every directory that these files need, parents first."""
    found: set[str] = set()
    for path in paths:
        _new_directories(path, found)
    return tuple(sorted(found))


def _new_directories(path: str, known: set[str]) -> list[str]:
    """The directories above a file that are not known, and from now on are."""
    found = []
    parent = path.rpartition("/")[0]
    while parent and parent not in known:
        found.append(parent)
        parent = parent.rpartition("/")[0]
    known.update(found)
    return found


def _folded(path: str) -> str:
    if path.isascii():
        return path.casefold()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def make_durable(file_system: FileSystem, directory: Path) -> None:
    """Creates a directory with its parents; it survives a power cut once this returns.

    Existing parents are synced too: a killed process or a user's ``mkdir -p`` may have created them
    without a sync.

    Args:
        file_system: the file system.
        directory: an absolute path.

    Raises:
        OSError: as the failing call said.
    """
    _make(file_system, directory)
    for parent in directory.parents:
        # A parent without read permission cannot be synced, and this process did not create it.
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
        pass  # if it is no directory, its first use fails
    except OSError:
        # A read-only or automounted parent may raise another error first.
        if not exists(file_system, directory):
            raise


def exists(file_system: FileSystem, directory: Path) -> bool:
    """Whether there is a directory that can be listed."""
    try:
        file_system.list(directory)
    except OSError:
        return False
    return True


def is_taken(file_system: FileSystem, path: Path) -> bool:
    """Whether there is anything of this name, be it a dangling link.

    Raises:
        OSError: it could not be found out.
    """
    try:
        file_system.entry(path)
    except FileNotFoundError:
        return False
    return True


def has_directory(file_system: FileSystem, parent: Path, name: str) -> bool:
    """Whether a directory holds one of this name; a link does not count.

    Raises:
        OSError: the parent could not be listed.
    """
    entries = file_system.list(parent)
    return any(entry.name == name and entry.kind == "directory" for entry in entries)


def find_difference(
    file_system: FileSystem, root: Path, sizes: Mapping[str, int], *, except_file: str | None = None
) -> tuple[str, str] | None:
    """The first difference between a directory tree and the inventory.

    Args:
        file_system: the file system.
        root: the root of the tree.
        sizes: bytes of each file by its relative path; no other file may exist.
        except_file: one more file that may exist, of any size.

    Returns:
        The relative path and what is wrong with it; None without a difference.

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
            if path == except_file and entry.kind == "file":
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
    """Removes a directory and its content; links are removed, not followed.

    Raises:
        OSError: as the failing call said; part of the tree may be gone.
    """
    pending = [root]
    emptied = []
    while pending:  # a loop, not a recursion: the depth on disk is unlimited
        directory = pending.pop()
        emptied.append(directory)
        for entry in file_system.list(directory):
            if entry.kind == "directory":
                pending.append(directory / entry.name)
            else:
                file_system.unlink(directory / entry.name)
    for directory in reversed(emptied):
        file_system.rmdir(directory)


def write_small(file_system: FileSystem, path: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes a new small file; with ``sync``, its bytes survive a power cut once this returns.

    Raises:
        OSError: as the failing call said.
    """
    handle = file_system.create(path)
    try:
        file_system.write(handle, [memoryview(data)])
        if sync:
            file_system.fsync(handle)
    finally:
        file_system.close(handle)


def read_small(file_system: FileSystem, path: Path, *, where: str, max_bytes: int) -> bytes:
    """All bytes of a small file.

    Args:
        file_system: the file system.
        path: the file.
        where: what error messages call it.
        max_bytes: a larger file is refused before it is read.

    Raises:
        CorruptCheckpointError: it is too large, or became shorter.
        OSError: as the failing call said.
    """
    handle = file_system.open(path)
    try:
        if handle.size > max_bytes:
            raise CorruptCheckpointError(
                where, found=f"has {handle.size} bytes", expected=f"at most {max_bytes}"
            )
        content = bytearray(handle.size)
        num_bytes = read_fully(file_system, handle, 0, memoryview(content))
        if num_bytes < handle.size:
            raise CorruptCheckpointError(
                where, found=f"ends after {num_bytes} bytes", expected=str(handle.size)
            )
    finally:
        with suppress(OSError):
            file_system.close(handle)
    return bytes(content)
