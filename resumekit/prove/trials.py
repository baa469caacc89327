"""Trials: runs that are killed and relaunched, each compared with one uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resumekit.errors import CommandFailedError, KillPointNotReachedError, ProveError, TraceError
from resumekit.prove.attaching import require_attached, require_save
from resumekit.prove.causes import Cause, find_first_causes
from resumekit.prove.comparison import Leaf, compare, last_digests
from resumekit.prove.execution import (
    FinishedRun,
    Plan,
    execute,
    execute_uninterrupted,
    failure_of_recorder,
)
from resumekit.prove.kills import Kill
from resumekit.prove.result import Outcome, Trial, Verdict
from resumekit.record.moments import find_trace, read_recordings, read_trace
from resumekit.record.trace import KillPoint

# A relaunch did something else than the uninterrupted run.
_EXPLAINED = (Outcome.DIVERGED, Outcome.RESTARTED, Outcome.CAUGHT, Outcome.MISNAMED)

_WITHOUT_DIFFERENCE = (
    Outcome.EXACT,
    Outcome.WITHIN_TOLERANCE,
    Outcome.MISSED,
    Outcome.NO_EFFECT,
)


@dataclass(frozen=True)
class Trials:
    """Trials against one uninterrupted run.

    Args:
        plan: what to launch.
        directory: for the files of all runs.
        constant: leaves that may differ between runs.
        kills: of each trial.
        last_step: of the uninterrupted run.
        unchanging: components that are always as at the start; without them nothing differs.
    """

    plan: Plan
    directory: Path
    constant: frozenset[Leaf]
    kills: Sequence[Kill]
    last_step: int
    unchanging: frozenset[str] = frozenset()

    @property
    def reference(self) -> FinishedRun:
        """The uninterrupted run."""
        assert self.plan.reference is not None
        return self.plan.reference

    def run(self, component: str | None) -> Trial:
        """One killed run, with or without a component left out, and its verdict."""
        what = "killed" if component is None else f"without-{component.replace('/', '-')}"
        self.plan.on_event(f"the run that is {what.replace('-', ' ')}")
        run = execute(self.plan, self.directory / what, kills=self.kills, inject=component)
        num_kills = sum(launch.was_killed for launch in run.launches)
        if self.plan.save_every is not None:
            self._check_attached(run, num_kills)
        traced = None
        if not self.plan.follows_records:
            traced = self._verdict(self.reference.trace, run.trace, run, num_kills > 0)
        failures = map(failure_of_recorder, (self.reference.records, run.records))
        recorder_failure = next(filter(None, failures), "")
        recorded = None
        if component is None and not recorder_failure:
            recorded = self._recorded(run, num_kills)
        # The script's trace names its steps and states; the recorder sees more of them.
        verdict = traced if traced is not None and not _is_outdone(traced, recorded) else recorded
        runs = (self.reference, run)
        seen = [each.records if verdict is recorded else each.trace for each in runs]
        if verdict is not None and self.plan.save_every is not None:
            verdict = self._verdict_on_attached(verdict)
        outcome = _outcome(component, verdict, run.failure)
        if outcome is Outcome.MISSED and component in self.unchanging:
            outcome = Outcome.NO_EFFECT
        trial = Trial(
            injected=component,
            outcome=outcome,
            verdict=verdict,
            failure=run.failure,
            launches=run.launches,
            num_left_behind=run.num_left_behind,
            digests=self._digests(run) if verdict else {},
            recorded=recorded,
            recorder_failure=recorder_failure,
            causes=_likely_causes(*seen) if outcome in _EXPLAINED else (),
        )
        if outcome in _WITHOUT_DIFFERENCE:
            self._require_kills(num_kills)
            self._require_resume(verdict)
        self.plan.on_event(outcome.value)
        return trial

    def _check_attached(self, run: FinishedRun, num_kills: int) -> None:
        """A run to which nothing was attached, or that saved nothing, is no proof of resumekit."""
        command = str(self.plan)
        if run.failure and not num_kills:
            found = f"failed with resumekit attached before it was killed, {run.failure}"
            raise CommandFailedError(command, found=found)
        require_attached(run.attached, command, self.plan.on_event)
        killed = [launch.number for launch in run.launches if launch.was_killed]
        attempts = [each for rank in find_trace(run.trace).values() for each in rank]
        if killed:
            require_save([each for each in attempts if each.launch in killed], command)

    def _verdict_on_attached(self, verdict: Verdict) -> Verdict:
        """The verdict; a difference before the first kill is the script's or the callback's."""
        if not self.plan.follows_records:
            return verdict  # the uninterrupted run has the callback, too
        notes = verdict.notes
        if find_trace(self.reference.trace):
            notes = (*notes, "what the script records by resumekit.trace() is not compared")
        verdict = replace(verdict, with_resumekit=True, notes=notes)
        if verdict.is_reproducible:
            return verdict
        self.plan.on_event("the run that nobody kills, once more: is the script reproducible?")
        stock = replace(self.plan, save_every=None)
        again = execute_uninterrupted(stock, self.directory / "again")
        same = compare(
            self.reference.records,
            again.records,
            expect_resume=False,
            tolerance=self.plan.tolerance,
        )
        return replace(verdict, is_changed_by_attaching=same.exact)

    def _require_kills(self, num_kills: int) -> None:
        """A run that was not killed as it should have been is no proof."""
        missed = self.kills[num_kills:]
        if missed and isinstance(missed[0], KillPoint):
            raise KillPointNotReachedError(
                str(self.plan),
                found=f"the killed run never reached {missed[0]}",
                expected="one launch killed at each point, in the given order",
            )
        if self.kills and not num_kills:
            found = "ended before the first kill could hit"
            raise self._not_tried(found, expected="a run that can be interrupted")

    def _require_resume(self, verdict: Verdict | None) -> None:
        """A run of which no launch continued an earlier one tried no resume, and equals itself."""
        if self.kills and verdict is not None and not verdict.num_resumes:
            found = f"no resume was tried: each kill came after the last step, {self.last_step}"
            raise self._not_tried(found, expected="a kill after a save and before the last step")

    def _not_tried(self, found: str, *, expected: str) -> ProveError:
        is_attached = self.plan.save_every is not None
        remedy = (
            "Save more often (--save-every), or train longer" if is_attached else "Train longer"
        )
        return ProveError(str(self.plan), found=found, expected=expected, remedy=remedy)

    def _digests(self, run: FinishedRun) -> dict[str, str]:
        trace = run.records if self.plan.follows_records else run.trace
        return last_digests(read_trace(trace).get(0, ()), excluded=self.constant)

    def _recorded(self, run: FinishedRun, num_kills: int) -> Verdict | None:
        # A traced run may have resumed after its last step, of which the recorder sees nothing;
        # so may an attached callback that has saved that step.
        expect_resume = self.plan.follows_records and num_kills > 0
        if self.plan.save_every is not None:
            ends = [each.killed_after_step for each in run.launches if each.was_killed]
            expect_resume = expect_resume and any((end or 0) < self.last_step for end in ends)
        return self._verdict(self.reference.records, run.records, run, expect_resume)

    def _verdict(
        self, reference: Path, candidate: Path, run: FinishedRun, expect_resume: bool
    ) -> Verdict | None:
        last_launch = run.launches[-1].number
        try:
            return compare(
                reference,
                candidate,
                expect_resume=expect_resume,
                last_launch=last_launch,
                tolerance=self.plan.tolerance,
            )
        except TraceError:
            return None  # every launch failed before it could write anything


def _likely_causes(reference: Path, judged: Path) -> tuple[str, ...]:
    """One sentence for each component that differs first; consequences are left out."""
    _, findings = find_first_causes(read_recordings(reference), read_recordings(judged))
    return tuple(
        f"{each.component}: {each.cause.value}. {each.evidence}"
        for each in findings
        if each.cause not in (Cause.CONSEQUENCE, Cause.NOT_REPRODUCIBLE)
    )


def _is_outdone(traced: Verdict, recorded: Verdict | None) -> bool:
    """Whether the recorder saw a difference where the script's trace shows none."""
    return traced.exact and recorded is not None and not recorded.exact


def _outcome(component: str | None, verdict: Verdict | None, failure: str) -> Outcome:
    divergence = None if verdict is None else verdict.divergence
    if verdict is not None and not verdict.is_reproducible:
        return Outcome.NOT_REPRODUCIBLE
    if component is not None and divergence is not None:
        named = component in (divergence.component, divergence.slot)
        return Outcome.CAUGHT if named else Outcome.MISNAMED
    if failure or verdict is None:
        return Outcome.FAILED
    if verdict.is_restart:
        return Outcome.RESTARTED
    if component is not None:
        return Outcome.MISSED
    if divergence is not None:
        return Outcome.DIVERGED
    return Outcome.EXACT if verdict.tolerance is None else Outcome.WITHIN_TOLERANCE
