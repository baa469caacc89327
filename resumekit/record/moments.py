"""What a run did, as plain values that two runs can be compared by: from its trace or its journal.

A trace is a directory. Its files lie in it directly, or in one sub-directory for each launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from resumekit.errors import TraceError
from resumekit.record.journal import Has, Record, latest_steps

START, STEP, CHECKPOINT, RESUMED, END = "start", "step", "checkpoint", "resumed", "end"
DURABLE = "durable"

# Of the recorder alone: where a launch continues, and why nothing follows.
ORIGIN, FAILED = "origin", "failed"

# Weights and optimizer state before the first step of a launch, from ``ORIGIN``.
RESTORED = "restored"

STATE_KINDS = (CHECKPOINT, RESUMED, END)
_KINDS = (START, STEP, DURABLE, ORIGIN, FAILED, *STATE_KINDS)

# Components of a step beside states and results.
DATA, LR, RNG = "data", "lr", "rng"
INPUTS = (DATA, LR, RNG)
IN_ANY_ORDER = "samples in any order"  # of data, where only digests of the ids are known

# The recorder finds these when it looks for them; that one is absent shows nothing.
FOUND_BY_CHANCE = ("modules", "grad_scaler")

Parts = Mapping[str, Mapping[str, str]]

# As found and expected; None where it is absent.
Leaves = Mapping[str, tuple[str | None, str | None]]


@dataclass(frozen=True)
class Moment:
    """One step that was executed, or one state that was saved, restored or reached.

    Args:
        kind: ``"step"``, ``"checkpoint"``, ``"resumed"``, ``"end"`` or ``"restored"``; a trace has
            ``"start"`` and ``"durable"`` as well, the recorder ``"origin"`` and ``"failed"``.
        step: the optimizer step; 0 for ``"start"``.
        parts: by component, and in it by leaf, a text that is equal exactly when the value is. A
            step has ``data`` (``epoch``, ``batch``, ``samples``), ``lr`` and ``rng``.
        values: the components that are results of the step, such as the loss.
        micro_step: distinguishes several states of one step.
        fields: of a line of a trace, as written.
        time_ns: when that was written (Unix time).
    """

    kind: str
    step: int
    parts: Parts = field(default_factory=dict, repr=False)
    values: tuple[str, ...] = ()
    micro_step: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    time_ns: int = 0

    @property
    def key(self) -> tuple[bool, int, int]:
        """Equal for the moments of two runs that must be equal."""
        return self.kind == STEP, self.step, self.micro_step

    @property
    def components(self) -> Parts:
        """The states: all but inputs and results of a step."""
        others = (*INPUTS, *self.values) if self.kind == STEP else ()
        return {name: leaves for name, leaves in self.parts.items() if name not in others}

    @property
    def epoch(self) -> str | int | None:
        """Of a step: its epoch, or the pass over the dataset that the recorder saw."""
        return self.parts.get(DATA, {}).get("epoch", self.fields.get("data_pass"))


def differences(moment: Moment, expected: Moment) -> dict[str, Leaves]:
    """By component, the values that two moments do not have in common, inputs of a step first."""
    found: dict[str, Leaves] = {}
    for component in {**moment.parts, **expected.parts}:
        is_common = component in moment.parts and component in expected.parts
        is_by_chance = moment.kind == STEP and component.split("/")[0] in FOUND_BY_CHANCE
        if is_common or not (is_by_chance or moment.kind == RESTORED):
            now, then = moment.parts.get(component, {}), expected.parts.get(component, {})
            values = {leaf: (now.get(leaf), then.get(leaf)) for leaf in {**then, **now}}
            found[component] = {leaf: (a, b) for leaf, (a, b) in values.items() if a != b}
    return found


def rest_of(expected: Moment, rest: Moment) -> Moment:
    """What a step must be of which this launch has made the last micro-steps; else the step."""
    if not rest.fields.get("is_rest"):
        return expected
    parts: dict[str, Mapping[str, str]] = dict(expected.parts)
    now, then = rest.parts.get(DATA, {}), parts.get(DATA, {})
    parts[DATA] = {leaf: _last(text, now.get(leaf, "")) for leaf, text in then.items()}
    fields, num_samples = dict(expected.fields), len(rest.fields.get("samples", ()))
    if num_samples and "samples" in fields:
        fields["samples"] = fields["samples"][-num_samples:]
    values = expected.values
    if len(rest.values) < len(values):
        results = [parts.pop(name) for name in values]
        values, kept = rest.values, results[len(results) - len(rest.values) :]
        parts.update(zip(values, kept, strict=True))
    return replace(expected, parts=parts, values=values, fields=fields)


def _last(expected: str, found: str) -> str:
    return ",".join(expected.split(",")[-len(found.split(",")) :]) if found else expected


Launch = tuple[Moment, ...]


@dataclass(frozen=True)
class Recording:
    """All launches of one rank of a run.

    Args:
        launches: by their number, in the order of execution.
        was_ended: after the steps that were asked for, as a replay is.
    """

    launches: Mapping[int, Launch]
    was_ended: bool = False

    @property
    def moments(self) -> Launch:
        """All moments, in the order of execution."""
        return tuple(moment for launch in self.launches.values() for moment in launch)

    @property
    def last_step(self) -> int:
        """The highest step that was executed."""
        return max((each.step for each in self.moments if each.kind == STEP), default=0)


def first_step(launch: Launch) -> Moment | None:
    """The first step that a launch executed; None if there is none."""
    return next((each for each in launch if each.kind == STEP), None)


def losses(launch: Launch, name: str = "loss") -> tuple[tuple[float, float], ...]:
    """A result by step, where it is a number."""
    found: dict[int, float] = {}
    for moment in launch:
        text = moment.parts.get(name, {}).get("") if name in moment.values else None
        if moment.kind == STEP and text is not None:
            try:
                found[moment.step] = float.fromhex(text) if "0x" in text else float(text)
            except ValueError:
                continue  # a digest, of a tensor with several values
    return tuple(sorted((float(step), value) for step, value in found.items()))


# ---------------------------------------------------------------- from a trace


@dataclass(frozen=True)
class TracedProcess:
    """What one process wrote: one rank, from its start to its end or its death.

    Args:
        rank: the rank of the process.
        launch: the launch it belongs to, from 0.
        records: in the order of execution.
    """

    rank: int
    launch: int
    records: Launch


def read_recordings(trace: Path) -> dict[int, Recording]:
    """What each rank traced, by rank; empty when nothing was."""
    return {rank: of_trace(processes) for rank, processes in find_trace(trace).items()}


def of_trace(processes: Iterable[TracedProcess]) -> Recording:
    """What one rank traced, or what the recorder saw of it: its steps and states.

    Args:
        processes: of one rank, as ``read_trace`` gives them.
    """
    kinds = (STEP, *STATE_KINDS, ORIGIN)
    return Recording(
        {
            process.launch: tuple(
                replace(each, kind=RESTORED, step=each.step - 1) if each.kind == ORIGIN else each
                for each in process.records
                if each.kind in kinds
            )
            for process in processes
        }
    )


def records_of(processes: Iterable[TracedProcess], *kinds: str) -> Iterator[Moment]:
    """The records of these kinds in the order of the processes; without any, all records."""
    return (each for one in processes for each in one.records if not kinds or each.kind in kinds)


def steps_of(processes: Iterable[TracedProcess], kind: str) -> list[int]:
    """The optimizer steps of the records of one kind."""
    return [record.step for record in records_of(processes, kind)]


def durable_steps(processes: Iterable[TracedProcess]) -> list[int]:
    """The steps whose checkpoints a resume must find."""
    return [
        record.step
        for record in records_of(processes, CHECKPOINT, DURABLE)
        if record.fields.get("is_durable", True)
    ]


def find_trace(directory: Path) -> dict[int, tuple[TracedProcess, ...]]:
    """The processes of every rank, as ``read_trace`` gives them; empty when there is no trace."""
    try:
        return read_trace(directory)
    except TraceError:
        return {}


def read_trace(directory: Path) -> dict[int, tuple[TracedProcess, ...]]:
    """The processes of every rank, oldest first.

    A last line without its newline is left out: its writer died while writing it.

    Args:
        directory: the trace of one run, whatever number of launches it took.

    Raises:
        TraceError: there is no trace, or a line in it is damaged.
    """
    ranks: dict[int, list[TracedProcess]] = {}
    for launch, path in _files(directory):
        records = [_parse(path, number, line) for number, line in _lines(path)]
        if not records:
            continue
        first = records[0]
        if first.kind != START or not isinstance(first.fields.get("rank"), int):
            raise TraceError(str(path), found=f"starts with {first.kind!r}", expected=repr(START))
        rank = int(first.fields["rank"])
        processes = ranks.setdefault(rank, [])
        number = len(processes) if launch is None else launch
        processes.append(TracedProcess(rank, number, tuple(records[1:])))
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


def _parse(path: Path, number: int, line: bytes) -> Moment:
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
    values = {name: {"": str(value)} for name, value in fields.get("values", {}).items()}
    inputs = _inputs(fields) if kind == STEP else {}
    parts = {**inputs, **fields.get("components", {}), **values}
    return Moment(kind, step, parts, tuple(values), fields.get("micro_step", 0), fields, time_ns)


def _inputs(fields: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    data = {name: str(fields[name]) for name in ("epoch", "batch") if name in fields}
    if "samples" in fields:
        data["samples"] = ",".join(map(str, fields["samples"]))
    if "sample_counts" in fields:
        data["count"] = ",".join(map(str, fields["sample_counts"]))
    if all(fields.get("sample_sets", ("",))):
        data[IN_ANY_ORDER] = ",".join(fields["sample_sets"])
    rates = {f"group{index}": str(lr) for index, lr in enumerate(fields.get("lr", ()))}
    return {DATA: data, LR: rates, RNG: dict(fields.get("rng", {}))}


# ---------------------------------------------------------------- from journals

_ALL = ~0


def of_replay(
    recorded: Iterable[Record], replayed: Iterable[Record], resumed_step: int
) -> tuple[Recording, Recording]:
    """A run, and its replay as a launch that continues the run, of one rank.

    What only one of both has of a step is left out there.

    Args:
        recorded: by all attempts of the run, oldest first.
        replayed: by the replay.
        resumed_step: the step that the replay began from.
    """
    then, now = latest_steps(recorded), latest_steps(replayed)
    fields = {step: then[step].has & now[step].has for step in now if step in then}
    reference = {step: _moment(record, fields.get(step, _ALL)) for step, record in then.items()}
    repeated = [_moment(record, fields.get(step, _ALL)) for step, record in now.items()]
    before = reference.get(resumed_step, Moment(STEP, resumed_step))
    judged = {0: (before,), 1: (Moment(RESUMED, resumed_step), *repeated)}
    return Recording({0: tuple(reference.values())}), Recording(judged, was_ended=True)


def _moment(record: Record, fields: int) -> Moment:
    has = record.has & fields
    data = {"epoch": str(record.epoch)}
    if has & Has.COUNT:
        data["count"] = str(record.num_samples)
    if has & Has.IDS:
        data |= {"samples": _digest(record.ids), IN_ANY_ORDER: _digest(record.ids_sum)}
    rates = {"group0": record.lr.hex(), "all groups": _digest(record.lr_digest)}
    states = {"torch": _digest(record.rng_torch), "Python or NumPy": _digest(record.rng_host)}
    if has & Has.DEVICE_RNG:
        states["CUDA"] = _digest(record.rng_devices)
    parts: dict[str, Mapping[str, str]] = {DATA: data}
    if has & Has.LR:
        parts[LR] = rates
    if has & Has.RNG:
        parts[RNG] = states
    if has & Has.LOSS:
        parts["loss"] = {"": (record.loss + 0.0).hex()}  # zeros of two signs are equal
    return Moment(STEP, record.step, parts, ("loss",))


def _digest(number: int) -> str:
    return f"{number:016x}"
