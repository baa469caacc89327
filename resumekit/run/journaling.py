"""The journal of a run in progress: writes its records and compares repeated steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from resumekit.data.position import Feed
from resumekit.errors import DivergenceError
from resumekit.log import logger, warn
from resumekit.record.comparison import (
    Comparison,
    Difference,
    EarlierUse,
    Used,
    compared,
    earlier_use,
    sum_over_ranks,
    worst,
)
from resumekit.record.conditions import Header
from resumekit.record.journal import (
    BEGIN,
    DIRECTORY,
    END,
    LOSS,
    SAVE,
    SAVED,
    Ending,
    Event,
    Has,
    JournalFile,
    Record,
    find_attempts,
    limit_earlier,
    name_of,
    number_of_attempt,
)
from resumekit.record.step_values import (
    LateCopies,
    RandomStates,
    SampleIds,
    WeightSamples,
    learning_rates_digest,
    plain_loss,
    plain_rates,
)

# Above this many ranks rank 0 alone keeps a journal.
MAX_RANKS = 64
# Random states are digested at each such step, and at the first ones after a resume or a save:
# those are the steps that the next resume repeats.
RANDOM_EVERY = 10
NUM_AFTER_SAVE = 10
# As plain integers: members of an enumeration are combined slowly.
_COUNT, _IDS_AND_COUNT = int(Has.COUNT), int(Has.IDS | Has.COUNT)
_LR, _LOSS = int(Has.LR), int(Has.LOSS)

# Of one rank at a save: its verdict, and the samples that it has used; None without a resume.
Message = tuple[dict[str, Any], Used] | None


class RunJournal:
    """Records every optimizer step of this rank; only ``on_divergence="raise"`` ends a run.

    Args:
        directory: the run directory.
        raises: whether a difference ends the run.
        observer: gets the header and each record, and makes the random states be recorded at every
            step.

    Attributes:
        ending: why the run will have been closed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        raises: bool = False,
        observer: Callable[[Header, Record], None] | None = None,
    ) -> None:
        self._directory = directory / DIRECTORY
        self._raises = raises
        self._observer = observer
        self._random_every = RANDOM_EVERY if observer is None else 1
        self._file: JournalFile | None = None
        self.ending: int = Ending.LEFT
        self.is_new = True  # ``open`` has not been called yet
        self._comparison: Comparison | None = None  # of an attempt that has resumed
        self._is_decided = False  # the verdict was logged
        self._header: Header
        self._random: RandomStates
        self._optimizers: Sequence[Any] = ()
        self._ids = SampleIds()
        self._weights = WeightSamples()
        self._losses = LateCopies()
        self._used = Used()  # since the attempt began
        self._earlier = EarlierUse()  # of an attempt of other geometry
        self._samples: dict[str, Any] = {}  # what their comparison came to
        self._random_until = 0
        self._last_step = 0  # that was recorded

    def open(
        self,
        step: int,
        header: Header,
        *,
        optimizers: Sequence[Any],
        random_states: RandomStates,
    ) -> None:
        """Makes the file, before the first record; what earlier attempts wrote is read first.

        Args:
            step: the optimizer step of the first record.
            header: of the attempt, its number apart.
            optimizers: those whose learning rates are recorded.
            random_states: of the generators that the run draws from.
        """
        self.is_new = False
        if header.world_size > MAX_RANKS and header.rank:
            return
        self._random, self._optimizers = random_states, optimizers
        self._weights = WeightSamples(optimizers)
        self._random_until = step + NUM_AFTER_SAVE - 1
        try:
            self._directory.mkdir(exist_ok=True)
            number = number_of_attempt(self._directory, header.attempt)
            self._header = header = replace(header, number=number)
            if header.resumed_step is not None:
                found = find_attempts(self._directory)
                earlier = [each for each in found if each.header.number < number]
                self._comparison = compared(header, earlier)
                self._earlier = earlier_use(header, earlier)
            limit_earlier(self._directory, header.rank)
            path = self._directory / name_of(number, header.attempt, header.rank)
            self._file = JournalFile(path, header)
            self._file.append(Event.now(BEGIN, step).to_bytes())
        except OSError as error:
            self._switch_off(error)

    def note_batch(self, feed: Feed, num_samples: int) -> None:
        """A loader has given a batch of so many samples of the step in progress."""
        packed = feed.packed
        if packed is None:
            self._ids.add(feed.indices, num_samples)
        else:
            self._ids.add_packed(packed, num_samples)

    def step(self, step: int, *, epoch: int, samples: int, is_whole: bool, loss: Any) -> None:
        """Records an optimizer step; nothing before ``open``.

        Args:
            step: the optimizer step.
            epoch: counted from 0.
            samples: of the run so far.
            is_whole: whether this process has used all batches of the step.
            loss: what the loop gave, or None.

        Raises:
            DivergenceError: the step is not what an earlier attempt recorded, and a difference is
                to end the run.
        """
        if self._file is None:
            return
        self._last_step = step
        ids, has = self._ids, 0
        if is_whole:
            has = _IDS_AND_COUNT if ids.is_complete else _COUNT
        torch_state = host = devices = 0
        if step <= self._random_until or step % self._random_every == 0:
            has, torch_state, host, devices = self._random_digests(has)
        rates = plain_rates(group for each in self._optimizers for group in each.param_groups)
        lr, lr_digest = 0.0, 0
        if rates:
            has, lr, lr_digest = has | _LR, rates[0], learning_rates_digest(rates)
        value = None
        if loss is not None:
            value = plain_loss(loss)
            if value is not None:
                has |= _LOSS
            elif isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._losses.add(step, loss)
        record = Record(
            step,
            samples,
            ids.ordered,
            ids.unordered,
            torch_state,
            host,
            devices,
            lr_digest,
            lr,
            value or 0.0,
            epoch,
            ids.num_samples,
            has,
        )
        ids.clear()
        if self._comparison is not None:
            self._used.add(record)
        self._write([*self._late_records(), record, *self._weights.take(step)])

    def _random_digests(self, has: int) -> tuple[int, int, int, int]:
        devices = self._random.devices()
        has |= Has.RNG if devices is None else Has.RNG | Has.DEVICE_RNG
        return has, self._random.torch(), self._random.host(), devices or 0

    def at_save(self, step: int, micro_step: int) -> Message:
        """Records the random state at a safe point that saves.

        Returns:
            What the ranks have to agree on, for ``agree``.

        Raises:
            DivergenceError: as ``step``.
        """
        if self._file is not None:
            self._random_until = step + NUM_AFTER_SAVE
            has, torch_state, host, devices = self._random_digests(0)
            record = Record(
                step,
                rng_torch=torch_state,
                rng_host=host,
                rng_devices=devices,
                num_samples=micro_step,
                has=has,
                kind=SAVE,
            )
            self._write([*self._late_records(), record])
        if self._comparison is None or self._file is None:
            return None
        return self._comparison.verdict.as_dict(), self._used

    def agree(self, messages: Sequence[Message], first_ranks: Sequence[int]) -> dict[str, Any]:
        """The verdict of all ranks on the steps that were repeated so far; empty without a resume.

        Args:
            messages: what ``at_save`` gave on each rank.
            first_ranks: ranks that take different data, and all data together.

        Raises:
            DivergenceError: on every rank, as ``step``.
        """
        known = [each for each in messages if each is not None]
        if not known:
            return {}
        verdict = worst(verdict for verdict, _ in known)
        counted = [messages[rank] for rank in first_ranks]
        total = sum_over_ranks([each[1] for each in counted if each is not None])
        expected = self._earlier.sums.get(total.num_samples)
        if None in counted or not total.is_known or expected is None:
            return {**verdict, **self._samples}
        if expected == total.ids_sum:
            self._samples = {"sample_ids": f"identical for {total.num_samples} samples"}
        elif self._earlier.proves:
            text = f"the {total.num_samples} samples after step {self._header.resumed_step}"
            self._earlier = EarlierUse()
            self._samples = {"verdict": "different", "reason": f"{text} are others"}
            self._report_samples(text, str(verdict.get("reason", "")))
        return {**verdict, **self._samples}

    def _report_samples(self, text: str, reason: str) -> None:
        if self._raises:
            raise DivergenceError(
                text,
                found=f"different from those of the earlier attempt ({reason})",
                expected="the same samples, in any division among the ranks",
                remedy="Check the sampler, or pass on_divergence='warn'",
            )
        if not self._header.rank:
            warn("RK-811", "%s differ from those of the earlier attempt (%s)", text, reason)

    def note_save(self, step: int, *, blocked_seconds: float, background_seconds: float) -> None:
        """Records what the save at a step has cost this rank."""
        self._append(Event.now(SAVED, step, blocked_seconds, background_seconds).to_bytes())

    def close(self) -> None:
        """Records what devices have still to deliver, logs the verdict, and closes the file."""
        if self._file is not None:
            for each in self._late:
                each.wait()
            self._write(self._late_records(), may_raise=False)
            self._log_verdict()
        self.write_end()

    def fail(self) -> None:
        """An exception ends the process."""
        self.ending = Ending.ERROR

    def write_end(self) -> None:
        """Records that the process ends, and why, and closes the file."""
        self._append(Event.now(END, self._last_step, ending=self.ending).to_bytes())
        self._end()

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
        self.is_new, self._file = False, None

    # ---------------------------------------------------------------- writing

    def _write(self, records: Sequence[Record], *, may_raise: bool = True) -> None:
        assert self._file is not None
        self._append(b"".join(map(Record.to_bytes, records)))
        if self._observer is not None:
            for record in records:
                self._observer(self._header, record)
        if self._comparison is not None and not self._is_decided:
            for record in records:
                self._compare(self._comparison, record, may_raise=may_raise)

    def _append(self, data: bytes) -> None:
        if self._file is not None:
            try:
                self._file.append(data)
            except OSError as error:
                self._switch_off(error)

    def _switch_off(self, error: OSError) -> None:
        warn("RK-812", "the journal is off: repeated steps are no longer compared: %s", error)
        self._end()

    @property
    def _late(self) -> Sequence[LateCopies]:
        return self._losses, self._weights.late

    def _late_records(self) -> list[Record]:
        if not any(self._late):
            return []
        losses = ((step, float(host)) for step, host in self._losses.arrived())
        found = [Record(step, loss=loss, has=Has.LOSS, kind=LOSS) for step, loss in losses]
        return [*found, *self._weights.arrived()]

    # ---------------------------------------------------------------- comparing

    def _compare(self, comparison: Comparison, record: Record, *, may_raise: bool) -> None:
        difference = comparison.add(record)
        if difference is not None:
            self._is_decided = True
            self._report(difference, may_raise=may_raise)
        elif record.step > comparison.last_step and not self._waits_for(comparison.last_step):
            self._log_verdict()

    def _waits_for(self, step: int) -> bool:
        return any(each.waits_for(step) for each in self._late)

    def _report(self, difference: Difference, *, may_raise: bool) -> None:
        header = self._header
        rank = f"rank {header.rank}, " if header.world_size > 1 else ""
        if self._raises and may_raise:
            raise DivergenceError(
                f"{rank}step {difference.step}: {difference.kind}",
                found=difference.now,
                expected=f"{difference.then}, as {difference.source} had",
                remedy="The resume was not exact. Find the cause with `resumekit prove`, or pass "
                "on_divergence='warn'",
            )
        warn("RK-811", "%s%s. Not exact: see `resumekit prove`", rank, difference)

    def _log_verdict(self) -> None:
        comparison = self._comparison
        if comparison is None or self._is_decided:
            return
        self._is_decided = True
        if not self._header.rank:
            verdict = comparison.verdict
            log = logger.info if verdict.num_steps else logger.debug
            log("%s", verdict)
