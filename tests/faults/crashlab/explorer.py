"""Recovers from every crash state of a recorded job and says where a promise was broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from crashlab.crashes import CrashModel, CrashState, Renames
from crashlab.disk import Disk
from crashlab.jobs import Job, Loaded, Promise, read_all
from crashlab.recording import RUN, Recording
from resumekit.errors import CheckpointError, ResumekitError
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store

_SAVES_ON = "0123"  # first digits of the states after which a save is tried: every fourth


@dataclass
class Findings:
    """What explorations saw.

    Args:
        cases: the unique disks that were recovered from, each with what had been promised.
        violations: the broken promises; none is the only good number.
    """

    cases: set[tuple[str, object]] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    @property
    def num_states(self) -> int:
        """Unique disks."""
        return len({key for key, _ in self.cases})


def explore(
    job: Job,
    *,
    limit: int = 32,
    renames: Renames = Renames.ATOMIC,
    findings: Findings | None = None,
    enough: int | None = None,
    possible: Callable[[frozenset[int]], bool] = lambda done: True,
) -> Findings:
    """Crashes a recorded job at every instant in every way, and recovers each time.

    Args:
        job: it has done what it does.
        limit: see ``CrashModel``.
        renames: what a power cut may do to a rename.
        findings: of earlier explorations; their cases are not tried again.
        enough: stop at this many violations.
        possible: whether these calls can have been made when the machine stops.
    """
    findings = Findings() if findings is None else findings
    for promise, state in cases(job, limit=limit, renames=renames, seen=findings.cases):
        if not possible(state.done):
            continue
        for violation in violations(job, promise, state, renames):
            findings.violations.append(f"{violation}\n  {_story(job, state)}")
        if enough is not None and len(findings.violations) >= enough:
            break
    return findings


def cases(
    job: Job, *, limit: int, renames: Renames, seen: set[tuple[str, object]]
) -> Iterator[tuple[Promise, CrashState]]:
    """Every disk that a crash may leave, with what had been promised then; each pair once."""
    for state in CrashModel(job.recording, limit=limit, renames=renames).states():
        promise = promise_at(job, state)
        case = (state.key, promise.identity)
        if case not in seen:
            seen.add(case)
            yield promise, state


def promise_at(job: Job, state: CrashState) -> Promise:
    """What the job could count on when the machine stopped."""
    for promise in reversed(job.promises[1:]):
        before = job.recording.operations[: promise.num_calls]
        if all(index in state.done for index, call in enumerate(before) if call.rank == 0):
            return promise
    return job.promises[0]


def violations(
    job: Job, promise: Promise, state: CrashState, renames: Renames = Renames.ATOMIC
) -> Iterator[str]:
    """The promises that recovery from this state breaks.

    Args:
        job: that was crashed.
        promise: what it could count on.
        state: what is left of its disk.
        renames: where they are not atomic, a directory on its way may be lost or survive in part;
            what had been promised about checkpoints holds all the same.
    """
    again = relaunch(job, promise, state)
    try:
        again.start()
        loaded = again.load_newest()
    except ResumekitError as error:
        yield f"the directory cannot be used: {error}"
        return
    broken = dict(loaded.passed_over)
    yield from _about_loaded(job, promise, loaded)
    yield from _about_others(job, promise, loaded, again.stores[0], broken)
    yield from _about_copies(promise, again.recording.disk)
    if renames is Renames.ATOMIC:
        yield from _about_parts(promise, broken)
    is_atomic = renames is not Renames.SPLIT and not job.is_in_place
    promised = promise.damaged if is_atomic else promise.aside
    yield from _about_damaged(promised, again.stores[0])
    if promise.run_id not in (None, again.stores[0].run_id):
        yield "the run continues under another id"
    if state.key[0] in _SAVES_ON:
        yield from _about_next_save(again, loaded)


def relaunch(job: Job, promise: Promise, state: CrashState) -> Job:
    """The same command on what the crash has left."""
    again = Job(Recording.on(state.disk), job.world_size, job.policy, is_in_place=job.is_in_place)
    again.continues(job, promise)
    return again


def _about_copies(promise: Promise, disk: Disk) -> Iterator[str]:
    """Damage of one file must not reach all checkpoints that are kept."""
    inodes: dict[str, list[int]] = {}
    for name, content in promise.kept.items():
        for path in content:
            with suppress(FileNotFoundError):  # that is said elsewhere
                inodes.setdefault(path, []).append(disk.find(RUN / str(name) / path))
    for path, found in inodes.items():
        if len(found) > 1 and len(set(found)) == 1:
            yield f"{path} of {len(found)} kept checkpoints is one copy"


def _about_parts(promise: Promise, broken: dict[StepName, CheckpointError]) -> Iterator[str]:
    for name, error in broken.items():
        if name not in promise.damaged:
            yield f"{name} is there in part: {error}"


def _about_damaged(promised: frozenset[StepName], store: Store) -> Iterator[str]:
    there = [str(name) for name in store.step_names()] + store.quarantined()
    for name in promised:
        if not any(each.startswith(str(name)) for each in there):
            yield f"{name} was damaged, and has vanished without a trace"


def _about_loaded(job: Job, promise: Promise, loaded: Loaded) -> Iterator[str]:
    name = loaded.name
    if promise.newest is not None and (name is None or name < promise.newest):
        reasons = "; ".join(str(error) for error in loaded.passed_over.values())
        yield f"{promise.newest} was saved, {name} is loaded ({reasons})"
    if name is not None and loaded.content != job.attempted.get(name):
        yield f"{name} is loaded with content that was never saved under that name"


def _about_others(
    job: Job,
    promise: Promise,
    loaded: Loaded,
    store: Store,
    broken: dict[StepName, CheckpointError],
) -> Iterator[str]:
    for name in {*store.step_names(), *promise.kept} - {loaded.name}:
        try:
            if read_all(store, name) != job.attempted.get(name):
                yield f"{name} passes for a checkpoint that was never saved"
        except CheckpointError as error:
            if name in promise.kept:
                yield f"{name} was kept, and is not usable: {error}"
            broken[name] = error


def _about_next_save(again: Job, loaded: Loaded) -> Iterator[str]:
    """Recovery must leave a directory in which training can continue."""
    try:
        name = again.save((loaded.name or StepName(0)).step + 1)
        if read_all(again.stores[0], name) != again.attempted[name]:
            yield f"the next save, {name}, is not what it should be"
    except ResumekitError as error:
        yield f"the next save fails: {error}"


def _story(job: Job, state: CrashState) -> str:
    last = max(state.done, default=-1)
    call = job.recording.operations[last].call if state.done else "nothing"
    return f"{len(state.done)} calls made, the last: {call}; lost: {', '.join(state.lost) or '-'}"
