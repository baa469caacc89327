"""The conformance suite: it passes a function that is right, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resumekit.testing import KILL_POINTS, ConformanceSuite, KillPoint, Kit

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = f"{Path(__file__).parent / 'scripts' / 'tiny_training.py'}:train"
COUNTED = {"count_samples": True}
MATRICES = {"saved": {"kill": ("mid-epoch 0",), "save_every": (2,)}}


class Tiny(ConformanceSuite):
    function = TRAIN
    steps_per_epoch = 6
    save_every = 3
    everything = COUNTED
    components = ("model", "optimizer", "data", "rng", "progress", "extras")
    preload = ("torch.distributed", "torch.utils.data", "resumekit.checkpointer")
    timeout_seconds = 30.0


class TestTiny(Tiny):
    """What a third party writes, run as pytest runs it."""

    matrices = MATRICES
    test_a_cold_start_continues_exactly: Any = None  # seconds; the integration tests make one each

    def test_every_cadence_continues_exactly(self, kit: Kit, saved: dict[str, Any]) -> None:
        kit.assert_exact(self.cell(saved["kill"], {"save_every": saved["save_every"]}))

    def test_two_ranks_share_the_steps_of_one(self, kit: Kit) -> None:
        kit.assert_exact(self.cell("mid-epoch 0", {"save_every": 1}, world_size=2))


# ---------------------------------------------------------------- what is wrong fails


def is_wrong(how: str, **attributes: Any) -> ConformanceSuite:
    """The suite of a function that is wrong in one way, or that is wrongly described."""
    wrong = {"options": {"wrong": how}} if how else {}
    suite: ConformanceSuite = type("Wrong", (Tiny,), {**wrong, **attributes})()
    return suite


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    with Tiny.new_kit(tmp_path_factory.mktemp("wrong")) as kit:
        yield kit


@pytest.mark.parametrize(
    ("how", "fails"),
    [
        ("model", {"mid-epoch 0", "on the boundary", "after the last save"}),
        ("starts over", {"mid-epoch 0", "on the boundary", "after the last save"}),
        ("rng", {"mid-epoch 0", "on the boundary"}),
        ("epochs", {"on the boundary"}),
        ("end", {"after the last save"}),
    ],
)
def test_a_wrong_resume_fails_at_the_points_that_show_it(
    warm: Kit, how: str, fails: set[str]
) -> None:
    suite = is_wrong(how)
    for point in ("mid-epoch 0", "on the boundary", "after the last save"):
        if point not in fails:
            suite.test_a_killed_run_continues_exactly(warm, point, 1)
            continue
        with pytest.raises(AssertionError, match="DIVERGED"):
            suite.test_a_killed_run_continues_exactly(warm, point, 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("trains on", "launched again after its end, rank 0 made a step record of step 13"),
        ("end", "DIVERGED: step 12, rank 0: model: value"),
        ("starts over", "launched again after its end, rank 0 made a step record of step 1"),
    ],
)
def test_a_finished_run_that_does_something_fails(warm: Kit, how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        is_wrong(how).test_the_identical_command_starts_resumes_and_then_does_nothing(warm, 1)


def test_a_resume_from_an_older_checkpoint_fails_though_every_bit_is_right(warm: Kit) -> None:
    suite = is_wrong("loses the newest")
    suite.test_a_killed_run_continues_exactly(warm, "mid-epoch 1", 1)
    with pytest.raises(AssertionError, match=r"step=6, .* and step 9 was saved"):
        suite.test_the_identical_command_starts_resumes_and_then_does_nothing(warm, 1)


@pytest.mark.full  # cold processes import torch
def test_what_only_cold_processes_show_fails_there_alone(warm: Kit, tmp_path: Path) -> None:
    one_kill = classmethod(
        lambda cls, epoch, every: dict.fromkeys(KILL_POINTS, (KillPoint.step(4),))
    )
    suite = is_wrong("hashes", kill_points=one_kill)
    suite.test_a_killed_run_continues_exactly(warm, "mid-epoch 1", 1)
    with pytest.raises(AssertionError, match="NOT REPRODUCIBLE"):
        suite.test_a_cold_start_continues_exactly(tmp_path)


def test_a_control_of_what_is_not_there_fails(warm: Kit) -> None:
    with pytest.raises(AssertionError, match="exact without ema"):
        is_wrong("").test_a_component_left_out_is_caught_and_named(warm, "ema", 1)


def test_a_control_that_is_caught_for_another_reason_is_no_comfort(warm: Kit) -> None:
    """The function forgets the optimizer by itself: leaving it out is caught all the same."""
    suite = is_wrong("", everything={"wrong": "optimizer"})
    suite.test_a_component_left_out_is_caught_and_named(warm, "optimizer", 1)
    with pytest.raises(AssertionError, match=r"DIVERGED: .* optimizer: value"):
        suite.test_everything_together_continues_exactly(warm, 1)


def test_a_component_that_changes_without_a_control_fails(warm: Kit) -> None:
    suite = is_wrong("", components=("model", "optimizer", "data", "rng"))
    with pytest.raises(AssertionError, match="no negative control for progress, extras"):
        suite.test_every_component_that_changes_has_a_control(warm, 1)


def test_a_length_that_is_not_the_functions_own_fails(warm: Kit) -> None:
    suite = is_wrong("", steps_per_epoch=9)
    suite.test_a_killed_run_continues_exactly(warm, "on the boundary", 1)  # which is none
    with pytest.raises(AssertionError, match="counted 12 steps, from 1 to 12, expected 1 to 18"):
        suite.test_the_function_is_what_the_subclass_declares(warm, 1)


# ---------------------------------------------------------------- as pytest sees it

FILE = f"""
from resumekit.testing import ConformanceSuite, Kit

