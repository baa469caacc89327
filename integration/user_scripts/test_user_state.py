"""User state in attributes, killed by SIGKILL and compared by what the script itself wrote down."""

from __future__ import annotations

import pytest
from preloads import ALL
from user_state_script import train

from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL

KINDS = {"torch": "model/attributes", "trainer": "callbacks/attributes"}


def cell(kind: str) -> Cell:
    return Cell(train, {"kind": kind}, kills=(KillPoint.step(6), KillPoint.step(11)))


def steps(run: Run) -> dict[int, str]:
    """What the last execution of each step did."""
    assert (run.failure, run.missed_kills) == ("", ())
    lines = (run.directory / "training" / "diary").read_text(encoding="utf-8").splitlines()
    return {int(line.split()[0]): line for line in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_continues_exactly(kit: Kit, kind: str) -> None:
    uninterrupted = steps(kit.run_uninterrupted(cell(kind)))
    assert len(uninterrupted) == 12
    assert steps(kit.run_killed(cell(kind))) == uninterrupted


@pytest.mark.parametrize(
    ("kind", "component"), [*KINDS.items(), ("torch", "data/attributes")], ids=str
)
def test_without_the_component_it_does_not(kit: Kit, kind: str, component: str) -> None:
    killed = kit.run_killed(cell(kind), inject=component)
    assert steps(killed) != steps(kit.run_uninterrupted(cell(kind)))
