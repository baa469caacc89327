"""Names and files of a run directory: whole trees, small files, and JSON that ends with its digest.

Small JSON files (the manifest, the owner record) have a last line with the digest of all bytes
before it in a fixed spelling, so that a change of any byte is detected::

    {
      "format": "resumekit checkpoint",
      "files": [
        {"path": "state/rank-00000.json", "size": 512, "digest": "…", "writer": 0}
      ],
      "digest": "xxh3-128:0123456789abcdef0123456789abcdef"
    }

A digest does not prove that the content is well-formed, so the parser is strict too.
"""

from __future__ import annotations

import errno
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import xxhash

from resumekit.errors import ConfigurationError, CorruptCheckpointError, UnsupportedValueError
from resumekit.storage.files import is_digest
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
_NUM_NAMED = 3


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


class TreeDifference(NamedTuple):
    """A difference between a directory tree and its inventory.

    Args:
        path: relative to the root of the tree.
        problem: what is wrong with it.
        is_listed: whether the inventory lists it.
    """

    path: str
    problem: str
    is_listed: bool = True


def find_differences(
    file_system: FileSystem, root: Path, sizes: Mapping[str, int], *, except_file: str | None = None
) -> Iterator[TreeDifference]:
    """The differences between a directory tree and its inventory, until the first listed one.

    Args:
        file_system: the file system.
        root: the root of the tree.
        sizes: bytes of each file by its relative path.
        except_file: one more file, of any size.

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
            kind = _KINDS[entry.kind]
            if path not in sizes and path not in expected:
                yield TreeDifference(
                    path, f"an extra {kind} that the manifest does not list", False
                )
                continue
            wanted = "file" if path in sizes else "directory"
            if entry.kind != wanted:
                yield TreeDifference(path, f"is a {kind}, expected a {wanted}")
                return
            if path in sizes and entry.size != sizes[path]:
                expected_size = f"expected {sizes[path]} as the manifest says"
                yield TreeDifference(path, f"has {entry.size} bytes, {expected_size}")
                return
        if missing:
            yield TreeDifference(min(missing), "is missing")
            return


def name_few(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


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


def rename_directory(file_system: FileSystem, source: Path, target: Path) -> bool:
    """Renames a directory as a whole; False where an overlay has it in a lower layer.

    Raises:
        OSError: as the failing call said.
    """
    try:
        file_system.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def write_small(file_system: FileSystem, path: Path, data: bytes, *, sync: bool = True) -> None:
    """Writes a new small file; with ``sync``, its bytes survive a power cut once this returns.

    Raises:
        OSError: as the failing call said; the file is removed.
    """
    handle = file_system.create(path)
    with _removed_after_errors(file_system, path):
        try:
            file_system.write(handle, [memoryview(data)])
            if sync:
                file_system.fsync(handle)
        finally:
            file_system.close(handle)


def replace_small(
    file_system: FileSystem, path: Path, data: bytes, *, draft: Path, sync: bool = True
) -> None:
    """Writes a small file under another name first: the path has the former file or the new one.

    Args:
        file_system: the file system.
        path: the file.
        data: its bytes.
        draft: the other name, which is free.
        sync: whether the bytes survive a power cut once this returns; the name does not.

    Raises:
        OSError: as the failing call said; the draft is removed.
    """
    write_small(file_system, draft, data, sync=sync)
    with _removed_after_errors(file_system, draft):
        file_system.rename(draft, path)


@contextmanager
def _removed_after_errors(file_system: FileSystem, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        with suppress(OSError):
            file_system.unlink(path)
        raise


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


# ---------------------------------------------------------------- JSON with its digest

MAX_JSON_BYTES = 64 << 20
MAX_DEPTH = 64
_MAX_VALUES = 4_000_000
_MAX_DIGITS = 1000
_INTEGER_END = 10 ** (_MAX_DIGITS - 1)

_LAST_LINE = b'  "digest": "xxh3-128:%s"\n}\n'
_LAST_LINE_BYTES = len(_LAST_LINE) - 2 + 32


def seal(fields: Mapping[str, Any]) -> bytes:
    """These fields as readable JSON that ends with its digest.

    Raises:
        UnsupportedValueError: a value that JSON would change; names the path to it.
    """
    lines = [f"  {json.dumps(key)}: {_text(key, value)},\n" for key, value in fields.items()]
    body = ("{\n" + "".join(lines)).encode("ascii")
    return body + _LAST_LINE % xxhash.xxh3_128_hexdigest(body).encode("ascii")


def unseal(data: bytes, *, where: str) -> dict[str, Any]:
    """The fields of a file that ``seal`` made, without the digest.

    Args:
        data: the whole file.
        where: what error messages call it.

    Raises:
        CorruptCheckpointError: the digest differs, or the content is not strict JSON.
    """
    body, last_line = data[:-_LAST_LINE_BYTES], data[-_LAST_LINE_BYTES:]
    digest = last_line[-36:-4].decode("ascii", "replace")
    if not is_digest(digest) or last_line != _LAST_LINE % digest.encode("ascii"):
        raise CorruptCheckpointError(
            where, found=f"{len(data)} bytes without the line that seals them"
        )
    found = xxhash.xxh3_128_hexdigest(body)
    if found != digest:
        raise CorruptCheckpointError(
            where, found=f"its digest is {found}", expected=f"{digest} as its last line says"
        )
    fields = parse_json(data, where=where)
    if not isinstance(fields, dict) or fields.pop("digest", None) is None:
        raise CorruptCheckpointError(where, found="not a sealed JSON object")
    return fields


def parse_json(data: bytes, *, where: str) -> Any:
    """The value of strict JSON: UTF-8, no duplicate keys, no NaN, limited size.

    Args:
        data: the whole text.
        where: what error messages call it.

    Raises:
        CorruptCheckpointError: names what is wrong with it.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            where, found=f"{len(data)} bytes of JSON", expected=f"at most {MAX_JSON_BYTES}"
        )
    _check_structure(data, where)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except ValueError as error:  # also what json and the UTF-8 decoder raise
        raise CorruptCheckpointError(where, found=f"not strict JSON: {error}") from error


