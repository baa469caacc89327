"""Every disk that a power cut may leave behind.

The model is stricter than any file system in use, and is what POSIX promises:

* data that was not fsynced may be there, be torn, or be zeros of the full length;
* a name that was made, moved or removed counts only once its directory was fsynced afterwards,
  and until then may be there or not, in any order;
* what another rank does between the same two barriers is not ordered before an fsync.

A rename changes two names, and file systems differ in what holds them together: see ``Renames``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import xxhash

from crashlab.disk import ROOT, DirectoryNode, Disk, FileNode
from crashlab.operations import (
    Append,
    FailedSync,
    Link,
    Move,
    NameChange,
    Operation,
    Sync,
    SyncDirectory,
    Unlink,
    canonical,
)
from crashlab.recording import Recording

PAGE_BYTES = 4096


class Renames(Enum):
    """What a power cut may do to a rename."""

    ATOMIC = "both names change or neither, for good once either directory is fsynced"
    BY_TARGET = "both names change or neither, for good once the target directory is fsynced"
    SPLIT = "the new name and the old one are two changes, each with its own directory"


@dataclass(frozen=True)
class CrashState:
    """One disk that may be found after a crash.

    Args:
        disk: what is on it.
        key: the same for two states that differ in nonces and times only.
        done: the indices of the recorded calls that had been made.
        lost: what of them is not on the disk, for people.
    """

    disk: Disk
    key: str
    done: frozenset[int]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class _Bytes:
    """Consecutive bytes, and the same number of bytes without nonces and times; never copied."""

    data: tuple[memoryview, ...]
    canonical: tuple[memoryview, ...]

    @classmethod
    def of(cls, data: bytes, canonical: bytes) -> _Bytes:
        return cls((memoryview(data),), (memoryview(canonical),))

    def __getitem__(self, part: slice) -> _Bytes:
        (data,), (canonical,) = self.data, self.canonical
        return _Bytes((data[part],), (canonical[part],))

    def __add__(self, other: _Bytes) -> _Bytes:
        return _Bytes(self.data + other.data, self.canonical + other.canonical)


@dataclass(frozen=True)
class _Content:
    """One thing that a file may hold after a crash."""

    label: str
    data: tuple[memoryview, ...]
    canonical: bytes  # their digest


def cuts(operations: Sequence[Operation]) -> Iterator[frozenset[int]]:
    """The sets of operations that may have been called when the machine stops.

    Each rank has done a prefix of its own; nobody is past a barrier that another has not reached.
    """
    yield frozenset()
    before: list[int] = []
    indexed = list(enumerate(operations))
    for _, group in itertools.groupby(indexed, key=lambda item: item[1].phase):
        by_rank: dict[int, list[int]] = {}
        for index, operation in group:
            by_rank.setdefault(operation.rank, []).append(index)
        lengths = [range(len(indices) + 1) for indices in by_rank.values()]
        for prefix in itertools.product(*lengths):
            if any(prefix):
                parts = zip(prefix, by_rank.values(), strict=True)
                now = [index for length, indices in parts for index in indices[:length]]
                yield frozenset(before + now)
        before += [index for indices in by_rank.values() for index in indices]


class CrashModel:
    """The crash states of one recording.

    Args:
        recording: what was done.
        limit: at most this many states of one cut; beyond it, the deviations by one change from
            "everything kept" and "everything lost", and a fixed random sample of the rest.
        renames: what a rename is.
    """

    def __init__(
        self, recording: Recording, *, limit: int = 128, renames: Renames = Renames.ATOMIC
    ) -> None:
        self._before = recording.before
        self._calls = recording.operations
        self._operations: list[Operation] = []
        self._parts_of: list[range] = []
        for call in self._calls:
            parts = _parts(call, renames)
            self._parts_of.append(range(len(self._operations), len(self._operations) + len(parts)))
            self._operations += parts
        self._limit = limit
        self._renames = renames
        self._canonical_names: dict[str, str] = {}
        self._variants: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Content]] = {}
        self._canonical_data = {
            index: canonical(operation.data)
            for index, operation in enumerate(self._operations)
            if isinstance(operation, Append)
        }
        self._failed_syncs: dict[int, list[int]] = {}
        for index, operation in enumerate(self._operations):
            if isinstance(operation, FailedSync):
                self._failed_syncs.setdefault(operation.inode, []).append(index)
        self._made_durable_by = [
            [j for j in range(len(self._operations)) if self._makes_durable(j, i)]
            for i in range(len(self._operations))
        ]
        self._base_directories = {
            number: node.entries
            for number, node in self._before.nodes.items()
            if isinstance(node, DirectoryNode)
        }
        self._base_contents = {
            number: _content("whole", _Bytes.of(node.data, canonical(node.data)))
            for number, node in self._before.nodes.items()
            if isinstance(node, FileNode)
        }

    def states(self) -> Iterator[CrashState]:
        """Every state; many of them are the same disk."""
        for done in cuts(self._calls):
            yield from self._states_of(done)

    def _states_of(self, calls: frozenset[int]) -> Iterator[CrashState]:
        order = [index for call in sorted(calls) for index in self._parts_of[call]]
        done = frozenset(order)
        pending = [i for i in order if self._is_name_change(i) and not self._is_durable(i, done)]
        contents = self._contents(order, done)
        open_files = [number for number, choices in contents.items() if len(choices) > 1]
        sizes = [2] * len(pending) + [len(contents[number]) for number in open_files]
        for choice in choices_of(sizes, limit=self._limit, seed=len(calls)):
            kept = {i for i, keep in zip(pending, choice, strict=False) if keep}
            chosen = {number: options[-1] for number, options in contents.items()}
            for number, option in zip(open_files, choice[len(pending) :], strict=True):
                chosen[number] = contents[number][option]
            directories = self._directories(order, set(pending) - kept)
            lost = [self._operations[i].call for i in pending if i not in kept]
            lost += [f"inode {n}: {chosen[n].label}" for n in open_files]
            yield CrashState(
                disk=_disk(directories, chosen),
                key=self._key(directories, chosen),
                done=calls,
                lost=tuple(lost),
            )

    def _is_name_change(self, index: int) -> bool:
        return isinstance(self._operations[index], NameChange)

    def _is_durable(self, index: int, done: frozenset[int]) -> bool:
        return any(sync in done for sync in self._made_durable_by[index])

    def _makes_durable(self, later: int, index: int) -> bool:
        sync, operation = self._operations[later], self._operations[index]
        if not _covers(sync, operation, self._renames):
            return False
        synced = sync.file if isinstance(sync, Sync) else cast(SyncDirectory, sync).directory
        if any(index < failed < later for failed in self._failed_syncs.get(synced, ())):
            return False
        return index < later if sync.rank == operation.rank else operation.phase < sync.phase

    def _contents(self, order: Sequence[int], done: frozenset[int]) -> dict[int, list[_Content]]:
        contents = {number: [content] for number, content in self._base_contents.items()}
        appends: dict[int, list[int]] = {}
        for index in order:
            operation = self._operations[index]
            if isinstance(operation, Append):
                appends.setdefault(operation.file, []).append(index)
            elif isinstance(operation, Link) and operation.is_new and not operation.is_directory:
                contents[operation.child] = [_content("empty", _Bytes.of(b"", b""))]
        former, self._variants = self._variants, {}
        for number, indices in appends.items():
            durable = tuple(index for index in indices if self._is_durable(index, done))
            key = (durable, tuple(indices[len(durable) :]))
            # Of most files they are those of the cut before; older ones may be large.
            variants = former.get(key) or _variants(*map(self._joined, key))
            contents[number] = self._variants[key] = variants
        return contents

    def _joined(self, appends: Sequence[int]) -> _Bytes:
        data = b"".join(_data(self._operations[index]) for index in appends)
        return _Bytes.of(data, b"".join(self._canonical_data[index] for index in appends))

    def _directories(self, order: Sequence[int], lost: set[int]) -> dict[int, dict[str, int]]:
        directories = {number: dict(names) for number, names in self._base_directories.items()}
        for index in order:
            operation = self._operations[index]
            if isinstance(operation, Link) and operation.is_new and operation.is_directory:
                directories[operation.child] = {}
            if index not in lost and isinstance(operation, NameChange):
                _apply(operation, directories)
        return directories

    def _key(self, directories: dict[int, dict[str, int]], contents: dict[int, _Content]) -> str:
        def described(number: int) -> object:
            if number in contents:
                return contents[number].canonical
            names = directories[number].items()
            return sorted(
                ((self._canonical(name), described(child)) for name, child in names), key=repr
            )

        return hashlib.blake2b(repr(described(ROOT)).encode(), digest_size=16).hexdigest()

    def _canonical(self, name: str) -> str:
        if name not in self._canonical_names:
            self._canonical_names[name] = canonical(name.encode()).decode()
        return self._canonical_names[name]


def choices_of(sizes: Sequence[int], *, limit: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Picks one option per position: all of them, or within the limit the most informative.

    Option 0 is "lost", the last option is "kept". Another seed gives another sample.
    """
    if math.prod(sizes) <= limit:
        yield from itertools.product(*(range(size) for size in sizes))
        return
    seen: set[tuple[int, ...]] = set()
    for choice in _informative_choices(sizes, random.Random(seed)):
        if choice not in seen:
            seen.add(choice)
            yield choice
            if len(seen) >= limit:
                return


