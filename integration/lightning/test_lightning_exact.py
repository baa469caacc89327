"""Lightning: killed by SIGKILL and started again, a run ends with the same bits.

Beside the cells of the suite stand those in which every two values of two factors meet;
``--full-matrix`` runs the whole product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from adapter_suite import AdapterSuite
from frozen_backbone import require_exact_and_linked
from preloads import LIGHTNING

pytest.importorskip("lightning")

from lightning_workloads import train, train_stock

from resumekit.testing import Cell, KillPoint, Kit

FEEDS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "from a generator": {"loader": "generator"},
    "augmented": {"augment": True},
    "augmented by 2 workers": {"augment": True, "workers": "2"},
    "augmented by persistent workers": {"augment": True, "workers": "persistent"},
}
STYLES: dict[str, dict[str, Any]] = {
    "by hand, bf16": {"manual": True, "ema": "given", "precision": "bf16-mixed"},
    "scheduled, averaged by Lightning": {
        "scheduler": "step",
        "ema": "callback",
        "validate": True,
        "val_check_interval": 5,
    },
    "plateau": {"scheduler": "plateau", "validate": True},
}
# The other kill points are those of the suite's own cells.
KILLS = ("on the boundary", "on the last step", "twice in one epoch")
TWICE = (KillPoint.step(5), KillPoint.step(16))
WITHIN = (KillPoint.checkpoint(1), KillPoint.step(3), KillPoint.checkpoint(4))
WINDOWS = {"accumulate": 4, "asks": True, "save_every": None, "mid_accumulation": "gradients"}


class TestLightning(AdapterSuite):
    function = train
    steps_per_epoch = 12
    save_every = 3
    everything = {
        "augment": True,
        "ema": "given",
        "scheduler": "plateau",
        "validate": True,
        "val_check_interval": 4,
        "precision": "scaled",
    }
    components = (
        "model",
        "optimizer",
        "lr_scheduler",
        "grad_scaler",
        "ema",
        "data",
        "rng",
        "progress",
        "best_metric",
        "callbacks/lightning",
        "callbacks/hooks",
        "callbacks/attributes",
        "callbacks/Counting-0",
        "callbacks/EarlyStopping-0",
        "extras",
    )
    world_sizes = (1, 2)
    preload = LIGHTNING
    matrices = {"combination": {"kill": KILLS, "feed": tuple(FEEDS), "style": tuple(STYLES)}}

    def test_every_way_to_feed_and_train_continues_exactly(
        self, kit: Kit, combination: dict[str, str]
    ) -> None:
        options = {**FEEDS[combination["feed"]], **STYLES[combination["style"]]}
        kit.assert_exact(self.cell(combination["kill"], options))

    @pytest.mark.quick("mid-epoch-2")
    @pytest.mark.parametrize("accumulate", [2, 5])
    @pytest.mark.parametrize("kill", ["mid-epoch", "boundary"])
    def test_an_accumulated_run_continues_exactly(
        self, kit: Kit, accumulate: int, kill: str
    ) -> None:
        # 12 batches make accumulation windows of 2, or of 5, 5 and 2: the end of an epoch ends one.
        epoch = -(-self.steps_per_epoch // accumulate)
        twice = (KillPoint.step(2), KillPoint.step(epoch + 2))
        kills = (KillPoint.checkpoint(epoch),) if kill == "boundary" else twice
        options = {"accumulate": accumulate, "augment": True, "save_every": 1}
        kit.assert_exact(self.cell(kills, options))

    @pytest.mark.quick("2")
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_a_kill_inside_a_window_is_exact(self, kit: Kit, world_size: int) -> None:
        # Each requested save follows the second batch of an accumulation window. Two ranks have
        # windows of four batches and two in an epoch, and leave in one of four.
        kills: tuple[KillPoint, ...] = WITHIN
        if world_size == 2:
            kills = (KillPoint.step(1), KillPoint.step(2, signal="SIGTERM"), KillPoint.step(3))
        cell = self.cell(kills, WINDOWS, world_size=world_size)
        kit.assert_exact(cell)
        at = KillPoint.step(4 - world_size)
        kit.assert_caught(replace(cell, kills=(at,)), "model/gradients")

    @pytest.mark.full
    def test_by_default_the_same_saves_are_made_between_windows(self, kit: Kit) -> None:
        options = {**WINDOWS, "mid_accumulation": "boundary"}
        kit.assert_exact(self.cell((KillPoint.checkpoint(1), KillPoint.step(3)), options))

    def test_a_run_that_is_stopped_early_continues_exactly(self, kit: Kit) -> None:
        options = {"validate": True, "val_check_interval": 5, "stop_after": 2}
        kit.assert_finished(self.cell(TWICE, options))

    def test_a_run_that_ends_within_an_epoch_continues_exactly(self, kit: Kit) -> None:
        kit.assert_finished(self.cell(TWICE, {"max_steps": 18, "validate": True}))

    @pytest.mark.quick("on the boundary")
    @pytest.mark.parametrize("kill", ["mid-epoch 0", "on the boundary"])
    def test_two_ranks_that_average_and_validate_continue_exactly(
        self, kit: Kit, kill: str
    ) -> None:
        # After a validation DDP does not copy the first rank's buffers before the next step.
        options = {"ema": "callback", "validate": True, "scheduler": "plateau"}
        kit.assert_exact(self.cell(kill, options, world_size=2))

    @pytest.mark.full
    def test_four_ranks_sum_gradients_in_the_order_that_they_had(self, kit: Kit) -> None:
        cell = self.cell((KillPoint.step(2),), {"save_every": 1}, world_size=4)
        kit.assert_exact(cell)
        verdict, _ = kit.judge(cell, inject="model/gradient_buckets")
        assert verdict.divergence is not None

    def test_lightnings_own_resume_is_not_exact(self, kit: Kit) -> None:
        verdict, run = kit.judge(Cell(train_stock, kills=(KillPoint.step(17),)))
        assert (run.failure, run.missed_kills) == ("", ())
        assert verdict.divergence is not None
        assert verdict.is_reproducible

    @pytest.mark.full
    @pytest.mark.parametrize("async_save", [False, True])
    def test_a_frozen_backbone_is_linked_and_continues_exactly(
        self, kit: Kit, async_save: bool, world_size: int
    ) -> None:
        options = {"frozen": True, "save_every": 1, "async_save": async_save}
        kills = (KillPoint.step(4), KillPoint.step(8))
        require_exact_and_linked(kit, self.cell(kills, options, world_size=world_size))