_STRING = re.compile(rb'"[^"]*"?')
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_DEPTH_CHANGE = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord(","): 0}


def _check_structure(data: bytes, where: str) -> None:
    # Before json parses it: deep nesting causes a RecursionError or, with a raised recursion limit,
    # a crash, and very many tiny values take many times the memory of their text.
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_number(unescaped.count(b'"') // 2, where)  # first: each match below takes memory
    structure = _STRING.sub(b"", unescaped).translate(None, _NOT_STRUCTURE)
    _check_number(len(structure), where)
    if max(accumulate(map(_DEPTH_CHANGE.__getitem__, structure)), default=0) > MAX_DEPTH:
        raise CorruptCheckpointError(
            where, found="nested too deeply", expected=f"at most {MAX_DEPTH} levels"
        )


def _check_number(num_values: int, where: str) -> None:
    if num_values > _MAX_VALUES:
        raise CorruptCheckpointError(
            where, found="too many values", expected=f"at most {_MAX_VALUES}"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:80]!r} is there twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _text(key: str, value: Any) -> str:
    """JSON of one top-level field, with one line for each object of a list."""
    value = to_plain(value, where=key)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        lines = ",\n".join("    " + json.dumps(item) for item in value)
        return f"[\n{lines}\n  ]"
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def to_plain(value: Any, *, where: str) -> Any:
    """The value as JSON would return it; tuples become lists.

    Raises:
        UnsupportedValueError: JSON would change or refuse it; names the path to it.
    """
    return _plain(value, where, ())


def _plain(value: Any, where: str, path: tuple[object, ...]) -> Any:
    # The path becomes text only for an error: a manifest may list tens of thousands of files.
    if len(path) > MAX_DEPTH - 2:
        raise UnsupportedValueError(_named(where, path), found="nested too deeply")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < _INTEGER_END:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, where, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(item, where, (*path, key)) for key, item in value.items()}
    raise UnsupportedValueError(
        _named(where, path),
        found=f"{value!r:.80} of type {type(value).__name__}",
        expected="None, bool, int, finite float, str, or lists and dicts with string keys of these",
    )


def _named(where: str, path: tuple[object, ...]) -> str:
    return where + "".join(f"[{key!r}]" for key in path)