def _informative_choices(sizes: Sequence[int], chance: random.Random) -> Iterator[tuple[int, ...]]:
    lost = tuple(0 for _ in sizes)
    kept = tuple(size - 1 for size in sizes)
    yield lost
    yield kept
    deviations = [
        (*start[:position], option, *start[position + 1 :])
        for start in (kept, lost)
        for position, size in enumerate(sizes)
        for option in range(size)
    ]
    yield from chance.sample(deviations, len(deviations))
    while True:
        yield tuple(chance.randrange(size) for size in sizes)


def _parts(operation: Operation, renames: Renames) -> list[Operation]:
    if renames is not Renames.SPLIT or not isinstance(operation, Move):
        return [operation]
    by = (operation.rank, operation.phase, operation.call)
    made = Link(*by, operation.target, operation.target_name, operation.child, is_new=False)
    return [made, Unlink(*by, operation.source, operation.source_name, operation.child)]


def _covers(sync: Operation, operation: Operation, renames: Renames) -> bool:
    if isinstance(sync, Sync):
        return isinstance(operation, Append) and operation.file == sync.file
    if isinstance(sync, SyncDirectory):
        if isinstance(operation, Move):
            directories = {operation.target}
            if renames is Renames.ATOMIC:
                directories.add(operation.source)
            return sync.directory in directories
        return isinstance(operation, Link | Unlink) and operation.parent == sync.directory
    return False


