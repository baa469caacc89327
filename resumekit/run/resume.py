"""One resume, in order: find the newest valid checkpoint, then load it into the live objects.

Entering the user's outermost loop calls ``enter``, then ``accept_horizon``; ``resume`` may have
been called before. An adapter for a framework's loop calls ``find``, ``accept_horizon``, then
``enter``; a loader beside the loop calls ``enter`` alone. What is restored, and when:

1. ``find``: the progress.
2. ``resume``: models, optimizers and the other components.
3. A loader begins, see ``fetch.py``: its position, the RNG state, and states that are
   ``AfterRng``: gradients, user state. Of the latter an adapter may set some before, for hooks
   that come earlier (``UserState.restore_early``). Where ``epochs()`` gives a new epoch, all but
   the position come with it; where the run has finished, as the loop is entered.
4. Before the first batch is given, or with the number of ``epochs()``: the loop's variables.

Every check of what ``resume`` loads passes on every rank before a live object changes. Replicas,
the horizon of a user's loop, the loader's position, the objects that user state needs and the
variables are checked later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from resumekit.capture.fingerprint import differences
from resumekit.capture.gradients import gradient_keys
from resumekit.data.position import saved_batch_size
from resumekit.errors import DriftError
from resumekit.places.copies import Copies
from resumekit.places.memory import remove_memory
from resumekit.record.trace import injected_components
from resumekit.run.agreement import agreed_data_ranks
from resumekit.run.garbage_collector import collector_paused
from resumekit.run.report import ResumeReport
from resumekit.run.resuming.candidates import open_store
from resumekit.run.resuming.compatibility import (
    HORIZON,
    frameworks_in,
    frameworks_of,
    horizon_causes,
    horizon_in_words,
)
from resumekit.run.resuming.finder import Finder, Found, LoadBuffer
from resumekit.run.resuming.loading import Loading, RestoredState
from resumekit.run.resuming.state_origins import StateOrigins
from resumekit.run.run import Agreed, Loaded, Running, RunState, Searched
from resumekit.run.saving.memory import MemoryCopies
from resumekit.state import Slot
from resumekit.storage.manifest import holds_only_weights, lineage_of
from resumekit.storage.store import Store

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@collector_paused()
def find(run: RunState, *, up_to: Callable[[str], int | None] | None = None) -> bool:
    """Takes the run directory, finds the checkpoint, and takes its progress. Collective.

    Does nothing after the first call. A damaged checkpoint is moved aside, and an older one tried.

    Args:
        run: the run.
        up_to: gives for this run's id the newest step to accept, or None for any; rank 0's counts.
            If every checkpoint is newer, the newest one is taken. ``resume_from`` goes before it.

    Returns:
        Whether a checkpoint waits to be loaded: not after a fresh start, nor in a forked run, which
        takes weights alone.

    Raises:
        ResumekitError: the directory cannot be used, or holds checkpoints and none that is valid;
            the ranks have different options. No live object was changed.
    """
    if run.phase is None:
        run.world.require_equal("options", run.options.as_plain())
        copies = Copies(run.options.all_places if run.world.is_first else ())
        store = open_store(run.directory, run.world, run.options, copies)
        try:
            run.phase = searched = _search(run, store, copies, up_to)
        except BaseException:
            store.release()  # no phase has it, so no close() would
            raise
        progress = searched.found and searched.found.states.get(Slot.PROGRESS.value)
        if progress:
            run.counters.load_state_dict(progress)
    return isinstance(run.phase, Searched) and run.phase.found is not None


def _search(
    run: RunState, store: Store, copies: Copies, up_to: Callable[[str], int | None] | None
) -> Searched:
    world, options = run.world, run.options
    left_out = frozenset(options.exclude) | injected_components()
    data_ranks = agreed_data_ranks(world, run.data_parallel_group, run.groups)
    known = () if callable(run.given) else run.components
    membership = run.group_components(known)
    origins = StateOrigins(world, data_ranks, membership, options)
    is_kept = options.async_save is not False
    buffer = LoadBuffer(world, run.in_flight.snapshot, is_kept=is_kept)
    common = (world, store, options, left_out, known, membership, origins, buffer)
    finder = Finder(*common, (*run.checked, *run.components), copies)
    found = finder.find(up_to=None if up_to is None else up_to(store.run_id))
    if world.is_first:
        remove_memory(store.run_id)  # what was newer there is in the run directory now
        run.mirror = copies.start_mirror(store, options.retention)
    weights = found if found is not None and holds_only_weights(found.manifest) else None
    found = None if weights is not None else found
    parent = None if found is None else found.manifest
    return Searched(store, data_ranks, parent, finder, found, weights)


@collector_paused()
def resume(run: RunState, asked: Mapping[str, Any] = _NOTHING) -> ResumeReport:
    """Loads what was found, or starts fresh; once. Collective.

    A further call after an error that has changed nothing tries again.

    Args:
        run: the run.
        asked: the horizon and the batch size of the loop that has the horizon, as far as they are
            known; a DriftError is explained by them.

    Raises:
        StateMismatchError: the checkpoint does not fit the live objects; nothing was changed.
        DriftError: ``randomness``, or what the learning rate was planned for, has changed; nothing
            was changed. Other changed settings are only logged.
        DataPositionError: the former ranks were not at one position; nothing was changed.
        UnsupportedValueError: on a fresh start, a value that a save could not store.
        IncompleteLoadError: the checkpoint has changed during the load; the process has to end.
        RankDisagreementError: ranks have other components; or replicas differ after the load, when
            live objects have changed.
        ConfigurationError: ``per_rank`` names no component.
        ResumekitError: as of ``find``.
    """
    if run.resumed is not None:
        return run.resumed.report
    search = None if run.is_driven else run.discovery  # a framework passes its objects
    if search is not None:
        run.owned.set_given(search.find(run.world, run.reporter))
    find(run)
    searched = run.phase
    assert isinstance(searched, Searched)
    given = search.renamed(searched.found, run.reporter) if search else run.given
    given = given() if callable(given) else given
    saved = () if searched.parent is None else (each.key for each in searched.parent.components)
    run.owned.set_given(given, gradients=gradient_keys(saved))
    run.owned.check_named()
    agreed = run.agree()
    run.phase = loaded = _load(run, searched, agreed, asked)
    searched.found = searched.weights = None  # their states are in the buffer; files stay
    searched.finder.buffer.give_back()
    seed = run.owned.seed
    if seed is not None and seed.value is None:
        seed.value = run.world.broadcast(torch.initial_seed())
    report = loaded.running.report
    may_change = HORIZON in run.options.allow_changes and not run.is_driven
    if not (report.finished and may_change):  # else `accept_horizon` decides and logs it
        run.log_start()
    return report


def _load(run: RunState, searched: Searched, agreed: Agreed, asked: Mapping[str, Any]) -> Loaded:
    """Loads what was found, or starts afresh. Collective."""
    found, restored = searched.found, None
    if found is None:
        report = _start(run, searched, agreed)
    else:
        loading = _loading(run, found, searched, agreed)
        causes = _causes(run, found, asked)
        report = loading.resume(agreed.fingerprint, run.reporter, causes=causes)
        run.owned.gradients_resumed(found.states.keys())
        agreed.replicas.check_after_resume()
        report = replace(report, finished=run.counters.finished)
        restored = RestoredState(loading, is_driven=run.is_driven)
    latest = None if found is None else str(found.name)
    num_here, memory = searched.finder.buffer.num_ranks_here, run.options.memory
    if memory is not None:
        run.memory = MemoryCopies(run.world, memory, searched.store, num_here)
    opened = (searched.store, searched.data_ranks, searched.parent)
    return Loaded(Running(*opened, agreed, report, latest, num_here), restored)


def _start(run: RunState, searched: Searched, agreed: Agreed) -> ResumeReport:
    """A fresh start, perhaps with the weights of another run. Collective."""
    run.world.everywhere(run.owned.check_storable)  # a state may be gathered
    found = searched.weights
    if found is None:
        return ResumeReport(resumed=False)
    _loading(run, found, searched, agreed).load_weights()
    run.reporter.take_history(found.manifest)
    agreed.replicas.check_after_resume()
    return ResumeReport(resumed=False, weights_of=lineage_of(found.manifest)[-1])


def _loading(run: RunState, found: Found, searched: Searched, agreed: Agreed) -> Loading:
    finder = replace(
        searched.finder,
        components=run.components,
        checked=run.components,
        membership=agreed.membership,
        sources=StateOrigins(run.world, searched.data_ranks, agreed.membership, run.options),
    )
    return Loading(found, finder)


def _causes(run: RunState, found: Found, asked: Mapping[str, Any]) -> list[str]:
    """What of the loop was changed that its length follows from."""
    size = saved_batch_size(found.states.get(Slot.DATA.value) or {})
    then = {**run.counters.horizon, "batch_size": size}
    now = {key: value for key, value in asked.items() if then.get(key) and value}
    return horizon_causes(differences({key: then[key] for key in now}, now))


# ---------------------------------------------------------------- the loop begins


def enter(run: RunState, horizon: Mapping[str, int] = _NOTHING, loader: Any = None) -> ResumeReport:
    """Resumes as a loop begins; a later loop of the launch changes nothing. Collective.

    What the script has changed since an earlier ``resume`` is kept. What it changes from here to
    the first fetch is undone there, except after a fresh start.

    Args:
        run: the run.
        horizon: of the loop.
        loader: of the loop that has the horizon, where it is known.
    """
    is_new = run.resumed is None
    report = resume(run, {**horizon, "batch_size": getattr(loader, "batch_size", None)})
    if isinstance(run.phase, Loaded) and run.phase.restored is not None:
        run.phase.restored.enter(is_new=is_new)
    return report


def accept_horizon(
    run: RunState, horizon: dict[str, int], settings: Mapping[str, Any] = _NOTHING
) -> None:
    """Compares the loop's horizon with the checkpoint's, and takes it. Collective.

    Args:
        run: the run.
        horizon: in steps, in epochs or in both.
        settings: the horizon follows from them; by their keys in the fingerprint. A DriftError is
            explained by them.

    Raises:
        RankDisagreementError: ranks have other horizons.
        DriftError: the interrupted run had another one, and ``allow_changes`` does not have it. In
            a user's loop the live objects are loaded already.
    """
    run.world.require_equal(HORIZON, horizon)
    then = run.counters.horizon
    # Frameworks count in steps, in epochs or in both: what both count must agree.
    units = then.keys() & horizon.keys() if _is_from_elsewhere(run) else ()
    is_same = all(then[unit] == horizon[unit] for unit in units) if units else then == horizon
    if then and not is_same:
        before, now = horizon_in_words(then), horizon_in_words(horizon)
        if HORIZON not in run.options.allow_changes:
            parent = None if run.opened is None else run.opened.parent
            saved = {} if parent is None else parent.fingerprint
            common = {key: saved[key] for key in settings if key in saved}
            raise DriftError(
                HORIZON,
                found="; ".join(horizon_causes(differences(common, settings))) or now,
                expected=f"{before}, as in the checkpoint",
                remedy="Restore it, or pass allow_changes={'horizon'}",
            )
        run.reporter.log(f"horizon: was {before} in the checkpoint, the script's {now} is used")
        run.counters.finished = None
    run.log_start()
    run.counters.horizon = horizon


def _is_from_elsewhere(run: RunState) -> bool:
    """Whether another framework may have written the checkpoint."""
    if run.opened is None or run.opened.parent is None:
        return False
    is_known = run.resumed is not None or not callable(run.given)
    return not is_known or frameworks_in(run.components) != frameworks_of(run.opened.parent)
