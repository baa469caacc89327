"""Experts that are sharded by rank, in a model under DDP or FSDP2: killed and resumed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from preloads import TORCH
from script_judge import SCRIPTS, Script, ScriptJudge

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = TORCH

# 5 steps an epoch, saves at 3, 6, .. : each resume repeats two steps.
TRAINING = Script("rank_experts.py", num_ranks=2, kills=(8, 14))
WRAPPERS = pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
OPTION = ("--per-rank", "model,optimizer", "--strict")


def under(wrapper: str, *arguments: str) -> Script:
    return replace(TRAINING, arguments=("--wrapper", wrapper, *arguments))


@pytest.mark.quick("fsdp2")
@WRAPPERS
def test_the_remedies_of_the_errors_make_a_killed_run_exact(
    judge: ScriptJudge, wrapper: str
) -> None:
    named = ""
    for key in ("model", "optimizer"):
        refused = judge.run_uninterrupted(under(wrapper, "--per-rank", named, "--strict"))
        assert any(refused.statuses), "a save without the option was made"
        remedy = re.search(
            rf"RankDisagreementError: {key}: .*\(resumekit run: --per-rank (\w+)\)",
            refused.outputs[0],
        )
        assert remedy, refused.outputs[0][-3000:]
        named = f"{named},{remedy[1]}".strip(",")
    assert named == OPTION[1]
    judge.assert_exact(under(wrapper, *OPTION))


@pytest.mark.quick("model-fsdp2")
@WRAPPERS
@pytest.mark.parametrize("without", ["model", "optimizer"])
def test_without_the_experts_or_their_moments_it_differs(
    judge: ScriptJudge, wrapper: str, without: str
) -> None:
    judge.assert_differs(under(wrapper, *OPTION), without=without)


NAMED: dict[str, object] = {"per_rank": ["model", "optimizer"], "allow_changes": ["world_size"]}


@pytest.mark.full
@WRAPPERS
@pytest.mark.parametrize(
    ("ranks", "options", "found"),
    [
        (4, NAMED, "a job of 4 ranks with one state for each rank, expected 2 ranks with"),
        (2, {}, "a job of 2 ranks with one state for all ranks, expected 2 ranks with"),
    ],
    ids=["more ranks", "no option"],
)
def test_a_launch_in_which_a_rank_would_lack_its_expert_is_refused(
    kit: Kit, wrapper: str, ranks: int, options: dict[str, object], found: str
) -> None:
    function = f"{SCRIPTS / 'rank_experts.py'}:train"
    first = Cell(function, {**NAMED, "wrapper": wrapper}, 2)
    run = kit.run_again(kit.new_run(first), kill=KillPoint.step(5))
    run = kit.run_again(replace(run, cell=Cell(function, {**options, "wrapper": wrapper}, ranks)))
    assert f"model: {found} one state for each rank" in run.failure, run.failure
