"""Loops of the user's own whose variables are state: exact with nothing added, and with extras."""

from __future__ import annotations

import pytest
from preloads import TORCH
from script_judge import Script, ScriptJudge

PRELOAD = TORCH

# The fields of the records that must differ where no variable is restored. nanoGPT's X and Y are
# drawn again by the end of a step; what differs is the input of the step after a resume.
FIELDS = {
    "dqn_loop.py": ("obs", "epsilon", "rb", "envs"),
    "nanogpt.py": ("inputs", "best_val_loss"),
    "lstm_language_model.py": ("hidden", "lr", "best_val_loss"),
}
OFF = ("--loop-variables", "off")
KILLS = {"dqn_loop.py": (9, 12), "nanogpt.py": (9, 12), "lstm_language_model.py": (8, 17)}
SCRIPTS = pytest.mark.parametrize("name", list(FIELDS))


def given(name: str) -> Script:
    return Script(name, kills=KILLS[name])


def bare(name: str) -> Script:
    if name == "nanogpt.py":  # a script at module level each
        return Script("nanogpt_bare.py", kills=KILLS[name])
    return Script(name, ("--bare",), kills=KILLS[name])


@pytest.mark.quick("nanogpt.py")
@SCRIPTS
def test_with_its_variables_in_extras_a_script_is_exact(judge: ScriptJudge, name: str) -> None:
    judge.assert_exact(given(name))


@pytest.mark.full
@SCRIPTS
def test_without_the_extras_of_the_checkpoint_it_differs(judge: ScriptJudge, name: str) -> None:
    judge.assert_differs(given(name), "trained", *FIELDS[name], without="extras")


@pytest.mark.full
@SCRIPTS
def test_strict_starts_with_the_variables_in_extras(judge: ScriptJudge, name: str) -> None:
    run = judge.run_uninterrupted(given(name).with_arguments("--strict")).require_success()
    assert not run.warnings


@pytest.mark.quick("nanogpt.py")
@SCRIPTS
def test_with_nothing_added_a_script_is_exact(judge: ScriptJudge, name: str) -> None:
    judge.assert_exact(bare(name))


@pytest.mark.quick("nanogpt.py")
@SCRIPTS
def test_with_nothing_added_strict_starts_without_a_line(judge: ScriptJudge, name: str) -> None:
    run = judge.run_uninterrupted(bare(name).with_arguments("--strict")).require_success()
    assert not run.warnings


@pytest.mark.quick("nanogpt.py")
@SCRIPTS
def test_without_its_variables_it_differs(judge: ScriptJudge, name: str) -> None:
    judge.assert_differs(bare(name).with_arguments(*OFF), "trained", *FIELDS[name])


@pytest.mark.full
@SCRIPTS
def test_without_variables_the_extras_alone_are_exact(judge: ScriptJudge, name: str) -> None:
    judge.assert_exact(given(name).with_arguments(*OFF))


@pytest.mark.full
@SCRIPTS
def test_extras_change_no_bit_of_a_run(judge: ScriptJudge, name: str) -> None:
    one, other = judge.run_uninterrupted(bare(name)), judge.run_uninterrupted(given(name))
    fields = ("loss", "trained", "inputs")
    assert [[r[k] for k in fields] for r in one.records[0].values()] == [
        [r[k] for k in fields] for r in other.records[0].values()
    ]


@pytest.mark.full
def test_without_a_network_that_was_not_given_it_differs(judge: ScriptJudge) -> None:
    script = bare("dqn_loop.py").with_arguments("--transient", "target_network")
    judge.assert_differs(script, "trained", "target_network")
