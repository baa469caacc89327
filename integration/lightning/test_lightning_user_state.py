"""Lightning: objects in attributes of the module and of callbacks, killed by SIGKILL and resumed.

Losses and weights are compared as the script itself wrote them.
"""

from __future__ import annotations

from typing import Any

import pytest
from preloads import LIGHTNING

pytest.importorskip("lightning")

from lightning_user_state_workloads import train

from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.kit import Run

PRELOAD = LIGHTNING

CASES: dict[str, tuple[dict[str, Any], str]] = {  # the options, and the component that holds it
    "a helper object in the module": ({"module": "annealed"}, "model/attributes"),
    "a helper object in a callback": (
        {"module": "plain", "callback": "anneals"},
        "callbacks/attributes",
    ),
    "an attribute that training sets once": (
        {"module": "plain", "callback": "halves"},
        "callbacks/attributes",
    ),
    "a callback whose state lacks a helper object": (
        {"module": "plain", "callback": "forgetful"},
        "callbacks/attributes",
    ),
    "a callback whose hooks lack a helper object": (
        {"module": "plain", "callback": "forgetful hook"},
        "callbacks/attributes",
    ),
    "hyperparameters that training changes": ({"module": "tempered"}, "model/attributes"),
    "a replay buffer, an agent and an environment": ({"module": "dqn"}, "model/attributes"),
}
KILLS = (KillPoint.step(8), KillPoint.step(17))


@pytest.mark.quick("a helper object in the module")
@pytest.mark.parametrize("case", CASES)
def test_objects_in_attributes_continue_exactly(kit: Kit, case: str) -> None:
    cell = Cell(train, CASES[case][0], kills=KILLS)
    assert difference(kit.run_uninterrupted(cell), kit.run_killed(cell)) == ""


@pytest.mark.quick("a helper object in the module")
@pytest.mark.parametrize("case", CASES)
def test_objects_in_attributes_that_are_not_restored_are_caught(kit: Kit, case: str) -> None:
    options, component = CASES[case]
    cell = Cell(train, options, kills=KILLS)
    killed = kit.run_killed(cell, inject=component)
    assert difference(kit.run_uninterrupted(cell), killed)


@pytest.mark.parametrize("kills", [KILLS, (KillPoint.step(13),)])
def test_what_hooks_of_the_start_change_is_restored(kit: Kit, kills: tuple[KillPoint, ...]) -> None:
    cell = Cell(train, {"module": "preparing"}, kills=kills)
    assert difference(kit.run_uninterrupted(cell), kit.run_killed(cell)) == ""


def test_a_hook_that_needs_a_started_fit_is_not_asked_before(kit: Kit) -> None:
    cell = Cell(train, {"module": "stamped"}, kills=KILLS)
    assert difference(kit.run_uninterrupted(cell), kit.run_killed(cell)) == ""


def difference(whole: Run, killed: Run) -> str:
    """What the script wrote otherwise; empty if nothing."""
    assert not killed.failure, killed.failure
    assert not killed.missed_kills
    (expected,) = losses_of(whole)
    first, *relaunches = losses_of(killed)
    if first != expected[: len(first)]:
        return "the launch before the first kill is another training"
    for number, launch in enumerate(relaunches):
        starts = range(1, len(expected) - len(launch) + 1)
        if not any(launch == expected[i : i + len(launch)] for i in starts):
            return f"the losses of relaunch {number}"
    if relaunches[-1][-1] != expected[-1]:
        return "the last loss"
    texts = [(run.directory / "weights.txt").read_text() for run in (whole, killed)]
    return "" if texts[0] == texts[1] else "the weights at the end"


def losses_of(run: Run) -> list[list[str]]:
    """What each launch wrote, a line for each batch."""
    return [path.read_text().splitlines() for path in sorted(run.directory.glob("losses-*.txt"))]
