"""The journal calls a resume different that lacks state which no loss of the next step shows.

A stream that training feeds is reported at the start of each launch, and never called identical.

Each program is killed by SIGKILL, and resumed without a part of its state. The judge, which asks
the library for nothing, sees that the weights differ; so must the journal within the steps that are
repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from journals import worst_verdict
from judge import Judge, Verdict, assert_verdict
from preloads import LIGHTNING, TORCH
from reviewed_launches import KilledLaunches

from resumekit.record.comparison import verdicts
from resumekit.record.journal import DIRECTORY

# Saved after step 10, inside an epoch, and killed after 14: four steps are repeated.
KILL, SAVE_EVERY = 14, 5
OFF = {"loop_variables": "off"}
OPTIMIZERS = ("sam", "lookahead", "slow_state", "tempered", "decaying")
LOOPS = ("closure", "mutable_default_argument", "class_attribute", "q_learning")
IN_VARIABLES = [
    *(f"reviewed_optimizers:{name}" for name in OPTIMIZERS),
    *(f"reviewed_loops:{name}" for name in LOOPS),
]
OTHERS = ["lost_state:nodes_without_a_position", "lost_state:on_policy"]


@pytest.fixture(scope="module")
def judge(warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Its server imports Lightning."""
    preload = (*TORCH, *LIGHTNING, "torchdata.nodes", "tiny_training")
    return Judge(tmp_path_factory.mktemp("lost"), KilledLaunches(warm.server(preload)))


def verdict_of_journal(judge: Judge, program: str, **options: Any) -> tuple[str, str]:
    """What the judge found to differ, and the word of the journal."""
    judgement = judge.verdict(program, kills=(KILL,), save_every=SAVE_EVERY, **options)
    newest = max(judge.directory.glob("run-*"), key=_number)
    found = worst_verdict(newest)
    assert found is not None, str(judgement)
    return judgement.difference, found.verdict.word


def _number(directory: Path) -> int:
    _, _, number = directory.name.rpartition("-")
    return int(number) if number.isdecimal() else -1


@pytest.mark.parametrize("program", IN_VARIABLES)
def test_without_the_state_of_variables_the_journal_says_different(
    judge: Judge, program: str
) -> None:
    difference, word = verdict_of_journal(judge, program, **OFF)
    assert difference.startswith("step"), difference
    assert word == "different"


@pytest.mark.parametrize("program", OTHERS)
def test_without_the_position_the_journal_says_different(judge: Judge, program: str) -> None:
    difference, word = verdict_of_journal(judge, program)
    assert difference.startswith("step"), difference
    assert word == "different"


@pytest.mark.parametrize("program", IN_VARIABLES)
def test_with_the_state_the_journal_says_identical(judge: Judge, program: str) -> None:
    """The negative control: nothing is called different that the judge finds equal."""
    assert verdict_of_journal(judge, program) == ("", "identical")


# Inside an epoch of 7 steps, twice: the second resume is to what the first one has saved.
CHAIN: dict[str, Any] = {"kills": (12, 15), "save_every": 3}


@pytest.mark.parametrize("name", ["ppo", "on_policy"])
def test_a_stream_that_training_feeds_is_lost_from_the_start_of_each_launch(
    judge: Judge, name: str
) -> None:
    reported = f"the stream uses {'Ppo' if name == 'ppo' else 'ByHand'}, which training changes"
    judgement = judge.verdict(f"lost_state:{name}", names=[reported], **CHAIN)
    assert_verdict(judgement, Verdict.REPORTED)
    assert not judgement.strict.steps, str(judgement)
    for each in judgement.launches:
        at_start = [text for num_steps, text in each.warnings if not num_steps]
        assert any(text.startswith(f"data: lost ({reported}") for text in at_start), str(judgement)
    newest = max(judge.directory.glob("run-*"), key=_number)
    words = [each.verdict.word for each in verdicts(newest / DIRECTORY)]
    assert words == ["different", "different"]


def test_a_stream_that_another_module_feeds_is_exact_and_not_reported(judge: Judge) -> None:
    """The negative control."""
    assert_verdict(judge.verdict("lost_state:ppo_of_another", **CHAIN), Verdict.EXACT)
