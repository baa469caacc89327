"""What happens when a loader begins an epoch; at the first one of a launch the resume ends.

``Batches.__next__`` in ``loops.py`` calls ``enter_loop`` at the first fetch of a loop without
``repeat``, then passes the safe point if that loop leads, and calls ``begin`` for each epoch.
``begin`` comes first where a loader has to see its end (``_see_end``), and where a framework begins
an epoch early (``prime``). Other fetches call nothing here. The first ``begin``:

1. ``restore_again``: what code has changed since the loop began is restored again: lines of the
   script; hooks of a framework, of each start and, where they come before this, of the epoch.
2. The loader takes its position, and the RNG state is set: inside an epoch in this order; where an
   epoch starts the RNG state and 3 come first, because the loader draws from it.
3. States that are ``AfterRng`` are set, the trackers continue, and the run is ``Running``.
4. ``Batches`` gives the loop's variables back, then fetches the batch.

In a loop over ``epochs()``, where the checkpoint was made between two epochs, ``Loop.open_epoch``
does 1 and 3 and sets the RNG state before it gives the number of the epoch. The loader still takes
its position in its own first ``begin``.
"""

from __future__ import annotations

from typing import Any

from resumekit.capture.ddp_buckets import GradientBuckets
from resumekit.capture.nested_state import live_load
from resumekit.data.position import Feed
from resumekit.run.garbage_collector import collector_paused
from resumekit.run.run import Loaded, RunState
from resumekit.state import AfterRng, states_of


@collector_paused()
def enter_loop(run: RunState, owner: Any, feed: Feed) -> None:
    """A loop requests its first batch; ``Batches.prime`` may have called ``begin``. Collective.

    Until the first batch of a launch, what is new in the user state joins the baseline of changes.
    """
    run.owned.follow(feed, streams=False)
    run.variables.enter(owner)


def begin(run: RunState, feed: Feed, epoch: int) -> None:
    """Begins or continues an epoch of a loader, at the random state that it needs. Collective.

    Raises:
        InexactError: ``strict=True`` and a part would not be restored exactly. It and
            DataPositionError may be of one rank; the others wait in their next collective.
        RankDisagreementError: ranks with fewer batches would wait where others save.
        DataPositionError: the loader cannot be moved to its position.
        StateMismatchError, IncompleteLoadError: as of ``restore_again``.
    """
    if any(each.requires_equal_batches for each in states_of(run.components, GradientBuckets)):
        run.world.require_equal(
            "batches of an epoch:",
            {feed.name: feed.num_batches},
            remedy="A save needs all ranks: give them as many batches each, without join()",
        )
    restore_again(run)
    run.reporter.log_changed_loaders()
    run.owned.follow(feed, streams=True)  # also the objects that its streams read
    run.reporter.announce()  # logs a fresh start once, and what is inexact once
    run.rng.begin(feed, epoch, lambda: restore_random(run))


@collector_paused()
def restore_again(run: RunState) -> None:
    """Restores once more what other code has changed since the loop began; once. Collective.

    Compares digests, and reads the checkpoint only where one differs. Does nothing after a fresh
    start. States that are ``AfterRng``, the data position and the RNG state are no part of it; nor
    are those of a framework's own loop and callbacks, unless they are plain attributes.

    Raises:
        InexactError: ``strict=True``, and a component still differs after it was restored again.
        StateMismatchError: an object was rebuilt, so that it refuses its state.
        IncompleteLoadError: the checkpoint cannot be read any more.
    """
    if isinstance(run.phase, Loaded) and run.phase.restored is not None:
        run.in_flight.wait_for_own()  # a save before the loop has its copy in that memory
        run.reporter.log_restored_again(*run.phase.restored.restore())
        run.phase.restored = None


def restore_random(run: RunState) -> None:
    """Sets the RNG state and the states that are ``AfterRng``, where they wait to be set.

    Called whenever an epoch begins, of a loader or of ``epochs()``, and by ``end_resume``; the
    first call ends the resume.
    """
    for message in run.rng.restore():
        run.reporter.log(message)
    for component in run.components:
        if isinstance(component.stateful, AfterRng):
            with live_load(component.key):
                component.stateful.after_rng_restore()
    if isinstance(run.phase, Loaded):
        run.phase = running = run.phase.running
        if not (run.is_driven and run.counters.finished):  # a framework logs at its end, too
            run.continue_trackers()
        if running.parent is not None:
            run.trace_state("resumed", running.parent)


def end_resume(run: RunState) -> None:
    """Ends the resume where no batch does; no loader is moved. Collective."""
    if isinstance(run.phase, Loaded):
        restore_again(run)
        restore_random(run)
