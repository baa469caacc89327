"""The conformance suite as the adapters of this repository inherit it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from background_workloads import CHANGED, committed, save_once, train_until_killed
from checkpoint_files import differences, tensors_of

from resumekit.prove import compare
from resumekit.testing import Cell, ConformanceSuite, Kit
from resumekit.testing.task import target_of

MODES = ("synchronous", "background", "not copied")
NUM_KILLS, ALL_KILLS = 1, 10


class AdapterSuite(ConformanceSuite):
    """The suite on the warm server that all files of its framework share.

    The quick set has each adapter killed on one rank and on two, and each component left out
    once. The other kill points are those of the core, which is killed at each of them in tests/.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls, warm: Any) -> Kit:
        """The kit of the files with the same ``PRELOAD``."""
        found: Kit = warm.kit(cls.preload)
        return found

    @pytest.mark.quick("twice in one epoch-2 ranks", "on the boundary-1 rank")
    def test_a_killed_run_continues_exactly(self, kit: Kit, kill: str, world_size: int) -> None:
        super().test_a_killed_run_continues_exactly(kit, kill, world_size)

    @pytest.mark.quick("2 ranks")
    def test_a_run_that_was_asked_to_leave_continues_exactly(
        self, kit: Kit, world_size: int
    ) -> None:
        super().test_a_run_that_was_asked_to_leave_continues_exactly(kit, world_size)

    @pytest.mark.quick("*-1 rank")
    def test_a_component_left_out_is_caught_and_named(
        self, kit: Kit, component: str, world_size: int
    ) -> None:
        super().test_a_component_left_out_is_caught_and_named(kit, component, world_size)

    @pytest.mark.quick("1 rank")
    def test_the_identical_command_starts_resumes_and_then_does_nothing(
        self, kit: Kit, world_size: int
    ) -> None:
        super().test_the_identical_command_starts_resumes_and_then_does_nothing(kit, world_size)

    # A kill earlier in the run may come before the first save is written.
    @pytest.mark.quick("1 rank-mid-epoch 1")
    @pytest.mark.parametrize("kill", ["mid-epoch 1", "on the last step", "after the last save"])
    def test_a_run_that_saves_in_the_background_continues_exactly(
        self, kit: Kit, kill: str, world_size: int
    ) -> None:
        kit.assert_exact(self.cell(kill, {"async_save": True}, world_size=world_size))

    @pytest.mark.quick("1 rank")
    def test_a_kill_while_a_save_is_written_in_the_background_continues_exactly(
        self, request: pytest.FixtureRequest, kit: Kit, world_size: int
    ) -> None:
        plain = self.cell(options={"async_save": True}, world_size=world_size)
        whole = kit.run_uninterrupted(plain)
        chance = random.Random(world_size)
        for _ in range(ALL_KILLS if request.config.getoption("--full-matrix") else NUM_KILLS):
            when = {"after_seconds": chance.uniform(0, 0.05), "rank": chance.randrange(world_size)}
            given = {"function": target_of(self.function), "options": dict(plain.options)}
            killed = Cell(train_until_killed, {**given, **when}, world_size)
            run = kit.run_again(kit.new_run(killed))
            assert "killed by SIGKILL" in run.failure, f"{when}: {run.failure}"
            assert committed(run.directory), f"{when}: no checkpoint"
            run = kit.run_again(replace(run, cell=plain))
            assert not run.launches[-1].failure, f"{when}: {run.launches[-1].failure}"
            verdict = compare(whole.trace, run.trace, expect_resume=True)
            assert verdict.exact, f"{when}: {verdict}"

    @pytest.mark.quick("1 rank")
    def test_what_changes_after_a_save_in_the_background_returned_is_not_in_the_checkpoint(
        self, kit: Kit, world_size: int
    ) -> None:
        steps = {mode: self.saved_once(kit, mode, world_size) for mode in MODES}
        wrong = differences(steps["synchronous"], steps["background"])
        assert not wrong, f"{wrong}"
        # Without the copy the same comparison finds every tensor but for the state of Python's
        # generator: that is a tuple, of which a new array is made.
        found = differences(steps["synchronous"], steps["not copied"])
        missed = tensors_of(steps["synchronous"]).difference(found)
        assert not {name for name in missed if not name.endswith("python.words")}

    def saved_once(self, kit: Kit, mode: str, world_size: int) -> Path:
        """The checkpoint of the first save, made in one of the ways of ``save_once``."""
        options = self.cell(options=self.everything, world_size=world_size).options
        given = {"function": target_of(self.function), "options": dict(options), "mode": mode}
        cell = Cell(save_once, {**given, "step": options["save_every"]}, world_size)
        run = kit.run_again(kit.new_run(cell))
        assert not run.failure, run.failure
        training = run.directory / "training"
        for path in training.glob(CHANGED.format(rank="*")):
            same = [key for key, names in json.loads(path.read_text()).items() if not names]
            assert not same, f"{path.name}: nothing of {same} was overwritten"
        (step,) = committed(training)
        return step

    @pytest.mark.full
    def test_everything_together_saved_in_the_background_continues_exactly(
        self, kit: Kit, world_size: int
    ) -> None:
        options = {**self.everything, "async_save": True}
        kit.assert_exact(self.cell("mid-epoch 1", options, world_size=world_size))

    @pytest.mark.full
    def test_a_cold_start_continues_exactly(self, tmp_path: Path) -> None:
        super().test_a_cold_start_continues_exactly(tmp_path)
