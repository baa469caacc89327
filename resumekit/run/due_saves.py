"""Which saves are made at a safe point: those that are due, and the last one before leaving.

``Loop.pass_safe_point`` asks, before the next batch of the loop that leads. A signal is only
recorded when it arrives, see ``preemption.py``. The ranks exchange it at the next safe point that
may save: a step boundary, or with ``mid_accumulation="gradients"`` any batch. They leave there in
one process, one such point later with several ranks: ``make_before_leaving``, then ``Preempted``, a
SystemExit, on every rank. The first fetch of a launch is no such point. A run that finishes first
ends as usual, and the signal has no effect.

Every decision is the same on all ranks: it depends on what the ranks have agreed on, never on how
far this rank's background thread is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from resumekit.cadence import parse_cadence
from resumekit.distributed import World
from resumekit.errors import InsufficientSpaceError, RankDisagreementError, SaveError
from resumekit.run.preemption import LeaveSignals
from resumekit.run.run import RunState
from resumekit.run.save import finish, make_room, save, save_in_memory
from resumekit.storage.directories import StepName

# ---------------------------------------------------------------- all-reduced


class Requests(NamedTuple):
    """What a rank requests; of several ranks' the largest value counts.

    Args:
        leave: the number of a signal that asks the run to leave; 0 when there was none.
        save: 1 when a clock says that a save is due, else 0.
        busy: 1 while a save is being written in the background, else 0.
        failed: 1 when a save in the background has failed, else 0.
        copy: 1 when a clock says that a copy in memory is due, else 0.
    """

    leave: int = 0
    save: int = 0
    busy: int = 0
    failed: int = 0
    copy: int = 0


NOTHING = Requests()


class RequestExchange:
    """Overlapped all-reduce of the ranks' requests; it also checks that they are at one step.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_alone = world.world_size == 1
        self._own_requests = NOTHING  # that a rank alone has sent last
        self._step = 0  # that this rank was at when it last spoke
        self._under_way: Callable[[], list[int]] | None = None

    def receive(self, requests: Requests) -> Requests:
        """The all-reduced requests of the boundary before; in a world of one, its own.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank was at another step there.
        """
        if self._is_alone:
            return requests
        common = self.peek()
        self._under_way = None
        return common

    def send(self, requests: Requests, step: int) -> None:
        """Sends the requests of this rank, which are received at the next boundary. Collective.

        Args:
            requests: of this rank.
            step: the optimizer step that it has done.
        """
        if self._is_alone:
            self._own_requests = requests
        else:
            self._step = step
            self._under_way = self._world.start_max((*requests, step, -step))

    def peek(self) -> Requests:
        """Waits for the all-reduce in progress, and gives what ``receive`` will give.

        That is what was sent last, so it holds for this step boundary. None under way: no requests.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank is at another step.
        """
        if self._under_way is None:
            return self._own_requests
        *common, highest, negated = self._under_way()
        if highest != -negated:
            raise RankDisagreementError(
                "step()",
                found=f"rank {self._world.rank} has done {self._step} steps (all ranks: "
                f"{-negated} to {highest})",
                expected="the same number on all ranks",
                remedy="Call step() once for each optimizer step, on every rank",
            )
        return Requests(*common)


# ---------------------------------------------------------------- which saves are made


