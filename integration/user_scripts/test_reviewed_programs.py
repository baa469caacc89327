"""Programs of users in which a review found state that was lost, each killed twice by SIGKILL.

Each must be exact, step by step and bit for bit, or a warning before the first save is over must
name the state, which ``strict=True`` then refuses. The programs record losses and weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from judge import Judge, Verdict, assert_verdict
from preloads import LIGHTNING, TORCH, TRAINER
from reviewed_launches import KilledLaunches

PRELOAD_LOOPS = (*TORCH, "tiny_training")
PRELOAD_FRAMEWORKS = (*TRAINER, *LIGHTNING, "peft", "tiny_training")

# The second resume restores what the second launch saved.
KILLS = (10, 13)
# Where each epoch ends, and in each of two loops of an epoch.
KILLS_AT_THE_END, SAVE_EVERY_EPOCH = (8, 16), 7
KILLS_IN_LOOPS = (11, 17, 24)

# Those below a line of dashes are in the full set only.
EXACT = {
    "reviewed_optimizers": """
        sam
        lookahead_in_two_lines
        slow_state
        tempered
        ---
        sam_in_two_lines
        lookahead
        decaying
        sam_with_a_closure
        slow_state_in_two_lines
        decaying_in_two_lines
        tempered_in_two_lines
    """,
    "reviewed_loops": """
        closure
        mutable_default_argument
        class_attribute
        global_of_a_module
        q_learning
        language_model
        epochs_halve_rate
        ---
        function_attribute
        changed_global
        lambda_over_a_list
        fixed_number_of_steps
        counter_from_the_resume
        lines_shrink_weights
        epochs_drop_momentum
        closure_in_two_lines
        mutable_default_argument_in_two_lines
        function_attribute_in_two_lines
        class_attribute_in_two_lines
        changed_global_in_two_lines
        global_of_a_module_in_two_lines
        lambda_over_a_list_in_two_lines
        q_learning_passed
        language_model_by_hand
        counter_in_an_object
        epochs_shrink_weights
        epochs_shrink_data
        epochs_zero_momentum
        epochs_raise_dropout
        lines_halve_rate
        lines_shrink_data
        lines_zero_momentum
        lines_drop_momentum
        lines_raise_dropout
    """,
    "reviewed_frameworks": """
        adalora
        loss_object
        module_with_a_helper
        ---
        trainer_with_attributes
        callback_with_a_deque
        helper_of_a_library
        helper_of_a_library_in_a_loop
    """,
}
# Exact, or one of these names is reported in time.
REPORTED = {
    "reviewed_loops": {
        "environment_variable": "environ REVIEWED_COUNT",
        "cached_random_tensor": "direction",
        "tensor_hook": "Shrink calls hook",
        "---": "",
        "environment_variable_in_two_lines": "environ REVIEWED_COUNT",
        "cached_random_tensor_in_two_lines": "direction",
        "tensor_hook_with_nonlocal": "shrink calls hook",
    },
    "reviewed_frameworks": {
        "---": "",
        "loss_closure": "moving mean losses",
        "module_with_a_closure": "weigh count seen",
    },
}
CHANGED = (
    *("halve_rate", "shrink_weights", "shrink_data"),
    *("zero_momentum", "drop_momentum", "raise_dropout"),
)
# A group that the script's code for an earlier epoch added: the resume cannot make it.
REFUSED = ("epochs_add_a_group", "epochs_add_a_group_once")
# Masked every four steps from step 8 on; from step 18 on by a pattern in the configuration.
KILLS_OF_ADALORA = ((7, 11), (14, 20))
# The negative controls: what a resume leaves out, and the program differs.
OFF = {"loop_variables": "off"}
IN_THE_MODEL = {"exclude": ["model/attributes", "callbacks/attributes"]}
IN_CALLBACKS = {"exclude": ["callbacks/attributes"]}
IN_A_LOOP = {"exclude": ["model/attributes", "variables"]}
WITHOUT: dict[str, dict[str, Any]] = {
    "adalora": IN_THE_MODEL,
    "helper_of_a_library": IN_THE_MODEL,
    "helper_of_a_library_in_a_loop": IN_A_LOOP,
    "trainer_with_attributes": IN_CALLBACKS,
    "callback_with_a_deque": IN_CALLBACKS,
    "loss_object": IN_CALLBACKS,
    "loss_closure": IN_CALLBACKS,
    "module_with_a_helper": IN_THE_MODEL,
    "module_with_a_closure": IN_THE_MODEL,
    "tensor_hook": IN_A_LOOP,
    "tensor_hook_with_nonlocal": IN_A_LOOP,
}
# What stands for a program of which no component can be left out: the same with a mistake.
INSTEAD = {"counter_from_the_resume": "counter_from_zero"}


def cells(table: Mapping[str, Any], *, plain: int | None = None) -> pytest.MarkDecorator:
    """The parametrization of a test by the programs of a table.

    Args:
        table: the names of the programs by module.
        plain: how many of each module a plain run has; None for those above the lines.
    """
    chosen = []
    for module, listed in table.items():
        names = listed.split() if isinstance(listed, str) else [*listed]
        num_plain = names.index("---") if plain is None else plain
        for index, name in enumerate(names):
            if name != "---":
                chosen.append(cell(module, name, is_plain=index < num_plain))
    return pytest.mark.parametrize("program", chosen)


def changes(kind: str, *, plain: int = 1) -> pytest.MarkDecorator:
    """The parametrization of a test by the changes at the start of an epoch.

    Args:
        kind: of the loop around the change.
        plain: how many a plain run has.
    """
    names = enumerate(f"{kind}_{change}" for change in CHANGED)
    chosen = [cell("reviewed_loops", name, is_plain=index < plain) for index, name in names]
    return pytest.mark.parametrize("program", chosen)


def cell(module: str, name: str, *, is_plain: bool) -> Any:
    """One program, for a plain run or the full set."""
    marks = () if is_plain else (pytest.mark.full,)
    return pytest.param(f"{module}:{name}", id=name, marks=marks)


def in_loops(table: Mapping[str, str]) -> str:
    """The loops whose state is in variables: of a change there is another control."""
    names = table["reviewed_loops"].split()
    return " ".join(name for name in names if not name.endswith(CHANGED))


@pytest.fixture(scope="module")
def judge_of_loops(warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Its server imports no framework."""
    return Judge(tmp_path_factory.mktemp("loops"), KilledLaunches(warm.server(PRELOAD_LOOPS)))


