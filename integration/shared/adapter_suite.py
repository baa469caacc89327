"""The conformance suite as the adapters of this repository inherit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resumekit.testing import ConformanceSuite, Kit


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

    @pytest.mark.full
    def test_everything_together_saved_in_the_background_continues_exactly(
        self, kit: Kit, world_size: int
    ) -> None:
        options = {**self.everything, "async_save": True}
        kit.assert_exact(self.cell("mid-epoch 1", options, world_size=world_size))

    @pytest.mark.full
    def test_a_cold_start_continues_exactly(self, tmp_path: Path) -> None:
        super().test_a_cold_start_continues_exactly(tmp_path)
