"""Comparing repeated steps with what was recorded: by a resume, by a replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from resumekit.record.conditions import (
    CHANGED_BETWEEN,
    GPUS,
    Header,
    changes,
    divides_otherwise,
    loss_is_comparable,
    may_be_without_effect,
    same_device,
)
from resumekit.record.journal import (
    DIRECTORY,
    LOSS,
    SAVE,
    STEP,
    WEIGHTS,
    Attempt,
    Has,
    Record,
    find_attempts,
    latest_steps,
)

Word = Literal["identical", "different", "not comparable", "nothing repeated"]

# The worst first: of several ranks' verdicts it counts.
WORDS: tuple[Word, ...] = ("different", "not comparable", "identical", "nothing repeated")

STEP_COUNT, SAMPLE_IDS, RANDOM_STATE, LEARNING_RATE, LOSS_VALUE, WEIGHT_SAMPLES = (
    "step count",
    "sample ids",
    "random state",
    "learning rate",
    "loss",
    "weights",
)


@dataclass(frozen=True)
class Difference:
    """The first value of a repeated step that is not what an earlier attempt recorded.

    Args:
        step: the optimizer step.
        kind: ``"step count"``, ``"sample ids"``, ``"random state"``, ``"learning rate"``,
            ``"loss"`` or ``"weights"``.
        then: what the earlier attempt recorded.
        now: what this attempt found.
        source: what recorded it: ``"attempt 3"``.
    """

    step: int
    kind: str
    then: str
    now: str
    source: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind} {self.now}, {self.source} had {self.then}"


@dataclass(frozen=True)
class StepsVerdict:
    """What the comparison of the repeated steps of an attempt came to.

    Args:
        word: the verdict; ``"identical"`` is said of the inputs and of samples of the weights.
        num_steps: the repeated steps that were compared.
        reason: why they are not comparable, what differs, or which of the two was not compared.
        loss: why a difference in the loss or the weights alone proves nothing, with the largest
            relative one of the loss; empty where both are equal.
    """

    word: Word
    num_steps: int = 0
    reason: str = ""
    loss: str = ""

    def __str__(self) -> str:
        steps = f"{self.num_steps} repeated step{'' if self.num_steps == 1 else 's'}"
        if self.word == "nothing repeated":
            return self.word
        reason = f" ({self.reason})" if self.reason else ""
        return f"{steps}: {self.word}{reason}" + (f"; {self.loss}" if self.loss else "")

    def as_dict(self) -> dict[str, Any]:
        """The verdict in plain values, for a manifest."""
        found = {"verdict": self.word, "num_steps": self.num_steps}
        words = {"reason": self.reason, "loss": self.loss}
        return {**found, **{name: text for name, text in words.items() if text}}


def worst(verdicts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the verdicts of several ranks, as ``as_dict`` gives them, the one that counts."""
    return dict(min(verdicts, key=lambda each: WORDS.index(each["verdict"])))