class DueSaves:
    """The saves of one run.

    Args:
        run: the run.
        iterators: of its loop, see ``LeaveSignals``.

    Attributes:
        signals: those that ask the run to leave.
        is_ending: saves are synchronous from now on: nothing follows that they could overlap.
    """

    def __init__(self, run: RunState, iterators: Collection[Any]) -> None:
        self._run = run
        self._cadence = parse_cadence(run.options.save_every, run.options.mtbf)
        self._requests = RequestExchange(run.world)
        self._is_requested = False  # by save(), or by an improved metric
        self._is_due = False  # by a number of steps
        self.signals = LeaveSignals(run.options.leave_on, iterators)
        self.is_ending = False

    # ---------------------------------------------------------------- what makes a save due

    def request(self) -> None:
        """A save is due, whatever ``save_every`` says, unless the run has finished."""
        self._is_requested = True

    def count_step(self, step: int) -> None:
        """An optimizer step was counted."""
        replay = self._run.replay
        if replay is not None:
            self._is_requested = replay.saves_after(step)
        elif not self._cadence.needs_agreement:
            self._is_due = self._is_due or self._cadence.is_due(step)

    def forget(self) -> None:
        """Nothing is due any more: a step is half done."""
        self._is_requested = self._is_due = False

    @property
    def is_due(self) -> bool:
        """Whether a save is due on all ranks; without clocks and signals, which are exchanged."""
        return self._is_requested or self._is_due

    def exchange(self, step: int) -> Requests:
        """Gives the requests of all ranks, and sends this rank's for the next boundary. Collective.

        With several ranks they are what was sent at the boundary before: the all-reduce overlaps a
        step. After a signal nothing more is sent.
        """
        in_flight, memory = self._run.in_flight, self._run.memory
        asks_clock = self._cadence.needs_agreement and self._run.world.is_first
        values = (
            self.signals.received,
            int(asks_clock and self._cadence.is_due(step)),
            int(in_flight.is_busy),
            int(in_flight.has_failed),
            int(memory is not None and memory.is_due_by_clock()),
        )
        own_requests = Requests(*values) if any(values) else NOTHING
        common = self._requests.receive(own_requests)
        if not common.leave:
            if common.save:
                own_requests = own_requests._replace(save=0)
            if common.failed:  # which all ranks know now
                own_requests = own_requests._replace(failed=0)
            if common.copy:
                own_requests = own_requests._replace(copy=0)
            self._requests.send(own_requests, step)
        return common

    def copy_to_memory(self, common: Requests) -> None:
        """Copies the state to the memory of the node where that is due. Collective.

        Args:
            common: the requests of all ranks.
        """
        memory, step = self._run.memory, self._run.counters.step
        if memory is None or not memory.is_due(step, clock=bool(common.copy)):
            return
        was_just_saved = self._run.in_flight.step is None and self._newest_step == step
        if self._run.replay is None and not was_just_saved:
            save_in_memory(self._run)

    # ---------------------------------------------------------------- how a save is made

    def make(self) -> None:
        """Makes the save that is due, or skips it. Collective.

        Raises:
            SaveError: the save has failed, or the one in flight; unless training continues after
                it, see ``on_save_error`` and ``on_full``.
        """
        replay = self._run.replay
        if replay is not None and not replay.saves_after(self._run.counters.step):
            self.forget()
            return
        if not self._is_requested and not self.is_ending and self._must_skip():
            if self._is_due:  # a clock stays due, its save is made later
                self._note_skipped()
            self._is_due = False
            return
        self._save(is_last=self.is_ending)

    def _note_skipped(self) -> None:
        self._run.in_flight.num_skipped += 1
        skipped = "skipped, the one before is still being written"
        self._run.reporter.detail(f"the save at step {self._run.counters.step} was {skipped}")

    def _must_skip(self) -> bool:
        """Whether the save in flight is still being written on any rank. Collective."""
        may_skip = self._run.options.on_save_in_flight == "skip"
        if not may_skip or self._run.in_flight.step is None:
            return False
        return bool(self._requests.peek().busy)

    def _save(self, *, is_last: bool) -> None:
        self._requests.peek()
        self.forget()
        run, began = self._run, time.monotonic()
        self.finish(is_last=False)
        self.forget()  # what that has requested
        with self._tolerated(run.counters.step, is_last=is_last):
            save(run, in_background=not self.is_ending)
            cost = {
                "blocked_seconds": time.monotonic() - began,
                "background_seconds": run.in_flight.last_seconds,
            }
            self._cadence.saved(**cost)
            run.journal.note_save(run.counters.step, **cost)
            run.reporter.log_interval(self._cadence.chosen)

    def finish(self, *, is_last: bool) -> None:
        """Waits for the save in flight. Collective.

        Args:
            is_last: whether no save can follow.

        Raises:
            SaveError: it has failed, as of ``make``.
        """
        self._requests.peek()
        with self._tolerated(self._run.in_flight.step, is_last=is_last):
            finish(self._run)

    def wait(self) -> None:
        """Waits for the save in flight; a failure is always raised. Collective.

        Raises:
            SaveError: it has failed.
        """
        self._requests.peek()
        finish(self._run)

    @contextmanager
    def _tolerated(self, step: int | None, *, is_last: bool) -> Iterator[None]:
        """Warns of a save in the body that fails, if the options allow that. Collective."""
        try:
            yield
        except SaveError as error:
            run, options = self._run, self._run.options
            is_full = isinstance(error, InsufficientSpaceError) and not is_last
            # A save in the background has not done that itself.
            if is_full and run.world.on_first(lambda: make_room(run)):
                self.request()
            elif not (is_full and options.on_full == "skip") and options.on_save_error == "raise":
                if self.is_ending:
                    run.reporter.warn("RK-841", f"the last save failed{self._then}")
                raise
            run.reporter.warn("RK-841", f"the save at step {step} failed{self._then}: {error}")
            run.selection.forget(step)
            self._cadence.restart()

    @property
    def _then(self) -> str:
        """What follows a save that has failed, in words."""
        if not self.is_ending:
            return ", training continues"
        num_repeated = self._run.counters.step - (self._newest_step or 0)
        newest = self._run.running.latest or "none"
        return f" (newest checkpoint: {newest}, a relaunch repeats {num_repeated} steps)"

    # ---------------------------------------------------------------- before leaving

    def make_before_leaving(self) -> int | None:
        """Makes the last save, which is synchronous. Collective.

        Without a save in flight it is always made, whatever ``grace_seconds`` is. A save in flight
        is completed first, however long that takes. If it has failed, this safe point is saved in
        any case; else unless that save was of it, or on some rank the slowest of the last
        background saves took longer than what is left of the grace.

        Returns:
            The optimizer step of the newest checkpoint; None if there is none.

        Raises:
            SaveError: the last save has failed, as of ``make``. With ``on_full="skip"`` a full disk
                is a warning: the same command continues, as it does after any preemption.
        """
        self.is_ending = True
        run, now = self._run, self._run.counters.progress
        manifest = run.in_flight.manifest
        if manifest is not None:
            saved, is_current = manifest.step, manifest.progress["micro_step"] == now.micro_step
            try:
                self.wait()
            except SaveError as error:
                run.reporter.warn("RK-841", f"the save at step {saved} failed: {error}")
                run.selection.forget(saved)
            else:
                if is_current or not self._fits_grace(now.step, saved):
                    return self._newest_step
        self._save(is_last=False)
        return self._newest_step

    @property
    def _newest_step(self) -> int | None:
        latest = self._run.running.latest
        return None if latest is None else StepName.from_text(latest).step

    def _fits_grace(self, step: int, saved: int) -> bool:
        """Whether a save at this step is expected to end in time on every rank. Collective.

        The grace begins with this rank's signal; a rank without one has all of it.
        """
        run = self._run
        left = run.options.grace_seconds - self.signals.seconds_since
        every = run.world.gather((run.in_flight.longest_seconds, left))
        seconds, left = max(every, key=lambda each: each[0] - each[1])
        if seconds <= left:
            return True
        run.reporter.log(
            f"no save at step {step}, step {saved} is saved: a save takes {seconds:.1f} s, "
            f"{max(left, 0.0):.1f} s of grace_seconds={run.options.grace_seconds:g} are left"
        )
        return False
