"""Journal files: one for each attempt and rank, appended to by one ``write`` a step.

A file begins with its header; records of a fixed size follow. What was written survives the death
of the process, because it is in the page cache. Nothing is fsynced: a journal is evidence about
processes that died, and no resume depends on it. So it does not go through
``storage/io/file_system.py`` either, whose calls are explored for what a power cut may leave of a
checkpoint.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resumekit.record.conditions import Header

RECORD_BYTES = 96

# Kinds of records.
STEP = 1  # an optimizer step
SAVE = 2  # the random state at a safe point that saves; ``num_samples`` is the micro-step
LOSS = 3  # the loss of an earlier step, which its device had not computed in time
WEIGHTS = 7  # after a step: ``ids`` is a digest of ``num_samples`` elements, see WeightSamples
# Kinds of events.
BEGIN = 4  # the attempt records its first step
SAVED = 5  # training continues after a save
END = 6  # the process has closed the run; a killed one has no such event
EVENTS = (BEGIN, SAVED, END)


class Ending(IntEnum):
    """Why a process has closed the run, where that was no signal; those have their numbers."""

    UNKNOWN = 0  # of an older version
    FINISHED = 100
    LEFT = 101  # the loop was left before the end of the run
    ERROR = 102  # an exception


class Has(IntEnum):
    """The fields of a record that hold a value; bits, combined as plain integers."""

    IDS = 1  # ids, ids_sum and num_samples
    COUNT = 2  # num_samples
    RNG = 4  # rng_torch and rng_host
    DEVICE_RNG = 8
    LR = 16  # lr and lr_digest
    LOSS = 32


class Record(NamedTuple):
    """What is compared of a step.

    Args:
        step: the optimizer step, counted from 1 over all attempts.
        samples: of the run so far, over the data-parallel ranks; between saves an estimate.
        ids: digest of the sample ids of this step on this rank, in their order.
        ids_sum: sum of a hash of each id modulo 2**64; it does not depend on the order, so the
            sums of the data-parallel ranks can be added.
        rng_torch: digest of torch's CPU random state.
        rng_host: digest of the states of Python's and NumPy's global generators and of the
            generators that the user named.
        rng_devices: digest of the random states of the accelerator's devices, the current first.
        lr_digest: digest of the learning rates of all param groups.
        lr: the learning rate of the first param group.
        loss: the loss that was given to ``step()``.
        epoch: counted from 0.
        num_samples: the samples of this step on this rank.
        has: which fields hold a value.
        kind: ``STEP``, ``SAVE``, ``LOSS`` or ``WEIGHTS``.
    """

    step: int
    samples: int = 0
    ids: int = 0
    ids_sum: int = 0
    rng_torch: int = 0
    rng_host: int = 0
    rng_devices: int = 0
    lr_digest: int = 0
    lr: float = 0.0
    loss: float = 0.0
    epoch: int = 0
    num_samples: int = 0
    has: int = 0
    kind: int = STEP

    def to_bytes(self) -> bytes:
        """The record as it is in the file."""
        body = _BODY.pack(*self)
        return body + _CHECKSUM.pack(zlib.crc32(body))


class Event(NamedTuple):
    """When an attempt began, saved or ended; for reports only, never compared.

    Args:
        kind: ``BEGIN``, ``SAVED`` or ``END``.
        step: the optimizer step.
        time_ns: the Unix time; of a save, when training continued.
        blocked_seconds: how long training stood still for the save.
        background_seconds: how long the last background save before was written while training ran.
        ending: of the end, an ``Ending`` or the number of a signal.
    """

    kind: int
    step: int
    time_ns: int
    blocked_seconds: float = 0.0
    background_seconds: float = 0.0
    ending: int = Ending.UNKNOWN

    @classmethod
    def now(
        cls, kind: int, step: int, blocked: float = 0.0, background: float = 0.0, ending: int = 0
    ) -> Event:
        """The event at the present time; of a save with both durations in seconds."""
        return cls(kind, step, time.time_ns(), blocked, background, ending)

    @property
    def time(self) -> float:
        """The Unix time in seconds."""
        return self.time_ns / 1e9

    def to_bytes(self) -> bytes:
        """The event in the bytes of a record."""
        kind, step, time_ns, *seconds, ending = self
        body = _BODY.pack(step, time_ns, ending, 0, 0, 0, 0, 0, *seconds, 0, 0, 0, kind)
        return body + _CHECKSUM.pack(zlib.crc32(body))


_BODY = struct.Struct("<8Q2d2I2H")
_CHECKSUM = struct.Struct("<I")
_BODY_BYTES = _BODY.size
assert _BODY_BYTES + _CHECKSUM.size == RECORD_BYTES

_DTYPE = np.dtype(
    [(name, "<f8" if name in ("lr", "loss") else "<u8") for name in Record._fields[:10]]
    + [("epoch", "<u4"), ("num_samples", "<u4"), ("has", "<u2"), ("kind", "<u2"), ("crc", "<u4")]
)
assert _DTYPE.itemsize == RECORD_BYTES


def as_array(data: bytes) -> NDArray[Any]:
    """The records in a part of a file as a structured array; a torn last record is left out."""
    whole = len(data) // RECORD_BYTES
    return np.frombuffer(data, dtype=_DTYPE, count=whole)


def valid_bodies(rows: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """The fields of the records whose checksum is right, in their order."""
    for row in rows:
        data = row.tobytes()
        body, checksum = data[:_BODY_BYTES], data[_BODY_BYTES:]
        if _CHECKSUM.unpack(checksum)[0] == zlib.crc32(body):
            yield _BODY.unpack(body)


# ---------------------------------------------------------------- files

DIRECTORY = "journal"

# Half of what one rank may take: the other half is for the files of earlier attempts.
MAX_FILE_BYTES = 32 << 20
MAX_EARLIER_BYTES = 32 << 20
# Of a file that is thinned, the newest records stay as they are; of the others each 100th step.
NUM_KEPT = 100_000
THINNED_TO = 100

_MAGIC = b"rkjrnl01"
_START = struct.Struct("<8sII")  # magic, bytes of the header, their checksum
_MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"attempt-(\d{6,})-([0-9a-f]{8})-rank-(\d{5,})\.journal")


class JournalFile:
    """The file that one rank of one attempt appends to.

    Args:
        path: must not exist yet.
        header: of the attempt.
        max_bytes: above this size older records are thinned.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, header: Header, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        path.parent.mkdir(exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
        self._handle = os.open(path, flags, 0o644)
        self._num_bytes = 0
        try:
            self.append(_with_start(header))
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def append(self, data: bytes) -> None:
        """Hands the data to the kernel. A forked child writes nothing.

        Raises:
            OSError: not all of it could be written; what was written is a torn last record.
        """
        if os.getpid() != self._pid:
            return
        written = os.write(self._handle, data)
        if written != len(data):
            written += os.write(self._handle, data[written:])  # raises with the cause
        self._num_bytes += written
        if self._num_bytes > self._max_bytes:
            self._thin()

    def _thin(self) -> None:
        half = self._max_bytes // (2 * RECORD_BYTES)
        thin(self.path, num_kept=min(NUM_KEPT, half // 2), max_records=half)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self.close()
        self._handle = handle
        self._num_bytes = os.fstat(self._handle).st_size

    def close(self) -> None:
        """Closes the file; without effect in a forked child and the second time."""
        handle, self._handle = self._handle, -1
        if handle >= 0 and os.getpid() == self._pid:
            with suppress(OSError):  # of a network file system that is full: the end is torn
                os.close(handle)


@dataclass(frozen=True)
class Attempt:
    """A journal file that was found.

    Args:
        path: the file.
        header: what it begins with.
    """

    path: Path
    header: Header

    def records(self, *, after: int = 0) -> list[Record]:
        """The valid records of steps after this one, in the order in which they were written.

        Raises:
            OSError: the file cannot be read.
        """
        _, rows = _divided(self.path)
        is_record = (rows["step"] > after) & ~np.isin(rows["kind"], EVENTS)
        return [Record(*fields) for fields in valid_bodies(rows[is_record])]

    def events(self) -> list[Event]:
        """The valid events, in the order in which they were written.

        Raises:
            OSError: the file cannot be read.
        """
        _, rows = _divided(self.path)
        bodies = valid_bodies(rows[np.isin(rows["kind"], EVENTS)])
        return [Event(each[-1], each[0], each[1], each[8], each[9], each[2]) for each in bodies]


def latest_steps(records: Iterable[Record]) -> dict[int, Record]:
    """The latest record of each step, ascending, with its loss where that came in a later one."""
    found: dict[int, Record] = {}
    for record in records:
        if record.kind == STEP:
            found[record.step] = record
        elif record.kind == LOSS and record.step in found:
            step = found[record.step]
            found[record.step] = step._replace(loss=record.loss, has=step.has | Has.LOSS)
    return dict(sorted(found.items()))


def name_of(number: int, attempt: str, rank: int) -> str:
    """The name of a journal file."""
    return f"attempt-{number:06d}-{attempt[:8]}-rank-{rank:05d}.journal"


def number_of_attempt(directory: Path, attempt: str) -> int:
    """The number of an attempt: the one that another rank of it uses, else the next free one.

    Raises:
        OSError: the directory cannot be listed.
    """
    names = _names_in(directory)
    own_numbers = [int(match[1]) for match in names if match[2] == attempt[:8]]
    return own_numbers[0] if own_numbers else max((int(match[1]) for match in names), default=0) + 1


def find_attempts(directory: Path, *, rank: int | None = None) -> list[Attempt]:
    """The journal files in a directory, oldest attempt first; damaged ones are left out.

    Args:
        directory: the folder ``journal/`` of a run; it may be missing.
        rank: of this rank only.

    Raises:
        OSError: the directory cannot be listed.
    """
    found = []
    for match in sorted(_names_in(directory), key=lambda each: (int(each[1]), int(each[3]))):
        if rank is None or int(match[3]) == rank:
            path = directory / match[0]
            header = _read_header(path)
            if header is not None:
                found.append(Attempt(path, header))
    return found


def thin(path: Path, *, num_kept: int = NUM_KEPT, max_records: int | None = None) -> None:
    """Drops old records of a file: keeps the newest ones, and of the others each 100th step.

    The file is replaced by a rename, so that a kill leaves the old one or the new one.

    Args:
        path: the file.
        num_kept: the newest records that stay as they are.
        max_records: drop the oldest that are above this number.

    Raises:
        OSError: as the failing call said; the file is as it was.
    """
    start, rows = _divided(path)
    is_kept = (rows["step"] % THINNED_TO == 0) & (rows["kind"] != SAVE)
    is_kept |= np.arange(len(rows)) >= len(rows) - num_kept
    kept = rows[is_kept]
    if max_records is not None:
        kept = kept[-max_records:]
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(start + kept.tobytes())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def limit_earlier(directory: Path, rank: int, *, max_bytes: int = MAX_EARLIER_BYTES) -> None:
    """Thins the files of a rank's earlier attempts, then removes the oldest, to fit a size.

    Raises:
        OSError: as the failing call said.
    """
    paths = [attempt.path for attempt in find_attempts(directory, rank=rank)]
    sizes = {path: path.stat().st_size for path in paths}
    for path in paths:
        if sum(sizes.values()) <= max_bytes:
            return
        thin(path, num_kept=0)
        sizes[path] = path.stat().st_size
    for path in paths:
        if sum(sizes.values()) <= max_bytes:
            return
        path.unlink()
        del sizes[path]


def _names_in(directory: Path) -> list[re.Match[str]]:
    try:
        return list(filter(None, map(_NAME.fullmatch, os.listdir(directory))))
    except FileNotFoundError:
        return []


def _divided(path: Path) -> tuple[bytes, NDArray[Any]]:
    """The start of a file with its header, and its records."""
    data = path.read_bytes()
    _, num_bytes, _ = _START.unpack_from(data)
    start = _padded(_START.size + num_bytes)
    return data[:start], as_array(data[start:])


def _with_start(header: Header) -> bytes:
    content = header.to_bytes()
    start = _START.pack(_MAGIC, len(content), zlib.crc32(content)) + content
    return start.ljust(_padded(len(start)), b"\0")


def _read_header(path: Path) -> Header | None:
    if not path.is_file():  # to open a pipe would wait for a writer
        return None
    with open(path, "rb") as file:
        start = file.read(_START.size)
        if len(start) < _START.size:
            return None
        magic, num_bytes, checksum = _START.unpack(start)
        if magic != _MAGIC or num_bytes > _MAX_HEADER_BYTES:
            return None
        content = file.read(num_bytes)
    return Header.from_bytes(content) if zlib.crc32(content) == checksum else None


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // RECORD_BYTES) * RECORD_BYTES
