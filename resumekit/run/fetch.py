"""The first fetch of a launch, and the begin of each epoch of a loader.

What the script has changed since the load is restored again; then the position in the data and the
RNG state are set, the last act of a resume.
"""

from __future__ import annotations

from typing import Any

from resumekit.capture.ddp_buckets import GradientBuckets
from resumekit.data.position import Feed
from resumekit.run.garbage_collector import collector_paused
from resumekit.run.run import Loaded, RunState
from resumekit.state import AfterRng, states_of


@collector_paused()
def enter_loop(run: RunState, owner: Any, feed: Feed) -> None:
    """A loop asks for its first batch: what the script has made until now is the baseline."""
    run.owned.follow(feed, streams=False)
    run.variables.enter(owner)


@collector_paused()
def begin(run: RunState, feed: Feed, epoch: int) -> None:
    """Begins or continues an epoch of a loader, at the random state that it needs.

    Raises:
        InexactError: ``strict=True`` and a part would not be restored exactly.
        RankDisagreementError: ranks with fewer batches would wait where others save.
    """
    buckets = states_of(run.components, GradientBuckets)
    if any(each.requires_equal_batches for each in buckets):
        run.world.require_equal(
            "batches of an epoch:",
            {feed.name: feed.num_batches},
            remedy="A save needs all ranks: give them as many batches each, without join()",
        )
    restore_again(run)
    run.reporter.log_changed_loaders()
    run.owned.follow(feed, streams=True)
    run.reporter.announce()
    run.rng.begin(feed, epoch, lambda: restore_random(run))


@collector_paused()
def restore_again(run: RunState) -> None:
    """The first fetch of a resume: restores what the script has changed since. Collective.

    Raises:
        InexactError: ``strict=True``, and a component differs all the same.
        StateMismatchError: the script has rebuilt an object, so that it refuses its state.
        IncompleteLoadError: the checkpoint cannot be read any more.
    """
    if isinstance(run.phase, Loaded) and run.phase.restored is not None:
        restored, run.phase.restored = run.phase.restored, None
        run.in_flight.wait_for_own()  # its copy is in the memory of the load
        run.reporter.log_restored_again(*restored.restore())


def restore_random(run: RunState) -> None:
    """Sets the random state, the last act of a resume. A no-op when there is nothing to set."""
    for message in run.rng.restore():
        run.reporter.log(message)
    for each in states_of(run.components, AfterRng):
        each.after_rng_restore()
    if isinstance(run.phase, Loaded):
        run.phase = running = run.phase.running
        if running.parent is not None:
            run.trace_state("resumed", running.parent)


def finish_again(run: RunState) -> None:
    """A finished run was started again: all state is back, and there is nothing to do."""
    restore_random(run)
    run.trace_state("end")
