"""What a replay has left, compared with the run: its journal and its checkpoints; the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from resumekit.diff import compare_checkpoints
from resumekit.record.comparison import Difference, replayed
from resumekit.record.conditions import Header, changes, loss_is_comparable, same_device
from resumekit.record.journal import Attempt, Has, Record, latest_steps
from resumekit.state import Slot
from resumekit.storage.manifest import StepReader
from resumekit.storage.store import Store

_LOSS_FIELD, _RNG_FIELD = "loss", "RNG state"
_MAX_NAMED = 10


@dataclass(frozen=True)
class RankResult:
    """What one rank has replayed.

    Args:
        rank: its number.
        num_steps: that it has done.
        num_compared: of them, those that the journal has.
        compared_to: the last of these; 0 without one.
        loss_to: the last one of which the loss was compared.
        fields: what was compared, each with the number of steps.
        difference: the first value that differs.
        obstacle: why what differs, or all, is no proof.
        changes: what has changed since the attempt that recorded the first of these steps, e.g.
            ``"source of train.py"``.
        records: the journal of the replay.
    """

    rank: int
    num_steps: int
    num_compared: int
    compared_to: int
    loss_to: int
    fields: dict[str, int]
    difference: Difference | None
    obstacle: str
    changes: tuple[str, ...]
    records: tuple[Record, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class CheckpointResult:
    """A checkpoint of the run and the replay's own one of that step.

    Args:
        name: of the run's.
        step: of both.
        is_equal: None: not compared.
        text: what was found.
    """

    name: str
    step: int
    is_equal: bool | None
    text: str


@dataclass(frozen=True)
class ReplayResult:
    """What a replay came to.

    Args:
        ranks: of each rank.
        checkpoints: of each checkpoint on the way.
        first_step: the first step that was to be replayed.
        last_step: the last one.
        written: files in the working and the run directory that it has changed without an overlay.
        is_protected: whether the overlay kept all files below the directories as they are.
        exit_status: of the command; after the last step, it changes nothing of the verdict.
    """

    ranks: tuple[RankResult, ...]
    checkpoints: tuple[CheckpointResult, ...]
    first_step: int
    last_step: int
    written: tuple[str, ...] | None
    is_protected: bool
    exit_status: int

    @property
    def num_steps(self) -> int:
        """The steps that all ranks have done."""
        return min(each.num_steps for each in self.ranks)

    @property
    def num_missing(self) -> int:
        """The steps that the command ended before."""
        return max(0, self.last_step - self.first_step + 1 - self.num_steps)

    @property
    def first_difference(self) -> tuple[int, Difference] | None:
        """The first difference of all ranks, with its rank."""
        found = [(each.rank, each.difference) for each in self.ranks if each.difference is not None]
        return min(found, key=lambda each: each[1].step, default=None)

    @property
    def is_different(self) -> bool:
        """Whether a step or a checkpoint differs."""
        return self.first_difference is not None or any(
            each.is_equal is False for each in self.checkpoints
        )

    @property
    def is_equal(self) -> bool:
        """Whether all steps were done, the last one was compared, and nothing differs."""
        obstacles = any(each.obstacle for each in self.ranks)
        is_whole = self._compared_to >= self.last_step and not self.num_missing
        return is_whole and not obstacles and not self.is_different

    @property
    def _compared_to(self) -> int:
        return max(self._equal_to, min(each.compared_to for each in self.ranks))

    @property
    def _weights_to(self) -> int:
        return max(self._equal_to, min(each.loss_to for each in self.ranks))

    @property
    def _equal_to(self) -> int:
        return max((each.step for each in self.checkpoints if each.is_equal), default=0)

    @property
    def compares_weights(self) -> bool:
        """Whether a difference of the weights at the last step would have been found."""
        return self._weights_to >= self.last_step

    @property
    def verdict(self) -> str:
        """One line."""
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'} replayed"
        if self.first_difference is not None:
            rank, difference = self.first_difference
            of_rank = f"rank {rank}, " if len(self.ranks) > 1 else ""
            return f"{steps}, different from {of_rank}{difference}"
        different = [each.name for each in self.checkpoints if each.is_equal is False]
        if different:
            return f"{steps}, the state differs at {different[0]}"
        obstacles = [each.obstacle for each in self.ranks if each.obstacle]
        if obstacles:
            return f"{steps}, not comparable ({obstacles[0]})"
        if not self._compared_to:
            return f"{steps}, not compared: the journal has none of them"
        if self.num_missing:
            return f"{steps}, the other {self.num_missing} not compared"
        if self._compared_to < self.last_step:
            return f"{steps}, identical up to step {self._compared_to}, not compared after it"
        if self.compares_weights:
            return f"{steps}, identical"
        weights = f"compared up to step {self._weights_to} only"
        weights = weights if self._weights_to else "not compared"
        return f"{steps}: data, RNG and learning rate identical; weights {weights}"

    def lines(self) -> list[str]:
        """The verdict, and what was compared."""
        counts = self.ranks[0].fields.items()
        fields = ", ".join(f"{name} ({count})" for name, count in counts)
        found = [f"compared, in steps: {fields or 'nothing'}"]
        found += [f"{each.name}: {each.text}" for each in self.checkpoints]
        return [self.verdict, *(f"  {line}" for line in (*found, *self.notes))]

    @property
    def notes(self) -> list[str]:
        """What else is to be known of the comparison, and of the command."""
        first = self.ranks[0]
        found = []
        missing = first.num_steps - first.num_compared
        if missing:
            found.append(f"not compared: {missing} steps that the journal does not have")
        if self.num_missing and self.first_difference is None:
            num_wanted = self.num_steps + self.num_missing
            found.append(f"the command ended after {self.num_steps} of {num_wanted} steps")
        if first.changes:
            found.append(f"changed since the run: {', '.join(first.changes)}")
        if self.exit_status:
            found.append(f"the command ended with exit status {self.exit_status} after these steps")
        if not self.is_protected:
            found.append(f"written in the working and the run directory: {self._written}")
        return found

    def as_plain(self) -> dict[str, Any]:
        """The same as dicts and lists for JSON, without the journal of the replay."""
        plain = {"is_equal": self.is_equal, "verdict": self.verdict, **asdict(self)}
        for rank in plain["ranks"]:
            del rank["records"]
        return plain

    @property
    def _written(self) -> str:
        if self.written is None:
            return "unknown, there are too many files to list, or some cannot be"
        more = len(self.written) - _MAX_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return (", ".join(self.written[:_MAX_NAMED]) or "nothing") + rest


# ---------------------------------------------------------------- comparing

_FIELDS = {
    "sample ids": Has.IDS,
    _RNG_FIELD: Has.RNG,
    "learning rates": Has.LR,
    _LOSS_FIELD: Has.LOSS,
}


def compare_rank(now: Sequence[Attempt], recorded: Sequence[Attempt]) -> RankResult:
    """The steps of one rank, compared with those that the run recorded.

    Args:
        now: the journals of the replay of this rank, oldest first; several where the command has
            restarted itself.
        recorded: those of the run, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    header, records = replace(now[-1].header, resumed_step=now[0].header.resumed_step), _joined(now)
    comparison = replayed(header, recorded).add_all(records)
    own_rank = [each for each in recorded if each.header.rank == header.rank]
    then: dict[int, Record] = {}
    for attempt in own_rank:
        then.update(latest_steps(attempt.records(after=header.resumed_step or 0)))
    mine = latest_steps(records)
    both = {step: mine[step].has & then[step].has for step in mine if step in then}
    steps_of = {
        name: [step for step, has in both.items() if has & field] for name, field in _FIELDS.items()
    }
    steps_of["weight samples"] = sorted(comparison.weights_at)
    verdict, number = comparison.verdict, comparison.recorded_by(min(both, default=0))
    by = next((each.header for each in own_rank if each.header.number == number), None)
    if by is not None and not same_device(by, header):
        del steps_of[_RNG_FIELD]
    return RankResult(
        rank=header.rank,
        num_steps=len(mine),
        num_compared=len(both),
        compared_to=max(both, default=0),
        loss_to=max(steps_of[_LOSS_FIELD], default=0),
        fields={name: len(steps) for name, steps in steps_of.items() if steps},
        difference=comparison.difference,
        obstacle=verdict.reason if verdict.word == "not comparable" else verdict.loss,
        changes=() if by is None else _changes(by, header),
        records=tuple(records),
    )


