"""The manifest of a step directory: its inventory, written last, so what has one is committed.

Its details also say which checkpoints of other runs the run began from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from resumekit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    UnreadableCheckpointError,
    UnsupportedValueError,
)
from resumekit.state import Fidelity, SharingPattern, Slot
from resumekit.storage.directories import (
    MANIFEST,
    MAX_JSON_BYTES,
    StepName,
    find_differences,
    is_taken,
    path_problem,
    paths_problem,
    read_small,
    seal,
    to_plain,
    unseal,
)
from resumekit.storage.file_reader import FileReader, read_blocks
from resumekit.storage.files import ALGORITHM, FileEntry
from resumekit.storage.io.file_system import FileSystem, read_errors

FORMAT = "resumekit checkpoint"
FORMAT_VERSION = 1

_MAX_COUNT = 2**63 - 1
MAX_RANKS = 1 << 24


@dataclass(frozen=True)
class ComponentRecord:
    """One component of the run's state, as declared when it was saved.

    Args:
        key: ``slot`` or ``slot/name``.
        pattern: the value of a ``SharingPattern``.
        fidelity: the value of a ``Fidelity``.
        reason: why it is not exact; empty when it is.
        directory: where its files are, relative to the step directory.
        writers: the ranks that wrote it, in order.
        groups: the ranks that share one state or part of it; empty where the pattern defines it.
    """

    key: str
    pattern: str
    fidelity: str
    reason: str
    directory: str
    writers: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def is_of_job(self) -> bool:
        """Whether the job has one state of it, whichever ranks wrote that."""
        return self.pattern in (
            SharingPattern.GLOBAL,
            SharingPattern.REPLICATED,
            SharingPattern.SHARDED,
        )


@dataclass(frozen=True)
class Manifest:
    """The content of a step directory and the run it belongs to.

    Args:
        run_id: of the run, kept over all its attempts; 32 hexadecimal digits.
        attempt: of the process start that wrote it; 32 hexadecimal digits.
        step: optimizer steps.
        revision: how often this step was saved before.
        created: ISO 8601 in UTC, for people only.
        parent: the step directory that the attempt resumed from or saved last, if any.
        world_size: how many ranks wrote it.
        progress: counts of the run, plain values.
        finished: why the run ended; None while it continues.
        metric: ``{"name", "mode", "value"}`` with the value as ``float.hex``, if one was reported.
        components: the inventory of state.
        files: the inventory of files; the manifest itself is not in it.
        capture: the capture report, plain values.
        fingerprint: what shapes the run, plain values.
        details: anything else, plain values.
        format_version: of the layout on disk.
    """

    run_id: str
    attempt: str
    step: int
    created: str
    world_size: int
    progress: Mapping[str, Any]
    components: tuple[ComponentRecord, ...]
    files: tuple[FileEntry, ...]
    revision: int = 0
    parent: str | None = None
    finished: str | None = None
    metric: Mapping[str, str] | None = None
    capture: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def name(self) -> StepName:
        """The name of the step directory that this manifest belongs to."""
        return StepName(self.step, self.revision)

    @property
    def created_seconds(self) -> float | None:
        """When it was created, as Unix time; None where ``created`` is no such time."""
        try:
            return datetime.fromisoformat(self.created).timestamp()
        except (ValueError, OverflowError):
            return None

    @property
    def models(self) -> tuple[ComponentRecord, ...]:
        """The models; the attributes of their modules are components of their own."""
        return tuple(
            record
            for record in self.components
            if record.key.partition("/")[0] == Slot.MODEL.value and record.directory == record.key
        )

    def to_bytes(self) -> bytes:
        """The manifest file; refuses what could not be read back.

        Raises:
            UnsupportedValueError: names the field.
        """
        rows = {
            "components": [vars(item) for item in self.components],
            "files": [vars(item) for item in self.files],
        }
        content = {**_CONSTANTS, **vars(self), **rows}
        data = seal({name: content[name] for name in _CHECKS})
        try:
            read_back = Manifest.from_bytes(data)
        except CorruptCheckpointError as error:
            raise UnsupportedValueError(
                MANIFEST, found=error.found, expected=error.expected
            ) from error
        if read_back != self._plain():
            raise UnsupportedValueError(MANIFEST, found="a value that JSON would change")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = MANIFEST) -> Manifest:
        """The manifest of a file, with every byte and field checked.

        Args:
            data: the whole file.
            where: what error messages call it.

        Raises:
            CorruptCheckpointError: names the field, what was found and what was expected.
            FormatVersionError: a newer version of resumekit wrote it.
        """
        content = unseal(data, where=where)
        _check_version(content, where)
        check_fields(content, _CHECKS, where=where)
        for name, kind, checks in _RECORDS:
            content[name] = _records(kind, content[name], checks, where=f"{where}: {name}")
        for name in _CONSTANTS:
            del content[name]
        manifest = cls(**content)
        _check_whole(manifest, where)
        return manifest

    def _plain(self) -> Manifest:
        free = ("progress", "metric", "capture", "fingerprint", "details")
        return replace(self, **{name: to_plain(getattr(self, name), where=name) for name in free})


_CONSTANTS = {"format": FORMAT, "digest_algorithm": ALGORITHM}

# A check returns what is expected instead, or None for a valid value.
Check = Callable[[Any], str | None]


def constant(expected: str) -> Check:
    """This very string."""
    return lambda value: None if value == expected else repr(expected)


def _matches(pattern: str, meaning: str) -> Check:
    compiled = re.compile(pattern)
    return lambda value: (
        None if isinstance(value, str) and compiled.fullmatch(value) is not None else meaning
    )


def count(maximum: int = _MAX_COUNT, minimum: int = 0) -> Check:
    """An integer from the minimum to the maximum."""
    meaning = f"an integer from {minimum} to {maximum}"
    # type() and not isinstance: JSON's true is no count.
    return lambda value: None if type(value) is int and minimum <= value <= maximum else meaning


def text(value: Any) -> str | None:
    """A string."""
    return None if isinstance(value, str) else "a string"


def optional(check: Check) -> Check:
    """None, or what this check wants."""
    return lambda value: None if value is None else check(value)


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, dict) else "an object"


def objects(value: Any) -> str | None:
    """A list of objects."""
    right = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return None if right else "a list of objects"


def _step_name(value: Any) -> str | None:
    right = isinstance(value, str) and StepName.parse(value) is not None
    return None if right else "the name of a step directory"


def _one_of(words: type[SharingPattern] | type[Fidelity]) -> Check:
    allowed = [word.value for word in words]
    return lambda value: None if value in allowed else f"one of {', '.join(allowed)}"


def _metric(value: Any) -> str | None:
    meaning = "name, mode ('min' or 'max') and value (as float.hex)"
    if not isinstance(value, dict) or set(value) != {"name", "mode", "value"}:
        return meaning
    if not all(isinstance(item, str) for item in value.values()):
        return meaning
    try:
        number = float.fromhex(value["value"])
    except (ValueError, OverflowError):
        return meaning
    right = value["mode"] in ("min", "max") and number.hex() == value["value"]
    return None if right else meaning


def _ranks(value: Any) -> str | None:
    check = count(MAX_RANKS - 1)
    if not isinstance(value, list) or any(check(item) for item in value):
        return "a list of ranks"
    return None if value == sorted(set(value)) else "ranks in order, each once"


def _groups(value: Any) -> str | None:
    if not isinstance(value, list) or any(not item or _ranks(item) for item in value):
        return "a list of lists of ranks"
    ranks = [rank for group in value for rank in group]
    is_ordered = [group[0] for group in value] == sorted(group[0] for group in value)
    return None if is_ordered and len(set(ranks)) == len(ranks) else "disjoint groups in order"


def _component_key(value: Any) -> str | None:
    right = isinstance(value, str) and value != "" and all(value.split("/"))
    return None if right else "'slot' or 'slot/name'"


def _path(value: Any) -> str | None:
    if not isinstance(value, str):
        return "a path"
    return "a path in the step directory" if path_problem(value) else None


HEX = _matches("[0-9a-f]{32}", "32 hexadecimal digits")
# In the order of the file: short fields first, long lists last, as people read it.
_CHECKS: Mapping[str, Check] = {
    **{name: constant(value) for name, value in _CONSTANTS.items()},
    "format_version": count(FORMAT_VERSION, 1),
    "run_id": HEX,
    "attempt": HEX,
    "step": count(),
    "revision": count(999_999),
    "created": _matches(
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|\+00:00)",
        "a time in UTC such as 2026-01-31T12:00:00+00:00",
    ),
    "parent": optional(_step_name),
    "world_size": count(MAX_RANKS, 1),
    "progress": _mapping,
    "finished": optional(text),
    "metric": optional(_metric),
    "capture": _mapping,
    "fingerprint": _mapping,
    "details": _mapping,
    "components": objects,
    "files": objects,
}
_COMPONENT_CHECKS: Mapping[str, Check] = {
    "key": _component_key,
    "pattern": _one_of(SharingPattern),
    "fidelity": _one_of(Fidelity),
    "reason": text,
    "directory": _path,
    "writers": _ranks,
    "groups": _groups,
}
_FILE_CHECKS: Mapping[str, Check] = {
    "path": _path,
    "size": count(),
    "digest": HEX,
    "writer": count(MAX_RANKS - 1),
}
_RECORDS = (
    ("components", ComponentRecord, _COMPONENT_CHECKS),
    ("files", FileEntry, _FILE_CHECKS),
)


def _check_version(content: Mapping[str, Any], where: str) -> None:
    version = content.get("format_version")
    if content.get("format") == FORMAT and type(version) is int and version > FORMAT_VERSION:
        raise FormatVersionError(
            where,
            found=f"format version {version}",
            expected=f"at most {FORMAT_VERSION}",
            remedy="Install a newer resumekit",
        )


def check_fields(content: Mapping[str, Any], checks: Mapping[str, Check], *, where: str) -> None:
    """Checks that an object has exactly these fields, each with a valid value.

    Raises:
        CorruptCheckpointError: names the field, what was found and what was expected.
    """
    if set(content) != set(checks):
        missing, unknown = sorted(set(checks) - set(content)), sorted(set(content) - set(checks))
        raise CorruptCheckpointError(
            where, found=f"fields missing: {missing}, unknown: {unknown[:8]!r:.200}"
        )
    for name, check in checks.items():
        expected = check(content[name])
        if expected is not None:
            raise CorruptCheckpointError(
                f"{where}: {name}", found=f"{content[name]!r:.80}", expected=expected
            )


def file_entries(rows: list[Any], *, where: str) -> tuple[FileEntry, ...]:
    """The inventory of files of a parsed JSON file, with every field checked.

    Raises:
        CorruptCheckpointError: names the field, what was found and what was expected.
    """
    entries: tuple[FileEntry, ...] = _records(FileEntry, rows, _FILE_CHECKS, where=where)
    return entries


def _records(
    kind: Callable[..., Any], rows: list[Any], checks: Mapping[str, Check], *, where: str
) -> tuple[Any, ...]:
    return tuple(_record(kind, row, checks, f"{where}[{index}]") for index, row in enumerate(rows))


def _record(kind: Callable[..., Any], row: Any, checks: Mapping[str, Check], where: str) -> Any:
    check_fields(row, checks, where=where)
    return kind(**{name: _as_tuples(value) for name, value in row.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _check_whole(manifest: Manifest, where: str) -> None:
    """Checks that need several fields."""
    problem = paths_problem(entry.path for entry in manifest.files)
    if problem is not None:
        raise CorruptCheckpointError(f"{where}: files", found=problem)
    keys = [component.key for component in manifest.components]
    if len(set(keys)) != len(keys):
        raise CorruptCheckpointError(f"{where}: components", found="one key is there twice")
    writers = [entry.writer for entry in manifest.files]
    for component in manifest.components:
        writers += [*component.writers, *(rank for group in component.groups for rank in group)]
    if max(writers, default=0) >= manifest.world_size:
        raise CorruptCheckpointError(
            where,
            found=f"rank {max(writers)}",
            expected=f"ranks below the world size {manifest.world_size}",
        )


# ---------------------------------------------------------------- the runs that a run began from

LINEAGE = "lineage"
_ONLY_WEIGHTS = "only_weights"
PRUNED = "pruned"
# Details that say nothing of another run.
_OF_THE_ATTEMPT = ("journal", "resume_from", "trackers")


@dataclass(frozen=True)
class ForkOrigin:
    """The checkpoint that a run was forked from.

    Args:
        run_id: of the run it belongs to.
        checkpoint: the name of its step directory.
        manifest_digest: the xxh3-128 of its manifest.
        forked: when; ISO 8601 in UTC.
        only_weights: whether only the model's weights were taken.
    """

    run_id: str
    checkpoint: str
    manifest_digest: str
    forked: str
    only_weights: bool

    def __str__(self) -> str:
        weights = "the weights of " if self.only_weights else ""
        return f"{weights}{self.checkpoint} of run {self.run_id[:8]}"


def lineage_of(manifest: Manifest) -> tuple[ForkOrigin, ...]:
    """The checkpoints that the run was forked from, the latest fork last; mostly none."""
    rows = manifest.details.get(LINEAGE)
    rows = rows if isinstance(rows, list | tuple) else ()
    return tuple(ForkOrigin(**row) for row in rows if _is_origin(row))


def _is_origin(row: Any) -> bool:
    """Whether a row has all fields, each of its type; a manifest's details may hold anything."""
    if not isinstance(row, Mapping) or set(row) != set(ForkOrigin.__dataclass_fields__):
        return False
    return all(isinstance(row[name], bool if name == "only_weights" else str) for name in row)


