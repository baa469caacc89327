"""``prove``: runs a training command uninterrupted and killed, and says whether they are one."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from resumekit.errors import ConfigurationError, KillPointNotReachedError, ProveError, TraceError
from resumekit.prove.comparison import compare
from resumekit.prove.differences import (
    Leaf,
    constant_components,
    constant_leaves,
    last_digests,
)
from resumekit.prove.execution import (
    FinishedRun,
    Kill,
    Plan,
    chosen_points,
    execute,
    execute_uninterrupted,
    first_saved,
    kill_instants,
    require_reached,
)
from resumekit.prove.result import Outcome, ProveResult, Trial, Verdict
from resumekit.prove.trace_records import (
    CHECKPOINT,
    STEP,
    Attempt,
    read_trace,
    records_of,
    steps_of,
)
from resumekit.tracing import KillPoint

EVERY_COMPONENT = "all"

_KILLS = 5
_SEED = 0

# Random kills of a run in which a component is left out: the first resume shows it.
_KILLS_WITH_INJECTION = 1


def prove(
    command: Sequence[str],
    *,
    kills: int | None = None,
    seed: int | None = None,
    at: Sequence[str] = (),
    world: int = 1,
    inject: str | None = None,
    json_path: Path | None = None,
    keep: Path | None = None,
    timeout_seconds: float = 3600.0,
    on_event: Callable[[str], None] = lambda line: None,
) -> ProveResult:
    """Whether a training command resumes exactly, found out by killing it.

    Runs the command once uninterrupted, and once with every process killed by SIGKILL, at random
    instants or at chosen points, and launched again with the same words; then compares the two
    traces. The command's own run directories are not touched: a ``Checkpointer`` is relocated, and
    a script of its own puts ``{dir}`` where it writes to.

    Args:
        command: program and arguments, e.g. ``["python", "train.py"]``.
        kills: how often the second run is killed at a random instant; 5 without it, 0 compares two
            uninterrupted runs.
        seed: what the instants are drawn from; 0 without it.
        at: points instead of random instants, one launch killed at each of them in this order:
            ``"step:35"``, right after that step was recorded, before it could be saved, or
            ``"checkpoint:40"``, right after that checkpoint was committed.
        world: ranks; more than one starts ``python x.py`` through ``torch.distributed.run``.
        inject: a component key or slot that no relaunch restores (a negative
            control: it must be found and named), or ``"all"`` for each component in turn. Such a
            run is killed once, late, or at the chosen points.
        json_path: where to write the whole answer as JSON.
        keep: an absent or empty directory that keeps files, logs and traces of every run; without
            it they are removed.
        timeout_seconds: the longest that one launch may take.
        on_event: called with one line whenever something happened.

    Raises:
        ConfigurationError: an argument is wrong, or the program is not there.
        CommandFailedError: the command fails without being killed.
        CommandTimeoutError: a launch did not end in time.
        KillPointNotReachedError: the command never reaches one of the chosen points.
        ProveError: the command writes no trace, is too short, or ends before a kill can hit.
    """
    points = chosen_points(at, kills=kills, seed=seed)
    num_kills = _KILLS if kills is None else kills
    if num_kills < 0:
        raise ConfigurationError("kills", found=str(kills), expected="0 or more")
    if inject is not None:
        num_kills = _KILLS_WITH_INJECTION
    if not points and seed is None:
        seed = _SEED
    plan = Plan(tuple(command), world, timeout_seconds, 0.0, on_event)
    with _workplace(keep) as directory:
        on_event("the run that nobody kills")
        reference = execute_uninterrupted(plan, directory / "reference")
        attempts = _first_rank(reference, plan)
        plan = replace(plan, step_seconds=_step_seconds(attempts))
        chosen: Sequence[Kill] = points
        if points:
            require_reached(points, read_trace(reference.trace), str(plan))
        else:
            chosen = kill_instants(
                _steps(attempts),
                num_kills,
                first_saved=first_saved(attempts),
                rng=random.Random(seed),
            )
        constant = constant_leaves(attempts)
        judge = _Judge(plan, directory, reference.trace, constant, chosen)
        components = _injected_components(inject, attempts)
        trials = tuple(judge.trial(component) for component in components)
        result = ProveResult(
            command=plan.command,
            world=world,
            at=tuple(map(str, points)),
            seed=seed,
            num_kills_asked=len(chosen),
            num_steps=len(_steps(attempts)),
            reference_seconds=sum(launch.seconds for launch in reference.launches),
            reference_digests=last_digests(attempts, excluded=constant),
            trials=_forgiven(trials, attempts) if inject == EVERY_COMPONENT else trials,
        )
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    return result


@dataclass(frozen=True)
class _Judge:
    """Runs trials against one uninterrupted run.

    Args:
        plan: what to launch.
        directory: for the files of all runs.
        reference: the trace of the uninterrupted run.
        constant: leaves that may differ between runs.
        kills: of each trial.
    """

    plan: Plan
    directory: Path
    reference: Path
    constant: frozenset[Leaf]
    kills: Sequence[Kill]

    def trial(self, component: str | None) -> Trial:
        """One killed run, with or without a component left out, and its verdict."""
        what = "killed" if component is None else f"without-{component.replace('/', '-')}"
        self.plan.on_event(f"the run that is {what.replace('-', ' ')}")
        run = execute(self.plan, self.directory / what, kills=self.kills, inject=component)
        num_kills = sum(launch.was_killed for launch in run.launches)
        verdict = self._verdict(run, expect_resume=num_kills > 0)
        trial = Trial(
            injected=component,
            outcome=_outcome(component, verdict, run.failure),
            verdict=verdict,
            failure=run.failure,
            launches=run.launches,
            num_left_behind=run.num_left_behind,
            digests=self._digests(run) if verdict else {},
        )
        if trial.outcome in (Outcome.EXACT, Outcome.MISSED):
            self._require_kills(num_kills)
        self.plan.on_event(trial.outcome.value)
        return trial

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
            raise ProveError(
                str(self.plan),
                found="ended before the first kill could hit",
                expected="a run that can be interrupted",
                remedy="Train longer",
            )

    def _digests(self, run: FinishedRun) -> dict[str, str]:
        return last_digests(read_trace(run.trace).get(0, ()), excluded=self.constant)

    def _verdict(self, run: FinishedRun, *, expect_resume: bool) -> Verdict | None:
        try:
            return compare(
                self.reference,
                run.trace,
                expect_resume=expect_resume,
                last_launch=run.launches[-1].number,
            )
        except TraceError:
            return None  # every launch failed before it could trace anything


def _outcome(component: str | None, verdict: Verdict | None, failure: str) -> Outcome:
    divergence = None if verdict is None else verdict.divergence
    if verdict is not None and not verdict.is_reproducible:
        return Outcome.NOT_REPRODUCIBLE
    if component is not None and divergence is not None:
        named = component in (divergence.component, divergence.slot)
        return Outcome.CAUGHT if named else Outcome.MISNAMED
    if failure or verdict is None:
        return Outcome.FAILED
    if component is not None:
        return Outcome.MISSED
    return Outcome.EXACT if divergence is None else Outcome.DIVERGED


def _forgiven(trials: Sequence[Trial], attempts: Sequence[Attempt]) -> tuple[Trial, ...]:
    """The trials; those not noticed that left out a component which never changes have no effect.

    Leaving out what is still as it was at the start of the run makes no difference to be found.
    """
    constant = constant_components(attempts)
    return tuple(
        replace(trial, outcome=Outcome.NO_EFFECT)
        if trial.outcome is Outcome.MISSED and trial.injected in constant
        else trial
        for trial in trials
    )


def _injected_components(inject: str | None, attempts: Sequence[Attempt]) -> tuple[str | None, ...]:
    if inject is None:
        return (None,)
    records = records_of(attempts, CHECKPOINT)
    present = list(dict.fromkeys(key for record in records for key in record.components))
    if not present:
        raise ConfigurationError(
            "inject",
            found="a run without checkpoints of a Checkpointer",
            expected="a run that saves components through a Checkpointer",
        )
    if inject == EVERY_COMPONENT:
        return tuple(present)
    if inject not in present and inject not in {key.split("/", 1)[0] for key in present}:
        raise ConfigurationError(
            "inject", found=repr(inject), expected=f"one of {', '.join(present)}, or 'all'"
        )
    return (inject,)


def _first_rank(run: FinishedRun, plan: Plan) -> tuple[Attempt, ...]:
    """What rank 0 traced in the uninterrupted run."""
    try:
        attempts = read_trace(run.trace).get(0, ())
    except TraceError:
        attempts = ()
    if not _steps(attempts):
        raise ProveError(
            str(plan),
            found="ended without having traced a step",
            expected="a trace to compare",
            remedy="Use a Checkpointer, or call resumekit.trace(step, loss=loss, ...) in each step",
        )
    return attempts


def _steps(attempts: Sequence[Attempt]) -> list[int]:
    return sorted(set(steps_of(attempts, STEP)))


def _step_seconds(attempts: Sequence[Attempt]) -> float:
    times = [record.time_ns for record in records_of(attempts, STEP)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) / 1e9 if gaps else 0.0


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    """A directory for all runs: the caller's, or one that is removed afterwards."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="resumekit-prove-") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise ConfigurationError(
            str(keep), found="not empty", expected="a directory for these runs alone"
        )
    yield keep.absolute()