@pytest.fixture(scope="module")
def judge_of_frameworks(warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Its server imports the Trainer, PEFT and Lightning."""
    launches = KilledLaunches(warm.server(PRELOAD_FRAMEWORKS))
    return Judge(tmp_path_factory.mktemp("frameworks"), launches)


@pytest.fixture
def judge(request: pytest.FixtureRequest, program: str) -> Judge:
    """The judge of a program."""
    kind = "frameworks" if program.startswith("reviewed_frameworks") else "loops"
    found: Judge = request.getfixturevalue(f"judge_of_{kind}")
    return found


@cells(EXACT)
def test_a_killed_program_is_exact(judge: Judge, program: str) -> None:
    assert_verdict(judge.verdict(program, kills=KILLS), Verdict.EXACT)


@cells(REPORTED)
def test_what_cannot_be_restored_is_reported_in_time(judge: Judge, program: str) -> None:
    module, _, name = program.partition(":")
    names = REPORTED[module][name].split()
    judgement = judge.verdict(program, kills=KILLS, names=names)
    assert_verdict(judgement, Verdict.EXACT, Verdict.REPORTED)


@pytest.mark.parametrize("kills", KILLS_OF_ADALORA, ids=str)
@pytest.mark.parametrize("program", ["reviewed_frameworks:adalora"])
def test_the_scores_of_adalora_are_restored(
    judge: Judge, program: str, kills: tuple[int, ...]
) -> None:
    assert_verdict(judge.verdict(program, kills=kills), Verdict.EXACT)


@changes("epochs", plain=2)
def test_a_change_before_the_epochs_end_is_made_once(judge: Judge, program: str) -> None:
    judgement = judge.verdict(program, kills=KILLS_AT_THE_END, save_every=SAVE_EVERY_EPOCH)
    assert_verdict(judgement, Verdict.EXACT)


@changes("loops", plain=2)
def test_a_change_is_made_once_in_each_of_two_loops(judge: Judge, program: str) -> None:
    assert_verdict(judge.verdict(program, kills=KILLS_IN_LOOPS), Verdict.EXACT)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("program", ["reviewed_loops"])
def test_a_group_that_was_added_is_exact_or_refused(judge: Judge, program: str, name: str) -> None:
    judgement = judge.verdict(f"{program}:{name}", kills=KILLS)
    assert_verdict(judgement, Verdict.EXACT, Verdict.REFUSED)
    if judgement.verdict is Verdict.REFUSED:
        assert "param_groups" in judgement.launches[-1].error, str(judgement)


@pytest.mark.parametrize("program", ["reviewed_loops:iterator_made_again"])
def test_a_save_in_a_line_that_began_no_loop_is_refused(judge: Judge, program: str) -> None:
    """It requests the first batch of an epoch in ``except StopIteration``."""
    judgement = judge.verdict(program, kills=KILLS_AT_THE_END, save_every=SAVE_EVERY_EPOCH)
    assert judgement.strict.end == "refused"
    assert "another line requests the first batch" in judgement.strict.error


# The negative controls.
@changes("again")
def test_a_change_that_is_made_again_differs(judge: Judge, program: str) -> None:
    assert judge.verdict(program, kills=KILLS[:1]).verdict is Verdict.SILENT


@cells({**EXACT, "reviewed_loops": in_loops(EXACT)}, plain=2)
def test_with_its_state_left_out_it_differs(judge: Judge, program: str) -> None:
    assert_control_differs(judge, program)


@cells(REPORTED, plain=0)
def test_with_its_state_left_out_what_is_reported_differs(judge: Judge, program: str) -> None:
    assert_control_differs(judge, program)


def assert_control_differs(judge: Judge, program: str) -> None:
    """Fails if a program is exact without its state, which then decides nothing."""
    module, _, name = program.partition(":")
    options = WITHOUT.get(name, OFF)
    program = f"{module}:{INSTEAD.get(name, name)}"
    kills = (14,) if name == "adalora" else KILLS[:1]
    judgement = judge.verdict(program, kills=kills, **options)
    assert judgement.difference.startswith("step"), str(judgement)
