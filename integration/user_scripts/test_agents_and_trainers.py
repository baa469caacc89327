"""A loop around what another package trains: its agent or engine is found, and resumes exactly."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from preloads import TORCH
from script_judge import Script, ScriptJudge

PRELOAD = TORCH
KINDS = {
    "ppo": "stable_baselines3",
    "dqn": "stable_baselines3",
    "sac": "stable_baselines3",
    "ignite": "ignite",
}


def script(kind: str) -> Script:
    if not find_spec(KINDS[kind]):
        pytest.skip(f"{KINDS[kind]} is not installed")
    return Script("agents_and_trainers.py", ("--kind", kind), kills=(5, 8, 11))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_is_exact(judge: ScriptJudge, kind: str) -> None:
    judge.assert_exact(script(kind))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "component"),
    [
        *(("ppo", "variables"), ("dqn", "variables"), ("sac", "optimizer/actor.optimizer")),
        ("ignite", "data"),
    ],
)
def test_without_a_component_it_differs(judge: ScriptJudge, kind: str, component: str) -> None:
    field = "trained" if kind == "ignite" else "weights"
    judge.assert_differs(script(kind), field, without=component)
