"""The conformance suite as the adapters of this repository inherit it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from background_workloads import committed, train_until_interrupted
from checkpoint_files import require_independent_copy
from memory_workloads import train_with_memory

from resumekit.prove import compare
from resumekit.record.trace import KillPoint
from resumekit.testing import Cell, ConformanceSuite, Kit, Run
from resumekit.testing.task import target_of

NUM_TRIALS, ALL_TRIALS = 1, 10
NUM_KILLS, ALL_KILLS = 2, 20


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
    @pytest.mark.full
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
        for run in self.interrupted(request, kit, plain, "SIGKILL"):
            assert "killed by SIGKILL" in run.failure, run.failure
            assert committed(run.directory)
            run = kit.run_again(replace(run, cell=plain))
            assert not run.launches[-1].failure, run.launches[-1].failure
            verdict = compare(whole.trace, run.trace, expect_resume=True)
            assert verdict.exact, f"{verdict}"

    def interrupted(
        self, request: pytest.FixtureRequest, kit: Kit, plain: Cell, name: str
    ) -> Iterator[Run]:
        """Runs whose first launch gets a signal while a save is written, at random instants."""
        chance = random.Random(plain.world_size)
        given = {"function": target_of(self.function), "options": dict(plain.options)}
        for _ in range(ALL_TRIALS if request.config.getoption("--full-matrix") else NUM_TRIALS):
            when = {"after_seconds": chance.uniform(0, 0.05), "name": name}
            when["rank"] = chance.randrange(plain.world_size)
            print(when)
            cell = Cell(train_until_interrupted, {**given, **when}, plain.world_size)
            leaves_on = None if name == "SIGKILL" else name
            yield kit.run_again(kit.new_run(cell), leaves_on=leaves_on)

    @pytest.mark.quick("1 rank")
    def test_what_changes_after_a_save_in_the_background_returned_is_not_in_the_checkpoint(
        self, kit: Kit, world_size: int
    ) -> None:
        cell = self.cell(options=self.everything, world_size=world_size)
        require_independent_copy(kit, cell, step=cell.options["save_every"])

    @pytest.mark.quick("1 rank")
    def test_a_signal_while_a_save_is_written_in_the_background_loses_nothing(
        self, request: pytest.FixtureRequest, kit: Kit, world_size: int
    ) -> None:
        plain = self.cell(options={"async_save": True}, world_size=world_size)
        whole = kit.run_uninterrupted(plain)
        for run in self.interrupted(request, kit, plain, "SIGTERM"):
            (left,) = run.launches
            assert left.was_killed, left.failure or "the signal came too late"
            newest = max(path.name for path in committed(run.directory))
            run = kit.run_again(replace(run, cell=plain))
            verdict = compare(whole.trace, run.trace, expect_resume=True)
            assert verdict.exact, f"{run.failure} {verdict}"
            (resume,) = verdict.resumes
            assert (f"step-{resume.step:08d}", resume.num_repeated_steps) == (newest, 0)

    @pytest.mark.quick("1 rank")
    def test_a_kill_costs_at_most_one_step_with_a_place_in_memory(
        self,
        request: pytest.FixtureRequest,
        kit: Kit,
        world_size: int,
        record_property: Callable[[str, object], None],
    ) -> None:
        plain = self.cell(world_size=world_size)
        num_steps = self.num_epochs * self.steps_in_epoch(plain.options, world_size)
        num_kills = ALL_KILLS if request.config.getoption("--full-matrix") else NUM_KILLS
        in_a_run = min(num_kills, num_steps - 3)
        chance = random.Random(world_size)
        points = [KillPoint.step, KillPoint.checkpoint]
        given = {"function": target_of(self.function), "options": dict(plain.options)}
        for _ in range(-(-num_kills // in_a_run)):
            steps = sorted(chance.sample(range(3, num_steps), k=in_a_run))
            kills = tuple(chance.choice(points)(step) for step in steps)
            # Not from the first launch that the kit keeps aside: that has no copies in memory.
            verdict, run = kit.judge(Cell(train_with_memory, given, world_size, kills))
            assert verdict.exact, f"{run.failure} {verdict}"
            assert not run.missed_kills
            assert len(verdict.resumes) == len(kills)
            assert all(resume.num_repeated_steps <= 1 for resume in verdict.resumes)
            name = f"kills with a memory place, {type(self).__name__}, {world_size} ranks"
            record_property(name, len(kills))

    @pytest.mark.full
    def test_a_component_left_out_is_caught_where_saves_are_in_the_background(
        self, kit: Kit, component: str, world_size: int
    ) -> None:
        options = {**self.everything, "async_save": True}
        kit.assert_caught(self.cell("mid-epoch 1", options, world_size=world_size), component)

    @pytest.mark.full
    def test_everything_together_saved_in_the_background_continues_exactly(
        self, kit: Kit, world_size: int
    ) -> None:
        options = {**self.everything, "async_save": True}
        kit.assert_exact(self.cell("mid-epoch 1", options, world_size=world_size))

    @pytest.mark.full
    def test_a_cold_start_continues_exactly(self, tmp_path: Path) -> None:
        super().test_a_cold_start_continues_exactly(tmp_path)
