"""One save, in order, from the agreement of the ranks to the commit.

docs/explanation/commit.md has the protocol, docs/reference/format.md the files.

``DueSaves`` calls ``finish``, then ``save``, on every rank at the same safe point.

- Synchronous: each rank writes and syncs its files, then rank 0 commits.
- In the background: all checks, the staging directory, links and a copy of the state are made here,
  and their errors are raised here. Each rank's thread writes the copy, without collectives. Rank
  0's thread waits for the part files of all ranks, at most the agreement's timeout, and commits:
  ``saving/in_flight.py``. The next ``finish`` raises its error; a failure brings that forward.

In both cases rank 0's thread removes the files of old checkpoints afterwards.

A save that fails leaves the previous checkpoint untouched; rank 0 removes the staging directory as
far as it can, and the next save or attempt the rest.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from resumekit.capture.model import frozen_of
from resumekit.errors import DirectoryError, InsufficientSpaceError, SaveError
from resumekit.progress_display import show_progress
from resumekit.run.agreement import ComponentGroups, described
from resumekit.run.garbage_collector import collector_paused
from resumekit.run.run import RunState
from resumekit.run.saving.in_flight import Demand, SaveJob
from resumekit.run.saving.payloads import directory_of, finish_comparing, link, with_frozen
from resumekit.run.saving.snapshot import wait_for_devices
from resumekit.serialization.writing import Payload
from resumekit.state import BeforeSave, CaptureReport, SharingPattern, StateComponent, states_of
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.pipeline import num_threads
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.store import Store
from resumekit.trackers import TRACKERS

# In a manifest's details: the journal's verdict on the steps that the attempt has repeated.
JOURNAL = "journal"


@collector_paused()
def save(run: RunState, *, in_background: bool) -> None:
    """Makes a checkpoint; in the background a copy of the state, see above. Collective.

    No save may be in flight, see ``finish``. With ``on_full="prune"`` it is made again after a full
    disk, while there are old checkpoints to delete.

    Args:
        run: the run, at a safe point.
        in_background: return when the state is copied. The save is synchronous all the same with
            ``async_save=False``, and with ``"auto"`` where the copy does not fit into memory.

    Raises:
        RankDisagreementError: ranks differ in replicated state, components or shards; no file was
            written.
        InexactError: ``strict=True``, and a part would not be restored exactly.
        DivergenceError: a repeated step differs from the journal, and ``on_divergence="raise"``;
            other ranks than the one that finds it may raise RankLostError.
        UnsupportedValueError: a value cannot be stored; nothing was committed.
        InsufficientSpaceError: there is no room; nothing is left of it.
        SharedDirectoryError: a rank does not see what rank 0 has made.
        RankLostError: a rank has died, or does not answer; the checkpoint may be there.
        RankFailedError: with several ranks, an unexpected error on one, e.g. in a ``state_dict()``.
        SaveError: writing failed. Nothing was committed; if only the last sync failed, the
            checkpoint is there, and a power cut may take it.
        OwnershipLostError: another attempt owns the directory now; the checkpoint may be there.
    """
    while True:
        try:
            return _save(run, in_background=in_background)
        except InsufficientSpaceError:
            if not run.world.on_first(lambda: make_room(run)):
                raise


def make_room(run: RunState) -> bool:
    """Whether the oldest checkpoint that is not needed was deleted, see ``on_full``. Rank 0 only.

    Raises:
        SaveError: it could not be removed.
    """
    latest = run.running.latest
    if run.options.on_full != "prune" or latest is None:
        return False
    run.in_flight.wait_for_removal()
    name = run.running.store.prune(run.options.retention, latest=StepName.from_text(latest))
    if name is not None:
        run.reporter.log(f"{name} was deleted: the disk is full, and on_full='prune'")
    return name is not None


def _save(run: RunState, *, in_background: bool) -> None:
    draft = _prepare(run)
    running, world = run.running, run.world
    in_background = in_background and run.options.async_save is not False
    run.in_flight.wait_for_removal()  # on rank 0; one thread at a time changes the store
    payloads = with_frozen(_payloads(run))
    threads = num_threads(running.num_ranks_here)
    # Files of frozen tensors are compared with earlier ones, and linked where they are equal.
    with running.agreed.links.compared(draft.step, payloads, num_threads=threads):
        if in_background:
            finish_comparing(payloads)  # only then is the size of the copy known
        demands = world.gather(run.in_flight.demand(payloads))
        in_background = in_background and run.in_flight.accepts(demands)
        name, staging = _stage(run, running.store, draft.step, demands, in_background=in_background)
        manifest = replace(draft, revision=name.revision)
        number, retention = run.in_flight.next_number(), run.options.retention
        job = SaveJob(world, running.store, staging, payloads, manifest, retention, number)
        try:
            if in_background:
                world.everywhere(lambda: _copy(run, job))
            else:
                _write(run, job)
        except BaseException:
            if world.is_first:
                job.abandon()  # a committed checkpoint is not in staging any more, and stays
            raise
    if in_background:
        run.in_flight.start(job)
    else:
        _committed(run, name, job.files)
        world.on_first(job.retain)  # a SaveError in it is only logged
        run.in_flight.committed(job)
    done = "saving" if in_background else "saved"
    run.reporter.detail(f"{done} step {draft.step} in {run.directory}")
    run.trace_state("checkpoint", is_durable=not in_background)
    run.owned.gradients_saved()


@collector_paused()
def save_in_memory(run: RunState) -> None:
    """Copies the state to the memory of the node; without room, that is off. Collective.

    Args:
        run: the run, at a step boundary; its place in memory is not off.

    Raises:
        ResumekitError: as ``save``, but for what befalls files and directories.
    """
    memory, world, began = run.memory, run.world, time.monotonic()
    assert memory is not None
    draft = _prepare(run)
    payloads = _payloads(run)
    demands = world.gather(run.in_flight.demand(payloads))
    try:
        store = memory.open()
        world.on_first(lambda: memory.check_room(each.num_bytes for each in demands))
        name, staging = _stage(run, store, draft.step, demands, in_background=False)
        manifest, number = replace(draft, revision=name.revision), run.in_flight.next_number()
        job = SaveJob(world, store, staging, payloads, manifest, memory.retention, number)
        try:
            _write(run, job)
        except BaseException:
            if world.is_first:
                job.abandon()
            raise
        world.on_first(memory.remove_unused)
        world.on_first(job.retain_now)
    except (SaveError, DirectoryError) as error:
        memory.turn_off(error)
    else:
        memory.end(draft.step, time.monotonic() - began)
        run.trace_state("checkpoint")


def finish(run: RunState) -> None:
    """Waits until the save in flight is durable, and notes it as the next one's parent. Collective.

    Raises:
        ResumekitError: it has failed, on whichever rank; the previous checkpoint is untouched.
    """
    saved = run.in_flight.finish()
    if saved is not None:
        _committed(run, saved.name, saved.files)
        if run.trace is not None:
            run.trace.durable(saved.name.step)


# ---------------------------------------------------------------- what the manifest says


def _prepare(run: RunState) -> Manifest:
    """Lets the components know of the save, and checks replicas; its draft. Collective."""
    if run.owned.add_late(run.world):  # of state that came into being later, on any rank
        run.running.agreed = run.agree(run.running.agreed.fingerprint)
    wait_for_devices()  # what reads the state next may read values that another stream still copies
    for each in states_of(run.components, BeforeSave):
        run.world.everywhere(each.before_save)
    run.running.agreed.replicas.check_before_save()
    return _draft(run)


def _draft(run: RunState) -> Manifest:
    """The manifest, but for its revision and its files. Collective.

    The ranks add up their counts, and the journal records the random state of the save.

    Its values are of this safe point: the run changes them while a job is in the background.
    """
    running, counters = run.running, run.counters
    data_ranks, agreed = running.data_ranks, running.agreed
    message = run.journal.at_save(counters.step, counters.progress.micro_step)
    messages = counters.fold(run.world, data_ranks, message)
    verdict = run.journal.agree(messages, data_ranks.first_ranks)
    progress = counters.progress
    capture = run.reporter.captured(are_complete=True)
    details = {
        **run.reporter.details(),
        **described(data_ranks),
        **({JOURNAL: verdict} if verdict else {}),
        **({TRACKERS: marks} if (marks := run.tracker_marks()) else {}),
        **run.in_flight.details(),
    }
    records = (_record(each, capture, agreed.membership) for each in run.components)
    return Manifest(
        run_id=running.store.run_id,
        attempt=running.store.attempt,
        step=progress.step,
        revision=0,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        parent=running.latest,
        world_size=run.world.world_size,
        progress=progress.as_dict(),
        finished=counters.finished,
        metric=run.selection.metric_of(progress.step),
        components=tuple(records),
        files=(),
        capture=copy.deepcopy(capture.as_dict()),
        fingerprint=copy.deepcopy(agreed.fingerprint),
        details=copy.deepcopy(details),
    )


def _record(
    component: StateComponent, capture: CaptureReport, membership: ComponentGroups
) -> ComponentRecord:
    assert isinstance(component.sharing_pattern, SharingPattern)
    line = next(line for line in capture.lines if line.key == component.key)
    assert line.fidelity is not None
    return ComponentRecord(
        key=component.key,
        pattern=component.sharing_pattern.value,
        fidelity=line.fidelity.value,
        reason=line.reason,
        directory=directory_of(component),
        writers=membership.writers(component),
        groups=membership.recorded(component),
    )


# ---------------------------------------------------------------- what each rank writes


def _payloads(run: RunState) -> list[Payload]:
    wait_for_devices()  # a state_dict() may read values that another stream still copies
    encoded: list[Payload] = []
    run.world.everywhere(lambda: encoded.extend([*_encode(run), *_files(run)]))
    payloads = [*encoded, *run.running.agreed.shards.payloads()]
    wait_for_devices()  # what a state_dict() has launched; mostly nothing
    return payloads


def _encode(run: RunState) -> list[Payload]:
    rank, membership = run.world.rank, run.running.agreed.membership
    by_directory: dict[str, dict[str, Any]] = {}
    frozen: dict[str, Collection[str]] = {}
    for component in run.components:
        if component.sharing_pattern is SharingPattern.SHARDED:
            continue
        if rank in membership.writers(component):
            directory = directory_of(component)
            states = by_directory.setdefault(directory, {})
            states[component.key] = component.stateful.state_dict()
            if directory == component.key:  # alone in its file, where names have no prefix
                frozen[directory] = frozen_of(component.state)
    return [
        Payload.of_states(directory, rank, states, frozen=frozen.get(directory, ()))
        for directory, states in by_directory.items()
    ]


def _files(run: RunState) -> list[Payload]:
    if not run.world.is_first:
        return []
    return [
        Payload(directory_of(component), run.world.rank, small_files=component.files())
        for component in run.components
        if component.files is not None
    ]


# ---------------------------------------------------------------- how it is written


def _stage(
    run: RunState, store: Store, step: int, demands: Sequence[Demand], *, in_background: bool
) -> tuple[StepName, Callable[[], Staging]]:
    """Rank 0 checks the space and makes the staging directory. Collective.

    Returns:
        The checkpoint's name, and a function that gives the staging directory; where a rank does
        not see the directory it raises SharedDirectoryError.
    """
    directories = sorted({directory_of(component) for component in run.components})
    mine: list[Staging] = []
    # What looks for the staging outlives the run, and must not keep it: the store alone.
    num_parts = run.world.world_size if in_background and run.world.world_size > 1 else 0

    def stage() -> tuple[StepName, str]:
        name = store.next_name(step)
        while not mine:
            try:
                staging = store.stage(
                    name,
                    num_bytes=sum(demand.num_bytes for demand in demands),
                    num_files=sum(demand.num_files for demand in demands) + num_parts,
                    directories=directories,
                    with_parts=num_parts > 0,
                )
                mine.append(staging)
            except InsufficientSpaceError:
                if store is not run.running.store or not make_room(run):
                    raise
        return name, mine[0].name

    name, staging_name = run.world.on_first(stage)
    return name, lambda: mine[0] if mine else store.attach(staging_name)


def _copy(run: RunState, job: SaveJob) -> None:
    link(job.staging(), job.payloads)
    run.in_flight.copy(job.payloads)


def _write(run: RunState, job: SaveJob) -> None:
    total = sum(payload.num_bytes for payload in job.payloads)
    what, first = f"saving {job.name}", run.world.is_first

    def write() -> Sequence[FileEntry]:
        with show_progress(what, total, shown=first) as advance, job.store.observed(advance):
            return job.write()

    written = run.world.everywhere(write)
    run.world.on_first(lambda: job.commit(entry for files in written for entry in files))


def _committed(run: RunState, name: StepName, files: Iterable[FileEntry]) -> None:
    run.running.latest = str(name)
    run.running.agreed.links.committed(name, files)
