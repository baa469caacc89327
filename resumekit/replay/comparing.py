"""Compares what a replay has left with the run: its journal, and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resumekit.diff import compare_checkpoints
from resumekit.record.comparison import replayed
from resumekit.record.conditions import Header, changes, loss_is_comparable
from resumekit.record.journal import LOSS, STEP, Attempt, Has, Record
from resumekit.replay.result import LOSS_FIELD, CheckpointResult, RankResult
from resumekit.state import Slot
from resumekit.storage import StepReader, Store

_FIELDS = {
    "sample ids": Has.IDS,
    "RNG state": Has.RNG,
    "learning rates": Has.LR,
    LOSS_FIELD: Has.LOSS,
}


def compare_rank(now: Attempt, recorded: Sequence[Attempt]) -> RankResult:
    """The steps of one rank, compared with those that the run recorded.

    Args:
        now: the journal of the replay.
        recorded: those of the run, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    comparison, records = replayed(now.header, recorded), now.records()
    for record in records:
        comparison.add(record)
    own_rank = [each for each in recorded if each.header.rank == now.header.rank]
    then: dict[int, int] = {}
    for attempt in own_rank:
        then.update(_fields(attempt.records(after=now.header.resumed_step or 0)))
    mine = _fields(records)
    both = [mine[step] & then[step] for step in mine if step in then]
    verdict = comparison.verdict
    return RankResult(
        rank=now.header.rank,
        num_steps=len(mine),
        num_compared=len(both),
        fields={
            name: count
            for name, field in _FIELDS.items()
            if (count := sum(bool(each & field) for each in both))
        },
        difference=comparison.difference,
        obstacle=verdict.reason if verdict.word == "not comparable" else "",
        changes=_changes(own_rank[-1].header, now.header) if own_rank else (),
        records=tuple(records),
    )


def _fields(records: Sequence[Record]) -> dict[int, int]:
    """Which fields have a value, by step; a loss may come in a record of its own."""
    found: dict[int, int] = {}
    for record in records:
        if record.kind in (STEP, LOSS):
            found[record.step] = found.get(record.step, 0) | record.has
    return found


def _changes(then: Header, now: Header) -> tuple[str, ...]:
    obstacle = loss_is_comparable(then, now)
    return (*changes(then, now), *([obstacle] if obstacle else []))


def compare_saved(original: StepReader, scratch: Path) -> CheckpointResult:
    """A checkpoint of the run, compared with what the replay saved at that step.

    Raises:
        CheckpointError: damage, or an I/O error.
    """
    store, name, step = Store(scratch), str(original.name), original.name.step
    names = [each for each in store.step_names() if each.step == step]
    if not names:
        return CheckpointResult(name, step, None, "not compared: the replay did not save there")
    saved = store.open_step(names[0])
    if dict(saved.manifest.progress) != dict(original.manifest.progress):
        return CheckpointResult(name, step, None, "not compared: saved at another point of it")
    found = compare_checkpoints(original, saved).components
    different = [each.key for each in found if not each.is_equal]
    judged = [key for key in different if not _depends_on_process(key)]
    if judged:
        return CheckpointResult(name, step, False, f"differs in {', '.join(judged)}")
    num_tensors = sum(each.num_tensors for each in found if each.is_equal)
    num_values = sum(each.num_values for each in found if each.is_equal)
    rest = f"; {', '.join(different)} not compared" if different else ""
    text = f"{num_tensors} tensors and {num_values} other values equal{rest}"
    return CheckpointResult(name, step, True, text)


def _depends_on_process(key: str) -> bool:
    """Whether a component may differ between two exact runs, see ``comparable_state``.

    It holds what a process has seen since its start as well: loaders that are made in each epoch,
    how far workers are ahead, times, gradients of which it is not known yet whether they are used.
    """
    return key == Slot.DATA.value or key.endswith(("/attributes", "/gradients"))