def holds_only_weights(manifest: Manifest) -> bool:
    """Whether a run starts afresh from this checkpoint, with its weights."""
    return manifest.details.get(_ONLY_WEIGHTS) is True


def is_pruned(manifest: Manifest) -> bool:
    """Whether only the models are left of this checkpoint, so that no run continues from it."""
    return manifest.details.get(PRUNED) is True


def forked_details(manifest: Manifest, origin: ForkOrigin) -> dict[str, Any]:
    """The details of a manifest for a run that begins from the checkpoint of this one."""
    lineage = [asdict(each) for each in (*lineage_of(manifest), origin)]
    if origin.only_weights:
        return {_ONLY_WEIGHTS: True, LINEAGE: lineage}
    kept = {key: v for key, v in manifest.details.items() if key not in _OF_THE_ATTEMPT}
    return {**kept, LINEAGE: lineage}


# ---------------------------------------------------------------- committed step directories


def read_manifest(file_system: FileSystem, directory: Path, name: StepName) -> Manifest:
    """The verified manifest of a step directory.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CorruptCheckpointError: it is damaged, or belongs to another step.
        FormatVersionError: a newer version of resumekit wrote it.
        UnreadableCheckpointError: it could not be read.
    """
    root, where = directory / str(name), f"{name}/{MANIFEST}"
    _check_is_directory(file_system, directory, name)
    with read_errors(where):
        if MANIFEST not in {entry.name for entry in file_system.list(root) if entry.kind == "file"}:
            raise CorruptCheckpointError(where, found="is missing or not a regular file")
        data = read_small(file_system, root / MANIFEST, where=where, max_bytes=MAX_JSON_BYTES)
    manifest = Manifest.from_bytes(data, where=where)
    if manifest.name != name:
        raise CorruptCheckpointError(
            where, found=f"is the manifest of {manifest.name}", expected=str(name)
        )
    return manifest


