"""Recovers from every crash state of a recorded job and says where a promise was broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from crashlab.crashes import CrashModel, CrashState
from crashlab.jobs import Job, Promise, Recovery, read_all, recover
from resumekit.errors import CheckpointError, ResumekitError
from resumekit.storage import StepName, Store


@dataclass
class Findings:
    """What one exploration saw.

    Args:
        keys: the unique states that were recovered from.
        violations: the broken promises; none is the only good number.
    """

    keys: set[str] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Takes in what another exploration saw."""
        self.keys |= other.keys
        self.violations += other.violations


def explore(
    job: Job,
    *,
    limit: int = 128,
    reader: type[Store] = Store,
    seen: set[str] | None = None,
    stop_at: int | None = None,
    states: Callable[[CrashModel], Iterator[CrashState]] = CrashModel.states,
) -> Findings:
    """Crashes a recorded job at every instant in every way, and recovers each time.

    Args:
        job: it has done what it does.
        limit: see ``CrashModel``.
        reader: the store that recovers.
        seen: states that other explorations recovered from; they are not tried again.
        stop_at: enough violations.
        states: how states are drawn from the model.
    """
    findings = Findings()
    for state in states(CrashModel(job.recording, limit=limit)):
        if seen is not None and state.key in seen:
            continue
        findings.keys.add(state.key)
        for violation in violations(job, state, reader):
            findings.violations.append(f"{violation}\n  {_story(job, state)}")
        if stop_at is not None and len(findings.violations) >= stop_at:
            break
    return findings


def violations(job: Job, state: CrashState, reader: type[Store] = Store) -> Iterator[str]:
    """The promises that recovery from this state breaks."""
    promise = promise_at(job, state)
    try:
        recovery = recover(state.disk, world_size=job.world_size, store_class=reader)
    except ResumekitError as error:
        yield f"the directory cannot be used: {error}"
        return
    yield from _about_loaded(job, promise, recovery)
    yield from _about_kept(job, promise, recovery)
    yield from _about_next_save(recovery)


def promise_at(job: Job, state: CrashState) -> Promise:
    """What the job could count on when the machine stopped."""
    held = Promise(0, None, {})
    for promise in job.promises:
        before = job.recording.operations[: promise.num_operations]
        of_first_rank = {index for index, done in enumerate(before) if done.rank == 0}
        if of_first_rank <= state.done:
            held = promise
    return held


def _about_loaded(job: Job, promise: Promise, recovery: Recovery) -> Iterator[str]:
    loaded = recovery.loaded
    if promise.newest is not None and (loaded is None or loaded < promise.newest):
        reasons = "; ".join(str(error) for error in recovery.passed_over.values())
        yield f"{promise.newest} was saved, {loaded} is loaded ({reasons})"
    if loaded is not None and recovery.content != job.attempted.get(loaded):
        yield f"{loaded} is loaded with content that was never saved under that name"


def _about_kept(job: Job, promise: Promise, recovery: Recovery) -> Iterator[str]:
    store = recovery.job.stores[0]
    for name, expected in promise.kept.items():
        try:
            if read_all(store, name) != expected:
                yield f"{name} holds something else than was saved"
        except CheckpointError as error:
            yield f"{name} was kept, and is not usable: {error}"
    for name in set(store.step_names()) - set(promise.kept):
        try:
            if read_all(store, name) != job.attempted.get(name):
                yield f"{name} passes for a checkpoint that was never saved"
        except CheckpointError:
            continue


def _about_next_save(recovery: Recovery) -> Iterator[str]:
    """Recovery must leave a directory in which training can go on."""
    job = recovery.job
    try:
        name = job.save((recovery.loaded or StepName(0)).step + 1)
        if read_all(job.stores[0], name) != job.attempted[name]:
            yield f"the next save, {name}, is not what it should be"
    except ResumekitError as error:
        yield f"the next save fails: {error}"


def _story(job: Job, state: CrashState) -> str:
    last = max(state.done, default=-1)
    call = job.recording.operations[last].call if state.done else "nothing"
    return f"{len(state.done)} calls made, the last: {call}; lost: {', '.join(state.lost) or '-'}"
