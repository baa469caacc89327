"""Which saves are made at a safe point: those that are due, and the last one before leaving.

Every decision is the same on all ranks: it depends on what the ranks have agreed on, never on how
far this rank's background thread is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from resumekit.cadence import parse_cadence
from resumekit.errors import SaveError
from resumekit.run.run import RunState
from resumekit.run.save import finish, save
from resumekit.run.saving import NOTHING, LeaveSignals, RequestExchange, Requests


class DueSaves:
    """The saves of one run.

    Args:
        run: the run.

    Attributes:
        signals: those that ask the run to leave.
        is_ending: saves are synchronous from now on: nothing follows that they could overlap.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._cadence = parse_cadence(run.options.save_every, run.options.mtbf)
        self._requests = RequestExchange(run.world)
        self._is_requested = False  # by save(), or by an improved metric
        self._is_due = False  # by a number of steps
        self.signals = LeaveSignals(run.options.leave_on)
        self.is_ending = False

    # ---------------------------------------------------------------- what makes a save due

    def request(self) -> None:
        """A save is due, whatever ``save_every`` says."""
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
        """Whether a save is due on all ranks; clocks and signals of one rank do not count yet."""
        return self._is_requested or self._is_due

    def exchange(self, step: int) -> Requests:
        """The all-reduced requests at this step boundary; this rank's are sent. Collective."""
        in_flight = self._run.in_flight
        asks_clock = self._cadence.needs_agreement and self._run.world.is_first
        values = (
            self.signals.received,
            int(asks_clock and self._cadence.is_due(step)),
            int(in_flight.is_busy),
            int(in_flight.has_failed),
        )
        own_requests = Requests(*values) if any(values) else NOTHING
        common = self._requests.receive(own_requests)
        if not common.leave:
            left = own_requests._replace(save=0) if common.save else own_requests
            self._requests.send(left, step)
        return common

    # ---------------------------------------------------------------- how a save is made

    def make(self) -> None:
        """Makes the save that is due, or skips it. Collective.

        Raises:
            SaveError: the save has failed, or the one in flight; unless a failure is only logged.
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
        self._save()

    def _note_skipped(self) -> None:
        self._run.in_flight.num_skipped += 1
        skipped = "skipped, the one before is still being written"
        self._run.reporter.detail(f"the save at step {self._run.counters.step} was {skipped}")

    def _must_skip(self) -> bool:
        """Whether the save in flight is still being written on any rank. Collective."""
        may_skip = self._run.options.on_save_in_flight == "skip"
        if not may_skip or self._run.in_flight.step is None:
            return False
        return bool(self._requests.wait().busy)

    def _save(self) -> None:
        self._requests.wait()
        self.forget()
        run, began = self._run, time.monotonic()
        self._finish()
        with self._tolerated(run.counters.step):
            save(run, in_background=not self.is_ending)
            cost = {
                "blocked_seconds": time.monotonic() - began,
                "background_seconds": run.in_flight.last_seconds,
            }
            self._cadence.saved(**cost)
            run.journal.note_save(run.counters.step, **cost)
            run.reporter.log_interval(self._cadence.chosen)

    def finish(self) -> None:
        """Waits until the save in flight is durable. Collective.

        Raises:
            SaveError: it has failed, unless that is only logged.
        """
        self._requests.wait()
        self._finish()

    def _finish(self) -> None:
        with self._tolerated(self._run.in_flight.step):
            finish(self._run)

    def wait(self) -> None:
        """Waits until the save in flight is durable. Collective.

        Raises:
            SaveError: it has failed.
        """
        self._requests.wait()
        finish(self._run)

    @contextmanager
    def _tolerated(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            if self._run.options.on_save_error == "raise":
                raise
            failed = f"the save at step {step} failed"
            self._run.reporter.warn(f"{failed}, training continues: {error}")
            self._cadence.restart()

    # ---------------------------------------------------------------- before leaving

    def make_before_leaving(self) -> int:
        """Saves this safe point, unless that would take longer than the grace. Collective.

        The save in flight is completed first. Where there is none, nothing is known to be newer
        than the last checkpoint, and the save is made.

        Returns:
            The optimizer step that is saved.
        """
        self.is_ending = True
        run, now = self._run, self._run.counters.progress
        manifest = run.in_flight.manifest
        if manifest is None:
            self._save()
            return now.step
        saved, is_current = manifest.step, manifest.progress["micro_step"] == now.micro_step
        try:
            self.wait()
        except SaveError as error:
            run.reporter.warn(f"the save at step {saved} failed: {error}")
        else:
            if is_current or not self._fits_grace(now.step, saved):
                return saved
        self._save()
        return now.step

    def _fits_grace(self, step: int, saved: int) -> bool:
        """Whether a save at this step ends in time on every rank. Collective."""
        run = self._run
        left = run.options.grace_seconds - self.signals.seconds_since
        seconds = run.in_flight.longest_seconds
        if all(run.world.gather(seconds <= left)):
            return True
        run.reporter.log(
            f"no save at step {step}, step {saved} is saved: a save takes {seconds:.1f} s, "
            f"{max(left, 0.0):.1f} s of grace_seconds={run.options.grace_seconds:g} are left"
        )
        return False