def _check_is_directory(file_system: FileSystem, directory: Path, name: StepName) -> None:
    # A link instead of the directory must not be followed.
    path = directory / str(name)
    with read_errors(str(name)):
        try:
            entry = file_system.entry(path)
        except FileNotFoundError:
            raise CheckpointNotFoundError(str(path), found="there is no such checkpoint") from None
    if entry.kind != "directory":
        raise CorruptCheckpointError(str(name), found="is not a directory", expected="a directory")


@contextmanager
def _unless_deleted(file_system: FileSystem, path: Path) -> Iterator[None]:
    """Errors of the body prove nothing where the step directory has been deleted meanwhile.

    Raises:
        CheckpointNotFoundError: it is gone.
    """
    try:
        yield
    except (CorruptCheckpointError, UnreadableCheckpointError) as error:
        with read_errors(path.name):
            is_there = is_taken(file_system, path)
        if is_there:
            raise
        raise CheckpointNotFoundError(str(path), found="deleted while it was read") from error


class StepReader:
    """A committed step directory: a verified manifest, and the files that it lists.

    Args:
        file_system: the file system.
        directory: the run directory.
        name: of the step directory.

    Attributes:
        unlisted: the paths of files and directories that the manifest does not list.

    Raises:
        CheckpointError: see ``Store.open_step``.
    """

    def __init__(self, file_system: FileSystem, directory: Path, name: StepName) -> None:
        self._file_system = file_system
        self.name = name
        self.path = directory / str(name)
        with _unless_deleted(file_system, self.path):
            self.manifest = read_manifest(file_system, directory, name)
            self._entries = {entry.path: entry for entry in self.manifest.files}
            self.unlisted = (*self._check_tree(),)

    def file(self, path: str) -> FileReader:
        """A file of the checkpoint, for verified reading.

        Args:
            path: as the manifest lists it.

        Raises:
            CheckpointNotFoundError: the checkpoint has been deleted.
            CorruptCheckpointError: the manifest does not list it, or it has another size.
            UnreadableCheckpointError: it could not be opened.
        """
        where = f"{self.name}/{path}"
        entry = self._entries.get(path)
        if entry is None:
            raise CorruptCheckpointError(where, found="is not listed in the manifest")
        with _unless_deleted(self._file_system, self.path):
            return FileReader(self._file_system, self.path / path, where=where, entry=entry)

    def blocks(self, entry: FileEntry) -> Iterator[memoryview]:
        """The bytes of a file in blocks, to copy it; see ``read_blocks``."""
        return read_blocks(self._file_system, self.path / entry.path, entry.size)

    def verify(self) -> None:
        """Reads every byte of every file and compares the digests.

        Raises:
            CheckpointNotFoundError: the checkpoint has been deleted.
            CorruptCheckpointError: names the first damaged file and both digests.
            UnreadableCheckpointError: a file could not be read.
        """
        for entry in self.manifest.files:
            with self.file(entry.path) as reader:
                reader.verify()

    def _check_tree(self) -> Iterator[str]:
        """Compares the files with the manifest; gives the paths that it does not list."""
        sizes = {entry.path: entry.size for entry in self.manifest.files}
        with read_errors(str(self.name)):
            for each in find_differences(self._file_system, self.path, sizes, except_file=MANIFEST):
                if each.is_listed:
                    raise CorruptCheckpointError(f"{self.name}/{each.path}", found=each.problem)
                yield each.path
