"""An optimizer that shards its moments by rank, under each framework: killed and resumed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from preloads import ALL
from script_judge import SCRIPTS, Script, ScriptJudge

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL

FRAMEWORKS = ("torch", "accelerate", "transformers", "lightning")
# 5 steps an epoch, saves at 3, 6, .. : each resume repeats two steps.
TRAINING = Script("sharded_moments.py", num_ranks=2, kills=(8, 14))
LAUNCHERS = pytest.mark.parametrize("torchrun", [False, True], ids=["forked", "torchrun"])


def under(framework: str, *arguments: str, torchrun: bool = False) -> Script:
    pytest.importorskip(framework)
    return replace(TRAINING, arguments=("--framework", framework, *arguments), torchrun=torchrun)


@pytest.mark.quick("torch-forked")
@LAUNCHERS
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_remedy_of_the_error_makes_a_killed_run_exact(
    judge: ScriptJudge, framework: str, torchrun: bool
) -> None:
    refused = judge.run_uninterrupted(under(framework, torchrun=torchrun))
    assert any(refused.statuses), "a save without the option was made"
    lines = refused.outputs[0].splitlines()
    error = next(line for line in lines if "RankDisagreementError: optimizer: " in line)
    option = r'or pass per_rank=\{"([^"]+)"\} \(resumekit run: --per-rank \1\)\.'
    remedy = re.search(rf"{option} \[RK-601\]$", error)
    assert remedy, error
    arguments = ("--per-rank", remedy[1], "--strict")
    judge.assert_exact(under(framework, *arguments, torchrun=torchrun))


@pytest.mark.quick("torch")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_the_moments_it_differs(judge: ScriptJudge, framework: str) -> None:
    script = under(framework, "--per-rank", "optimizer", "--strict")
    judge.assert_differs(script, without="optimizer")


def attached_under(framework: str, *options: str) -> Script:
    return replace(under(framework, "--bare"), attached=("--save-every", "3", *options))


@pytest.mark.quick("lightning")
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_the_option_of_resumekit_run_makes_a_killed_run_exact(
    judge: ScriptJudge, framework: str
) -> None:
    refused = judge.run_uninterrupted(attached_under(framework))
    assert any(refused.statuses), "a save without the option was made"
    remedy = re.search(
        r"RankDisagreementError: optimizer: .*(--per-rank \w+)\)", refused.outputs[0]
    )
    assert remedy, refused.outputs[0][-3000:]
    script = attached_under(framework, *remedy[1].split())
    judge.assert_exact(script)


@pytest.mark.quick("lightning")
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_attached_and_without_the_moments_it_differs(judge: ScriptJudge, framework: str) -> None:
    judge.assert_differs(attached_under(framework, "--per-rank", "optimizer"), without="optimizer")


EACH, ALL_RANKS = "one state for each rank", "one state for all ranks"
NAMED: dict[str, object] = {"per_rank": ["optimizer"], "allow_changes": ["world_size"]}
UNNAMED: dict[str, object] = {"allow_changes": ["world_size"]}


@pytest.mark.quick("no option")
@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((2, NAMED), (1, NAMED), f"1 ranks with {EACH}, expected 2 ranks with {EACH}"),
        ((1, NAMED), (2, NAMED), f"2 ranks with {EACH}, expected 1 ranks with {ALL_RANKS}"),
        ((2, NAMED), (2, UNNAMED), f"2 ranks with {ALL_RANKS}, expected 2 ranks with {EACH}"),
    ],
    ids=["fewer ranks", "more ranks", "no option"],
)
def test_a_launch_in_which_a_rank_would_lack_its_moments_is_refused(
    kit: Kit,
    first: tuple[int, dict[str, object]],
    second: tuple[int, dict[str, object]],
    found: str,
) -> None:
    (ranks, options), (more, others) = first, second
    function = f"{SCRIPTS / 'sharded_moments.py'}:train"
    run = kit.run_again(kit.new_run(Cell(function, options, ranks)), kill=KillPoint.step(5))
    run = kit.run_again(replace(run, cell=Cell(function, others, more)))
    assert f"optimizer: a job of {found}" in run.failure, run.failure
