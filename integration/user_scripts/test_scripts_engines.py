"""A GAN with two DeepSpeed engines."""

from __future__ import annotations

import pytest
from preloads import ALL

pytest.importorskip("deepspeed")

from script_judge import Script, ScriptJudge

PRELOAD = ALL
KILLS = (7, 20)  # in both epochs; two ranks take half as many steps
STAGES = pytest.mark.parametrize("stage", ["0", "1", "2"])


@pytest.mark.full
@STAGES
def test_two_engines_are_restored(judge: ScriptJudge, stage: str) -> None:
    judge.assert_exact(Script("gan_engines.py", ("--stage", stage), kills=KILLS))


@pytest.mark.full
def test_two_engines_are_restored_on_two_ranks(judge: ScriptJudge) -> None:
    judge.assert_exact(Script("gan_engines.py", num_ranks=2, kills=(5, 11)))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["D", "G"])
def test_without_one_of_the_engines_it_differs(judge: ScriptJudge, engine: str) -> None:
    judge.assert_differs(Script("gan_engines.py"), engine, without=f"model/{engine}")


def test_strict_starts_with_two_engines(judge: ScriptJudge) -> None:
    script = Script("gan_engines.py", ("--strict",))
    assert not judge.run_uninterrupted(script).require_success().warnings
