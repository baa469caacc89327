"""What a journal recorded, as plain values that two runs can be compared by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resumekit.prove import RESUMED, STEP
from resumekit.prove.recordings import DATA, IN_ANY_ORDER, LR, RNG, Moment, Recording
from resumekit.record.journal import LOSS, Has, Record
from resumekit.record.journal import STEP as STEP_RECORD

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
    then, now = _by_step(recorded), _by_step(replayed)
    fields = {step: then[step].has & now[step].has for step in now if step in then}
    reference = {step: _moment(record, fields.get(step, _ALL)) for step, record in then.items()}
    repeated = [_moment(record, fields.get(step, _ALL)) for step, record in now.items()]
    before = reference.get(resumed_step, Moment(STEP, resumed_step, {}))
    judged = {0: (before,), 1: (Moment(RESUMED, resumed_step, {}), *repeated)}
    return Recording({0: tuple(reference.values())}), Recording(judged, was_ended=True)


def _by_step(records: Iterable[Record]) -> dict[int, Record]:
    """The latest record of each step, ascending; a loss may come in a record of its own."""
    found: dict[int, Record] = {}
    for record in records:
        if record.kind == STEP_RECORD:
            found[record.step] = record
        elif record.kind == LOSS and record.step in found:
            step = found[record.step]
            found[record.step] = step._replace(loss=record.loss, has=step.has | Has.LOSS)
    return dict(sorted(found.items()))


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
