"""Where a run is killed: the places at which a resume goes wrong in a way of its own."""

from __future__ import annotations

from resumekit.errors import ConfigurationError
from resumekit.testing.cells import KillPoint

# The names of the places that ``kill_points`` gives.
KILL_PLACES = (
    "mid-epoch 0",
    "mid-epoch 1",
    "on the boundary",
    "on the last step",
    "after the last save",
    "twice in one epoch",
    "three times",
)

# An epoch needs a step that is neither its first nor its last.
_SHORTEST_EPOCH = 3


def kill_points(
    steps_per_epoch: int, save_every: int, *, num_epochs: int = 2
) -> dict[str, tuple[KillPoint, ...]]:
    """The kill points of one run by the name of the place; the name says what is special there.

    ========================  =====================================================================
    mid-epoch 0               between two saves of the first epoch
    mid-epoch 1               the same in the second: order and random numbers of a later epoch
    on the boundary           an epoch's last checkpoint was committed, nothing of the next is done
    on the last step          the run's last step is done, and nothing of it is saved
    after the last save       all is saved, and the process dies before it can return
    twice in one epoch        the second resume reads what a launch wrote that began mid-epoch
    three times               twice after one and the same save, then at a commit in the next epoch
    ========================  =====================================================================

    Args:
        steps_per_epoch: optimizer steps of one epoch.
        save_every: steps from one save to the next.
        num_epochs: epochs of the whole run.

    Raises:
        ConfigurationError: the epoch has no such places.
    """
    epoch, every = steps_per_epoch, save_every
    if epoch < _SHORTEST_EPOCH or every < 1 or epoch <= every or epoch % every:
        raise ConfigurationError(
            "steps_per_epoch, save_every",
            found=f"{epoch}, {every}",
            expected=f"at least {_SHORTEST_EPOCH} steps, more than one save, the last at the end",
        )
    if num_epochs < 2:
        raise ConfigurationError("num_epochs", found=str(num_epochs), expected="2 or more")
    saved = max(epoch // every // 2, 1) * every  # a save in the middle of an epoch
    middle = saved + (every + 1) // 2
    step, checkpoint = KillPoint.step, KillPoint.checkpoint
    return {
        "mid-epoch 0": (step(middle),),
        "mid-epoch 1": (step(epoch + middle),),
        "on the boundary": (checkpoint(epoch),),
        "on the last step": (step(num_epochs * epoch),),
        "after the last save": (checkpoint(num_epochs * epoch),),
        "twice in one epoch": (
            step(epoch + every + 1),
            step(epoch + min(2 * every + 2, epoch)),
        ),
        "three times": (step(every + 1), step(every + 2), checkpoint(epoch + every)),
    }


def newest_save_before(kill: KillPoint, save_every: int) -> int:
    """The newest step that is saved for certain when a run dies there; 0 when none is."""
    done = kill.number if kill.event == "checkpoint" else kill.number - 1
    return done // save_every * save_every
