"""Reading a trace: records, in the order in which each rank executed them.

A trace is a directory. Its files lie in it directly, or in one sub-directory for each launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resumekit.errors import TraceError

START, STEP, CHECKPOINT, RESUMED, END = "start", "step", "checkpoint", "resumed", "end"
DURABLE = "durable"

# Of the recorder alone: where a launch continues, and why nothing follows.
ORIGIN, FAILED = "origin", "failed"

STATE_KINDS = (CHECKPOINT, RESUMED, END)
_KINDS = (START, STEP, DURABLE, ORIGIN, FAILED, *STATE_KINDS)


@dataclass(frozen=True)
class Record:
    """One line of a trace.

    Args:
        kind: ``start``, ``step``, ``checkpoint``, ``durable``, ``resumed``, ``end``, or of the
            recorder ``origin`` and ``failed``.
        step: the optimizer step it is about; 0 for ``start``.
        time_ns: when it was written (Unix time).
        fields: everything else, as written.
    """

    kind: str
    step: int
    time_ns: int
    fields: Mapping[str, Any] = field(repr=False)

    @property
    def components(self) -> Mapping[str, Mapping[str, str]]:
        """Leaf digests by component; empty where the record has none."""
        components: Mapping[str, Mapping[str, str]] = self.fields.get("components", {})
        return components

    @property
    def micro_step(self) -> tuple[int, int]:
        """The step and the micro-step of a state; 0 for the latter where it was not recorded."""
        return self.step, self.fields.get("micro_step", 0)

    @property
    def rng(self) -> Mapping[str, str]:
        """State digests of the random number generators; empty where the record has none."""
        rng: Mapping[str, str] = self.fields.get("rng", {})
        return rng


@dataclass(frozen=True)
class Attempt:
    """What one process wrote: one rank, from its start to its end or its death.

    Args:
        rank: the rank of the process.
        launch: the launch it belongs to, from 0.
        records: in the order of execution.
    """

    rank: int
    launch: int
    records: tuple[Record, ...]


def records_of(attempts: Iterable[Attempt], *kinds: str) -> Iterator[Record]:
    """The records of these kinds in the order of the attempts; without any, all records."""
    return (r for attempt in attempts for r in attempt.records if not kinds or r.kind in kinds)


def steps_of(attempts: Iterable[Attempt], kind: str) -> list[int]:
    """The optimizer steps of the records of one kind."""
    return [record.step for record in records_of(attempts, kind)]


def durable_steps(attempts: Iterable[Attempt]) -> list[int]:
    """The steps whose checkpoints a resume must find."""
    return [
        record.step
        for record in records_of(attempts, CHECKPOINT, DURABLE)
        if record.fields.get("is_durable", True)
    ]


def read_trace(directory: Path) -> dict[int, tuple[Attempt, ...]]:
    """The attempts of every rank, oldest first.

    A last line without its newline is left out: its writer died while writing it.

    Args:
        directory: the trace of one run, whatever number of launches it took.

    Raises:
        TraceError: there is no trace, or a line in it is damaged.
    """
    ranks: dict[int, list[Attempt]] = {}
    for launch, path in _files(directory):
        records = [_parse(path, number, line) for number, line in _lines(path)]
        if not records:
            continue
        first = records[0]
        if first.kind != START or not isinstance(first.fields.get("rank"), int):
            raise TraceError(str(path), found=f"starts with {first.kind!r}", expected=repr(START))
        rank = int(first.fields["rank"])
        attempts = ranks.setdefault(rank, [])
        number = len(attempts) if launch is None else launch
        attempts.append(Attempt(rank, number, tuple(records[1:])))
    if not ranks:
        raise TraceError(
            str(directory),
            found="no trace",
            expected="files written by a Checkpointer or by resumekit.trace(...)",
        )
    return {rank: tuple(ranks[rank]) for rank in sorted(ranks)}


def launch_directory(directory: Path, launch: int) -> Path:
    """Where the processes of one launch write, so that ranks which died early stay aligned."""
    return directory / f"launch-{launch:05d}"


class TraceTail:
    """Follows a trace that is being written, for code that waits for a step.

    Args:
        *directories: the traces of one launch.
    """

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        self._offsets: dict[Path, int] = {}
        self.events: set[tuple[str, int]] = set()  # kind and step of all that was recorded
        self._newest_step: int | None = None

    def poll(self) -> int | None:
        """The highest step recorded so far by any process; None before the first."""
        for path in (path for each in self._directories for _, path in _files(each)):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            complete = data.rfind(b"\n") + 1
            self._offsets[path] = offset + complete
            for line in data[:complete].splitlines():
                record = _parse(path, 0, line)
                self.events.add((record.kind, record.step))
                if record.kind == STEP:
                    self._newest_step = max(record.step, self._newest_step or record.step)
        return self._newest_step


def _files(directory: Path) -> list[tuple[int | None, Path]]:
    """Every trace file with the launch its folder names, in the order in which they were begun."""
    paths = (*directory.glob("*.jsonl"), *directory.glob("launch-*/*.jsonl"))
    found = ((_launch(path.parent.name), path) for path in paths)
    return sorted(found, key=lambda item: (item[0] or 0, item[1].name))


def _launch(name: str) -> int | None:
    prefix, _, number = name.partition("-")
    return int(number) if prefix == "launch" and number.isdigit() else None


def _lines(path: Path) -> list[tuple[int, bytes]]:
    data = path.read_bytes()
    return list(enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1))


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        fields = json.loads(line)
        kind, time_ns = fields.pop("kind"), fields.pop("time_ns")
        step = fields.pop("step", 0)
    except (ValueError, KeyError, AttributeError) as error:
        raise TraceError(
            f"{path}, line {number}", found=f"not a record ({error})", expected="one JSON object"
        ) from error
    if kind not in _KINDS or not isinstance(step, int):
        raise TraceError(
            f"{path}, line {number}", found=f"kind {kind!r}, step {step!r}", expected="a record"
        )
    return Record(kind, step, time_ns, fields)
