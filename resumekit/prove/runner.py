"""``prove``: runs a training command uninterrupted and killed, and says whether they are one."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from resumekit.cadence import parse_cadence
from resumekit.errors import ConfigurationError, ProveError
from resumekit.launcher import option_against_environment, refuse_launched
from resumekit.prove.attaching import (
    default_cadence,
    possible_saves,
    require_attached,
    require_stock,
    require_trainer,
    steps_to_interrupt,
)
from resumekit.prove.comparison import constant_components, constant_leaves, last_digests
from resumekit.prove.execution import FinishedRun, Plan, execute_uninterrupted, failure_of_recorder
from resumekit.prove.kills import Kill, chosen_points, first_saved, kill_instants, require_reached
from resumekit.prove.result import ProveResult
from resumekit.prove.trials import Trials
from resumekit.prove.workspaces import workspace_of
from resumekit.record.moments import (
    CHECKPOINT,
    STEP,
    TracedProcess,
    find_trace,
    records_of,
    steps_of,
)
from resumekit.record.trace import KillPoint

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
    relaunch: Sequence[str] = (),
    with_resumekit: bool = False,
    save_every: int | str | None = None,
    digest_every: int = 1,
    tolerance: float | None = None,
    timeout_seconds: float = 3600.0,
    on_event: Callable[[str], None] = lambda line: None,
) -> ProveResult:
    """Whether a training command resumes exactly, found out by killing it.

    Runs the command once uninterrupted, and once with every process killed by SIGKILL, at random
    instants or at chosen points, and launched again with the same words; then compares the two
    traces and what a recorder saw of each step. The command's own run directories are not touched:
    a ``Checkpointer`` is relocated, another script puts ``{dir}`` where it writes to, and without
    it each run works in a copy of the working directory.

    Args:
        command: program and arguments, e.g. ``["python", "train.py"]``.
        kills: how often the second run is killed at a random instant; 5 without it.
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
        relaunch: the command of each launch after a kill, if it is another one; ``{latest}`` in it
            is the newest file or directory that is named like a checkpoint.
        with_resumekit: attach a ``ResumeCallback`` to each Trainer of the killed runs, as
            ``resumekit run`` does. The uninterrupted run stays without it, except for ``inject``,
            which needs a run with the same components.
        save_every: of that callback: steps, or a duration such as ``"10min"``; a tenth of the
            steps without it.
        digest_every: the recorder digests states at every n-th step only.
        tolerance: the largest relative difference of a loss, for operations that do not repeat;
            states are then not compared. It is stated in the verdict.
        timeout_seconds: the longest that one launch may take.
        on_event: called with one line whenever something happened.

    Raises:
        ConfigurationError: an argument is wrong, or the program is not there.
        CommandFailedError: the command fails without being killed.
        CommandTimeoutError: a launch did not end in time.
        KillPointNotReachedError: the command never reaches one of the chosen points.
        ProveError: the command writes no trace, is too short, or ends before a kill can hit; or
            there is nothing to attach a callback to.
    """
    refuse_launched(os.environ, "resumekit prove")
    points = chosen_points(at, kills=kills, seed=seed)
    num_kills = _KILLS if kills is None else kills
    _check_numbers(num_kills, digest_every, tolerance, is_control=inject is not None)
    _check_attaching(with_resumekit, save_every, relaunch)
    if inject is not None:
        num_kills = _KILLS_WITH_INJECTION
    if not points and seed is None:
        seed = _SEED
    plan = Plan(
        tuple(command),
        world,
        timeout_seconds,
        step_seconds=0.0,
        on_event=on_event,
        digest_every=digest_every,
        tolerance=tolerance,
        relaunch=tuple(relaunch),
        workspace=workspace_of([*command, *relaunch], Path.cwd(), is_stock=with_resumekit)
        if command
        else None,
        with_resumekit=with_resumekit,
        follows_records=with_resumekit,
    )
    with _workplace(keep) as directory:
        plan, followed = _prepared(plan, directory, save_every, is_control=inject is not None)
        chosen = _kills(plan, followed, points, num_kills, random.Random(seed))
        attempts = followed.get(0, ())
        steps, constant = _steps(attempts), constant_leaves(attempts)
        kept = constant_components(attempts) if inject == EVERY_COMPONENT else frozenset()
        runs = Trials(plan, directory, constant, chosen, steps[-1], unchanging=kept)
        trials = tuple(map(runs.run, _injected_components(inject, attempts)))
        result = ProveResult(
            command=plan.command,
            world=world,
            at=tuple(map(str, points)),
            seed=seed,
            num_kills_asked=len(chosen),
            num_steps=len(steps),
            reference_seconds=runs.reference.seconds,
            reference_digests=last_digests(attempts, excluded=constant),
            trials=trials,
            is_recorded=plan.follows_records,
            save_every=plan.save_every,
        )
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    return result


def _check_numbers(
    num_kills: int, digest_every: int, tolerance: float | None, *, is_control: bool
) -> None:
    if num_kills < 1:
        raise ConfigurationError(
            "kills",
            found=str(num_kills),
            expected="1 or more",
            remedy="A run that nobody kills shows nothing about a resume",
        )
    if tolerance is not None and (tolerance <= 0 or is_control):
        raise ConfigurationError(
            "tolerance", found=str(tolerance), expected="more than 0, and no injection"
        )
    if digest_every < 1:
        raise ConfigurationError("digest_every", found=str(digest_every), expected="1 or more")


def _check_attaching(
    with_resumekit: bool, save_every: int | str | None, relaunch: Sequence[str]
) -> None:
    if save_every is not None and not with_resumekit:
        raise ConfigurationError(
            "save_every",
            found=f"{save_every} without with_resumekit",
            expected="the cadence of an attached callback",
            remedy="Add --with-resumekit",
        )
    parse_cadence(save_every)
    if with_resumekit and relaunch:
        raise ConfigurationError(
            "relaunch",
            found="given together with with_resumekit",
            expected="the same command after a kill, which resumes by the attached callback",
            remedy="Leave --relaunch out",
        )


def _prepared(
    plan: Plan, directory: Path, save_every: int | str | None, *, is_control: bool
) -> tuple[Plan, dict[int, tuple[TracedProcess, ...]]]:
    """The plan of the trials, and what counts the steps of its uninterrupted run, by rank.

    Args:
        plan: of the uninterrupted run.
        directory: for the files of all runs.
        save_every: of an attached callback, if the user gave it.
        is_control: whether components are left out.
    """
    plan.on_event("the run that nobody kills")
    if not plan.with_resumekit:
        return _with_reference(plan, directory / "reference")
    stock, followed = _with_reference(plan, directory / ("stock" if is_control else "reference"))
    every = save_every or default_cadence(len(_steps(followed.get(0, ()))))
    plan = replace(stock, save_every=every)
    plan.on_event(f"from here on with resumekit, which saves {parse_cadence(every)}")
    if not is_control:
        return plan, followed
    plan.on_event("the run that nobody kills, with resumekit")
    return _with_reference(replace(plan, follows_records=False), directory / "reference")


def _with_reference(
    plan: Plan, directory: Path
) -> tuple[Plan, dict[int, tuple[TracedProcess, ...]]]:
    """The plan with its uninterrupted run, and what counts the steps of that run, by rank."""
    is_stock = plan.with_resumekit and plan.save_every is None
    check = partial(require_trainer, command=str(plan), on_event=plan.on_event)
    reference = execute_uninterrupted(plan, directory, on_first_step=check if is_stock else None)
    followed, follows_records = _followed(reference, plan)
    if is_stock:
        require_stock(find_trace(reference.trace).get(0, ()), str(plan))
    elif plan.with_resumekit:
        require_attached(reference.attached, str(plan), plan.on_event)
    attempts = followed.get(0, ())
    has_saved = first_saved(attempts) is not None
    plan = replace(
        plan,
        step_seconds=_step_seconds(attempts),
        reference=reference,
        follows_records=follows_records,
        awaits_checkpoint=not has_saved
        and (plan.with_resumekit or reference.has_stock_checkpoints),
    )
    return plan, followed


def _kills(
    plan: Plan,
    followed: Mapping[int, Sequence[TracedProcess]],
    points: Sequence[KillPoint],
    num_kills: int,
    rng: random.Random,
) -> Sequence[Kill]:
    """The chosen points, all of which the run reaches; without any, random instants.

    Args:
        plan: with its uninterrupted run.
        followed: what counts the steps of that run, by rank.
        points: that the user chose.
        num_kills: how many instants.
        rng: the source of the instants.
    """
    attempts = followed.get(0, ())
    steps, every = _steps(attempts), plan.save_every
    if points:
        saves = () if every is None else possible_saves(steps, every)
        require_reached(points, followed, str(plan), saves=saves)
        return points
    if every is not None:
        steps = steps_to_interrupt(steps, every, num_kills, str(plan))
    return kill_instants(steps, num_kills, first_saved=first_saved(attempts), rng=rng)


def _injected_components(
    inject: str | None, attempts: Sequence[TracedProcess]
) -> tuple[str | None, ...]:
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


def _followed(run: FinishedRun, plan: Plan) -> tuple[dict[int, tuple[TracedProcess, ...]], bool]:
    """What counts the steps of a command, by rank, and whether the recorder wrote it.

    A script's trace comes first: it has the script's own step numbers and checkpoints.
    """
    traced, recorded = find_trace(run.trace), find_trace(run.records)
    failure = failure_of_recorder(run.records)
    if failure:
        plan.on_event(f"the recorder stopped, nothing it saw is compared: {failure}")
    if _steps(traced.get(0, ())) and not plan.follows_records:
        return traced, False
    if _steps(recorded.get(0, ())) and not failure:
        return recorded, True
    found = "trained no step of a torch optimizer or of a DeepSpeed engine"
    remedy = "Call resumekit.trace(step, loss=loss, ...) in each step"
    option = option_against_environment(plan.command)
    if failure:
        found = f"could not be recorded ({failure})"
    elif option:
        found = f"was not recorded: python {option} ignores PYTHONPATH or sitecustomize"
        remedy = f"Leave {option} out"
    raise ProveError(
        str(plan),
        found=found,
        expected="steps to compare",
        remedy=remedy,
    )


def _steps(attempts: Sequence[TracedProcess]) -> list[int]:
    return sorted(set(steps_of(attempts, STEP)))


def _step_seconds(attempts: Sequence[TracedProcess]) -> float:
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