class TestIt(ConformanceSuite):
    function = {TRAIN!r}
    steps_per_epoch = 6
    save_every = 1
    components = ("model", "data")
    preload = ("resumekit.checkpointer",)
"""


def collected(pytester: pytest.Pytester, rest: str, *options: str) -> tuple[list[str], str]:
    """The ids that pytest collects from the suite's file with something added; what it says."""
    pytester.makepyfile(test_it=FILE + rest)
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-W", "error", *options)
    ids = [line.rpartition("::")[2] for line in result.outlines if "::" in line]
    return ids, result.stdout.str()


def test_every_kill_component_and_world_size_is_a_test_of_its_own(
    pytester: pytest.Pytester,
) -> None:
    ids, _ = collected(pytester, "    world_sizes = (1, 2)")
    killed = [one for one in ids if one.startswith("test_a_killed_run_continues_exactly[")]
    assert len(killed) == len(KILL_POINTS) * 2
    assert "test_a_killed_run_continues_exactly[three times-2 ranks]" in killed
    assert "test_a_component_left_out_is_caught_and_named[data-1 rank]" in ids
    assert "test_a_cold_start_continues_exactly" in ids


MATRIX = """
    matrices = {"fed": {name: (1, 2, 3) for name in "abc"}}

    def test_more(self, kit, fed): ...
"""
OPTION = "def pytest_addoption(parser): parser.addoption('--full-matrix', action='store_true')"


def test_a_matrix_is_a_sample_or_with_the_option_the_whole(pytester: pytest.Pytester) -> None:
    assert num_more(pytester) < 27
    pytester.makeconftest(OPTION)
    assert num_more(pytester) < 27
    assert num_more(pytester, "--full-matrix") == 27


def num_more(pytester: pytest.Pytester, *options: str) -> int:
    ids, _ = collected(pytester, MATRIX, *options)
    more = [one for one in ids if one.startswith("test_more[")]
    assert "test_more[a 1, b 1, c 1]" in more
    return len(more)


def test_a_test_of_ones_own_may_choose_its_values(pytester: pytest.Pytester) -> None:
    rest = """
    import pytest

    @pytest.mark.parametrize("kill", ["mid-epoch 1"])
    @pytest.mark.parametrize(argnames=("component",), argvalues=[("rng",)])
    def test_more(self, kit, kill, component, world_size): ...
"""
    ids, _ = collected(pytester, rest)
    assert [one for one in ids if "more" in one] == ["test_more[1 rank-rng-mid-epoch 1]"]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("    components = ()", "TestIt.components: nothing, expected a value of its own"),
        ("    world_sizes = ()", "TestIt.world_sizes: nothing"),
        ("    save_every = 5", "steps_per_epoch, save_every: 6, 5, expected"),
        ("    world_sizes = (1, 4)", "steps_per_epoch, save_every: 2, 1, expected"),
        ("    num_epochs = 1", "num_epochs: 1, expected 2 or more"),
        ("    matrices = {'fed': {'a': (1,)}}", "matrices['fed']: no test with an argument"),
    ],
)
def test_what_a_subclass_forgets_is_reported_before_anything_runs(
    pytester: pytest.Pytester, rest: str, message: str
) -> None:
    _, output = collected(pytester, rest)
    assert message in output


def test_pytest_fails_for_a_function_that_is_wrong(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=FILE + "    options = {'wrong': 'epochs'}")
    result = pytester.runpytest_inprocess("-W", "error", "-k", "epoch and 0 or boundary")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert {name: result.parseoutcomes()[name] for name in ("passed", "failed")} == {
        "passed": 1,
        "failed": 1,
    }
    assert "killed_run_continues_exactly[on the boundary-1 rank]" in result.outlines[-2]


def test_without_pytest_the_kit_can_be_used_and_the_suite_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from resumekit.testing import Cell, KillPoint, Kit\n"
        "from resumekit.testing import ConformanceSuite\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert (
        "MissingDependencyError: resumekit.testing.ConformanceSuite: pytest is not inst"
        in last_line
    )