def _apply(operation: NameChange, directories: dict[int, dict[str, int]]) -> None:
    if isinstance(operation, Link):
        directories[operation.parent][operation.name] = operation.child
    elif isinstance(operation, Unlink):
        _forget(directories[operation.parent], operation.name, operation.child)
    else:
        _forget(directories[operation.source], operation.source_name, operation.child)
        directories[operation.target][operation.target_name] = operation.child


def _forget(names: dict[str, int], name: str, child: int) -> None:
    # The name may stand for another inode by now, when an earlier change was lost.
    if names.get(name) == child:
        del names[name]


def _variants(durable: _Bytes, pending: _Bytes) -> list[_Content]:
    """What a file may hold whose last bytes were not fsynced: none of them first, all last."""
    size = sum(map(len, pending.data))
    half = size // 2
    parts = {
        "lost": pending[:0],
        "torn at 1 byte": pending[:1],
        "torn at half": pending[:half],
        "torn at 4 KiB": pending[:PAGE_BYTES],
        "zeros": pending[:0] + _zeros(size),
        "half, then zeros": pending[:half] + _zeros(size - half),
        "zeros, then half": _zeros(half) + pending[half:],
        "whole": pending,
    }
    contents: dict[bytes, _Content] = {}
    for label, part in parts.items():
        content = _content(label, durable + part)
        contents.pop(content.canonical, None)  # of two equals, the later one
        contents[content.canonical] = content
    return list(contents.values())


def _zeros(size: int) -> _Bytes:
    return _Bytes.of(bytes(size), bytes(size))


def _data(operation: Operation) -> bytes:
    assert isinstance(operation, Append)
    return operation.data


def _content(label: str, content: _Bytes) -> _Content:
    # Only equality of the canonical bytes matters; a digest keeps the keys short.
    digest = xxhash.xxh3_128()
    for part in content.canonical:
        digest.update(part)
    return _Content(label, content.data, digest.digest())


def _disk(directories: dict[int, dict[str, int]], contents: dict[int, _Content]) -> Disk:
    disk = Disk({})
    for number in sorted({*directories, *contents}):
        if number in contents:
            disk.nodes[number] = FileNode(b"".join(contents[number].data))
        else:
            disk.nodes[number] = DirectoryNode(directories[number])
    return disk