def _joined(attempts: Sequence[Attempt]) -> list[Record]:
    """The records of attempts, without the steps that a later one has repeated."""
    found: list[Record] = []
    for attempt in attempts:
        resumed = attempt.header.resumed_step or 0
        found = [each for each in found if each.step <= resumed] + attempt.records()
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
    judged = [key for key in different if not _may_differ(key)]
    if judged:
        return CheckpointResult(name, step, False, f"differs in {', '.join(judged)}")
    num_tensors = sum(each.num_tensors for each in found if each.is_equal)
    num_values = sum(each.num_values for each in found if each.is_equal)
    rest = f"; {', '.join(different)} not compared" if different else ""
    text = f"{num_tensors} tensors and {num_values} other values equal{rest}"
    return CheckpointResult(name, step, True, text)


def _may_differ(key: str) -> bool:
    """Whether a component may differ between two exact runs, see ``comparable_state``.

    It holds what a process has seen since its start as well: loaders that are made in each epoch,
    how far workers are ahead, times, gradients of which it is not known yet whether they are used.
    Progress holds the length of the run, which may have been extended since; its counts are equal
    where the manifests' are.
    """
    is_slot = key in (Slot.DATA.value, Slot.PROGRESS.value)
    return is_slot or key.endswith(("/attributes", "/gradients"))