@dataclass
class _Past:
    """What the latest earlier attempt recorded of one step."""

    header: Header
    step: Record | None = None
    loss: float | None = None
    weights: Record | None = None
    saves: dict[int, list[Record]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        if record.kind == STEP:
            self.step = record
            if record.has & Has.LOSS:
                self.loss = record.loss
        elif record.kind == LOSS:
            self.loss = record.loss
        elif record.kind == WEIGHTS:
            self.weights = record
        elif record.kind == SAVE:
            self.saves.setdefault(record.num_samples, []).append(record)


class Comparison:
    """Compares the records of an attempt, as they are made, with those of earlier attempts.

    Args:
        now: the header of the attempt.
        earlier: the headers of this rank's earlier attempts with their records of the steps after
            the one that the attempt resumed from, oldest attempt first.

    Attributes:
        difference: the first one that proves the resume wrong, or None.
        last_step: the last step that an earlier attempt recorded; 0 when there is none.
        weights_at: the steps of which samples of the weights were compared.
    """

    def __init__(
        self, now: Header, earlier: Sequence[tuple[Header, Sequence[Record]]] = ()
    ) -> None:
        self._now = now
        self._past: dict[int, _Past] = {}
        related = [each for each in earlier if each[0].lineage[:1] == now.lineage[:1]]
        self._changes = {then.number: _changes(then, now) for then, _ in related}
        # An attempt that is comparable counts, even where a later one is not.
        for then, records in sorted(related, key=lambda each: not self._changes[each[0].number]):
            self._take(then, records)
        self.difference: Difference | None = None
        self.last_step = max(self._past, default=0)
        self.weights_at: set[int] = set()
        self._num_steps = 0
        self._has_begun = False
        self._obstacle = ""
        self._has_compared_ids = False
        self._loss_obstacle, self._largest = "", 0.0

    def _take(self, then: Header, records: Sequence[Record]) -> None:
        latest: dict[int, _Past] = {}
        for record in records:
            latest.setdefault(record.step, _Past(then)).add(record)
        self._past.update({step: each for step, each in latest.items() if each.step is not None})

    def add(self, record: Record) -> Difference | None:
        """Compares one record of the attempt.

        Returns:
            The first difference of all, when it is found here.
        """
        if self.difference is not None:
            return None
        if record.kind == STEP and not self._has_begun:
            self._has_begun = True
            self.difference = self._of_first_step(record)
            if self.difference is not None:
                return self.difference
        past = self._past.get(record.step)
        if past is None:
            return None
        obstacles = self._changes[past.header.number]
        if record.kind == STEP:
            self._num_steps += 1
        needs_comparison = all(map(may_be_without_effect, obstacles))
        differences = self._differences(past, record) if needs_comparison else ()
        if obstacles and (not needs_comparison or any(True for _ in differences)):
            self._obstacle = self._obstacle or ", ".join(obstacles)
            return None
        for kind, then, now in differences:
            source = f"attempt {past.header.number}"
            self.difference = Difference(record.step, kind, then, now, source)
            return self.difference
        return None

    def recorded_by(self, step: int) -> int | None:
        """The number of the attempt that a step is compared with; None without one."""
        past = self._past.get(step)
        return None if past is None else past.header.number

    def add_all(self, records: Iterable[Record]) -> Comparison:
        """This comparison, after all these records."""
        for record in records:
            self.add(record)
        return self

    def _of_first_step(self, record: Record) -> Difference | None:
        """The step count is the checkpoint's, whatever else has changed since."""
        before = self._now.resumed_step
        if before is None or record.step == before + 1 or self._now.excluded:
            return None
        return Difference(
            record.step, STEP_COUNT, str(before), str(record.step - 1), "the checkpoint"
        )

    def _differences(self, past: _Past, now: Record) -> Iterator[tuple[str, str, str]]:
        if now.kind == STEP:
            assert past.step is not None
            yield from _of_samples(past.step, now)
            yield from self._of_random_states(past, [past.step], now)
            yield from _of_learning_rates(past.step, now)
            self._has_compared_ids |= bool(past.step.has & now.has & Has.IDS)
        elif now.kind == SAVE:
            yield from self._of_random_states(past, past.saves.get(now.num_samples, []), now)
        elif now.kind == WEIGHTS and past.weights is not None:
            self.weights_at.add(now.step)
            yield from self._of_weights(past, past.weights, now)
        if now.has & Has.LOSS and past.loss is not None:
            yield from self._of_loss(past, past.loss, now.loss)

    def _of_random_states(
        self, past: _Past, then: Sequence[Record], now: Record
    ) -> Iterator[tuple[str, str, str]]:
        if not (now.has & Has.RNG and same_device(past.header, self._now)):
            return
        found = [list(_of_random_state(each, now)) for each in then if each.has & Has.RNG]
        # A step whose end was unknown is saved twice at one position; one of the two is enough.
        if found and all(found):
            yield from found[0]

    def _of_loss(self, past: _Past, then: float, now: float) -> Iterator[tuple[str, str, str]]:
        if then == now or (math.isnan(then) and math.isnan(now)):
            return
        obstacle = loss_is_comparable(past.header, self._now)
        if not obstacle:
            yield LOSS_VALUE, *_numbers(then, now)
            return
        scale = max(abs(then), abs(now))
        relative = abs(then - now) / scale if math.isfinite(scale) else math.inf
        self._loss_obstacle, self._largest = obstacle, max(self._largest, relative)

    def _of_weights(self, past: _Past, then: Record, now: Record) -> Iterator[tuple[str, str, str]]:
        if then.ids != now.ids:
            self._loss_obstacle = loss_is_comparable(past.header, self._now)
            if not self._loss_obstacle:
                yield WEIGHT_SAMPLES, _short(then.ids), _short(now.ids)

    @property
    def verdict(self) -> StepsVerdict:
        """The verdict on the steps that were compared so far."""
        if self.difference is not None:
            return StepsVerdict("different", self._num_steps, str(self.difference))
        if not self._num_steps:
            return StepsVerdict("nothing repeated")
        loss = ""
        if self._loss_obstacle:
            what = (
                f"loss differs by up to {self._largest:.1e}" if self._largest else "weights differ"
            )
            loss = f"{what}, no proof: {self._loss_obstacle}"
        model = self._now.fed_by
        fed = f"a stream uses {model}, which training changes" if model else ""
        if self._obstacle or fed:
            return StepsVerdict("not comparable", self._num_steps, self._obstacle or fed, loss)
        compared = {SAMPLE_IDS: self._has_compared_ids, WEIGHT_SAMPLES: bool(self.weights_at)}
        missing = [name for name, is_compared in compared.items() if not is_compared]
        reason = f"{' and '.join(missing)} not compared" if missing else ""
        return StepsVerdict("identical", self._num_steps, reason, loss)


def _changes(then: Header, now: Header) -> tuple[str, ...]:
    found = changes(then, now)
    return found or (() if then.lineage == now.lineage else (CHANGED_BETWEEN,))


def _of_samples(then: Record, now: Record) -> Iterator[tuple[str, str, str]]:
    both = then.has & now.has
    if both & Has.COUNT and then.num_samples != now.num_samples:
        yield SAMPLE_IDS, f"{then.num_samples} samples", f"{now.num_samples} samples"
    elif both & Has.IDS and then.ids != now.ids:
        yield SAMPLE_IDS, _short(then.ids), _short(now.ids)


def _of_random_state(then: Record, now: Record) -> Iterator[tuple[str, str, str]]:
    generators = [("torch", then.rng_torch, now.rng_torch)]
    generators.append(("Python or NumPy", then.rng_host, now.rng_host))
    if then.has & now.has & Has.DEVICE_RNG:
        generators.append(("CUDA", then.rng_devices, now.rng_devices))
    for name, before, after in generators:
        if before != after:
            yield RANDOM_STATE, f"{name} {_short(before)}", f"{name} {_short(after)}"


def _of_learning_rates(then: Record, now: Record) -> Iterator[tuple[str, str, str]]:
    if then.has & now.has & Has.LR and then.lr_digest != now.lr_digest:
        if then.lr != now.lr:
            yield LEARNING_RATE, *_numbers(then.lr, now.lr)
        else:
            yield LEARNING_RATE, "another in a later param group", repr(now.lr)


def _numbers(then: float, now: float) -> tuple[str, str]:
    """Both as short as they differ."""
    short = f"{then:.6g}", f"{now:.6g}"
    return short if short[0] != short[1] else (repr(then), repr(now))


def _short(digest: int) -> str:
    return f"{digest:016x}"[:8]


# ---------------------------------------------------------------- all attempts of a run

_ID_DIGITS = 8  # of an attempt, in a lineage


@dataclass(frozen=True)
class AttemptVerdict:
    """The verdict on one rank of one attempt that resumed.

    Args:
        header: of the attempt.
        verdict: on the steps that it repeated.
    """

    header: Header
    verdict: StepsVerdict


def verdicts(directory: Path) -> Iterator[AttemptVerdict]:
    """The verdict on each rank of each attempt that resumed, oldest first.

    Args:
        directory: the folder ``journal/`` of a run.

    Raises:
        OSError: a file cannot be read.
    """
    seen: list[Attempt] = []
    for attempt in find_attempts(directory):
        if attempt.header.resumed_step is not None:
            comparison = compared(attempt.header, seen).add_all(attempt.records())
            yield AttemptVerdict(attempt.header, comparison.verdict)
        seen.append(attempt)


def lineage(directory: Path, now: Header, parent: str | None) -> tuple[str, ...]:
    """The lineage of an attempt, see ``Header``.

    Args:
        directory: the run directory.
        now: the header of the attempt, complete but for its lineage.
        parent: the attempt that wrote the checkpoint that it resumed from; None for a fresh start.
    """
    if parent is None:
        return (now.attempt[:_ID_DIGITS],)
    try:
        attempts = find_attempts(directory / DIRECTORY)
    except OSError:
        attempts = []
    headers = [each.header for each in attempts if each.header.attempt == parent]
    headers.sort(key=lambda header: header.rank != now.rank)
    if not headers:
        return (parent[:_ID_DIGITS],)
    then = headers[0]
    changed = changes(then, now)
    return (*then.lineage, now.attempt[:_ID_DIGITS]) if changed else then.lineage


def compared(
    now: Header, earlier: Sequence[Attempt], seen: Callable[[Header], Header] = lambda each: each
) -> Comparison:
    """The comparison of an attempt with the earlier ones of its rank, before its first record.

    Args:
        now: the header of the attempt; it has resumed.
        earlier: the attempts before it, oldest first.
        seen: what of a header is compared.

    Raises:
        OSError: a file cannot be read.
    """
    step = now.resumed_step or 0
    related = [each for each in earlier if each.header.rank == now.rank]
    return Comparison(
        seen(now), [(seen(each.header), each.records(after=step)) for each in related]
    )


_MODULUS = 2**64


@dataclass
class Used:
    """The samples that one rank, or all of them, have used since a resume, within one epoch.

    Args:
        num_samples: how many.
        ids_sum: the sum of their hashes modulo 2**64.
        is_known: whether all had ids, and the epoch of the first step is not over.
        epoch: of the first step; None before it.
    """

    num_samples: int = 0
    ids_sum: int = 0
    is_known: bool = True
    epoch: int | None = None

    def add(self, record: Record) -> None:
        """Adds the samples of a step."""
        self.epoch = record.epoch if self.epoch is None else self.epoch
        if record.epoch != self.epoch or not record.has & Has.IDS:
            self.is_known = False
        self.num_samples += record.num_samples
        self.ids_sum = (self.ids_sum + record.ids_sum) % _MODULUS


def sum_over_ranks(used: Sequence[Used]) -> Used:
    """What several ranks have used together."""
    return Used(
        sum(each.num_samples for each in used),
        sum(each.ids_sum for each in used) % _MODULUS,
        all(each.is_known for each in used),
    )


@dataclass(frozen=True)
class EarlierUse:
    """What the latest earlier attempt has used from here on.

    Args:
        sums: of hashes, by number of samples; empty where a rank's journal is missing or has no
            sample ids, and where steps can be compared one by one.
        proves: whether other samples prove the resume wrong.
    """

    sums: dict[int, int] = field(default_factory=dict)
    proves: bool = False


def earlier_use(now: Header, earlier: Sequence[Attempt]) -> EarlierUse:
    """The samples to compare with in an attempt of another geometry.

    Args:
        now: the header of the attempt; it has resumed.
        earlier: the attempts of all ranks before it, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    related = [each for each in earlier if each.header.lineage[:1] == now.lineage[:1]]
    for number in sorted({each.header.number for each in related}, reverse=True):
        files = [each for each in related if each.header.number == number]
        then = files[0].header
        if not changes(then, now):
            break
        first = [each for each in files if each.header.writes_share]
        after = now.resumed_step or 0
        steps = [latest_steps(each.records(after=after)) for each in first]
        if len(files) == then.world_size and steps and all(steps):
            return EarlierUse(_added_up(steps), divides_otherwise(then, now))
    return EarlierUse()


def _added_up(ranks: Sequence[dict[int, Record]]) -> dict[int, int]:
    total, found = Used(), {}
    step = min(map(min, ranks))
    while all(step in rank for rank in ranks):
        for rank in ranks:
            total.add(rank[step])
        if not total.is_known:
            break
        found[total.num_samples] = total.ids_sum
        step += 1
    return found


# ---------------------------------------------------------------- the steps of a replay


def replayed(now: Header, recorded: Sequence[Attempt]) -> Comparison:
    """The comparison of a replay with the attempts of its run, before its first record.

    Changed code, options or libraries explain a difference elsewhere. Here the question is which
    step is the first that they change, so they are left out of the headers.

    Args:
        now: the header of the replay.
        recorded: the attempts of the run, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    return compared(now, recorded, _without_changes)


def _without_changes(header: Header) -> Header:
    kept = {
        name: header.environment[name] for name in ("device", GPUS) if name in header.environment
    }
    environment = {**kept, "deterministic": True}
    return replace(
        header, lineage=(), options={}, geometry={}, code={}, environment=environment, excluded=()
    )
