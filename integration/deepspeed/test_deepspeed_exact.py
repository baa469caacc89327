"""DeepSpeed: killed by SIGKILL and started again, a run ends with the same bits.

The suite trains at ZeRO stage 1 on one rank; beside it stand the other stages, two ranks that draw
different random numbers, accumulation windows, and every way to feed and train.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from adapter_suite import AdapterSuite
from checkpoint_files import require_independent_copy
from deepspeed_extension import compile_once
from frozen_backbone import require_exact_and_linked
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from deepspeed_workloads import OVERFLOWS, train

from resumekit.testing import KillPoint, Kit

WIDE = 17_000  # the first layer, which is frozen, takes up more than 4 MiB
KILLS = ["mid-epoch 1", "on the boundary", "twice in one epoch"]
STAGES: dict[str, tuple[int, int]] = {  # the ZeRO stage, and the ranks
    "no ZeRO on 1 rank": (0, 1),
    "stage 1 on 2 ranks": (1, 2),
    "stage 2 on 2 ranks": (2, 2),
    "stage 3 on 2 ranks": (3, 2),
}
FP16: dict[str, tuple[int, int]] = {
    "no ZeRO on 1 rank": (0, 1),
    "stage 1 on 2 ranks": (1, 2),
    "stage 2 on 1 rank": (2, 1),
    "stage 3 on 2 ranks": (3, 2),
}
STYLES: dict[str, tuple[int, dict[str, Any]]] = {  # the ranks, and the options
    "in epochs, steps not marked": (1, {"loop": "epochs", "mark": False}),
    "bf16, gradients in fp32, DeepSpeed's schedule": (
        1,
        {"precision": "bf16, gradients in fp32", "scheduler": "deepspeed"},
    ),
    "dropout that draws from a tracked RNG state": (1, {"tracked": True}),
    "no ZeRO on 2 ranks": (2, {"stage": 0}),
    "an optimizer that loads itself, stage 2": (2, {"stage": 2, "loads_itself": True}),
    "an optimizer that loads itself, stage 3": (2, {"stage": 3, "loads_itself": True}),
    "bf16 without ZeRO": (1, {"stage": 0, "precision": "bf16"}),
    "bf16 at stage 2, offloaded, partly frozen": (
        2,
        {"stage": 2, "precision": "bf16", "offload": True, "frozen": True},
    ),
    "bf16 at stage 3, partly frozen": (2, {"stage": 3, "precision": "bf16", "frozen": True}),
}


class TestDeepSpeed(AdapterSuite):
    function = train
    steps_per_epoch = 12
    save_every = 3
    everything = MappingProxyType({"augment": True, "report": True})
    components = (
        "model",
        "optimizer",
        "lr_scheduler",
        "ema",
        "data",
        "rng",
        "progress",
        "best_metric",
        "callbacks/deepspeed",
        "extras",
    )
    preload = DEEPSPEED

    @pytest.mark.quick(
        "no ZeRO on 1 rank-mid-epoch 1",
        "stage 1 on 2 ranks-on the boundary",
        "stage 2 on 2 ranks-twice*",
        "stage 3 on 2 ranks-mid-epoch 1",
    )
    @pytest.mark.parametrize("kill", KILLS)
    @pytest.mark.parametrize("stage", STAGES)
    def test_every_stage_continues_exactly(self, kit: Kit, stage: str, kill: str) -> None:
        number, world_size = STAGES[stage]
        kit.assert_exact(self.cell(kill, {"stage": number}, world_size=world_size))

    @pytest.mark.quick("stage 3")
    @pytest.mark.parametrize("stage", range(4), ids="stage {}".format)
    def test_sums_over_four_ranks_continue_exactly(self, kit: Kit, stage: int) -> None:
        # The first kill comes before the second iteration, in which DDP would form new buckets.
        options = {"stage": stage, "save_every": 1, "small_buckets": True}
        kills = (KillPoint.step(2), KillPoint.step(5))
        kit.assert_exact(self.cell(kills, options, world_size=4))

    @pytest.mark.parametrize(
        ("stage", "component", "named"),
        [
            (2, "model/rank_buffers", "model"),  # rank 1 is left with the buffers of rank 0
            (2, "optimizer", "optimizer"),
            (3, "model", "model"),
        ],
    )
    def test_a_part_of_each_rank_left_out_is_caught_and_named(
        self, kit: Kit, stage: int, component: str, named: str
    ) -> None:
        cell = self.cell("mid-epoch 1", {"stage": stage}, world_size=2)
        verdict, _ = kit.judge(cell, inject=component)
        assert verdict.divergence is not None
        assert (verdict.divergence.component, verdict.is_reproducible) == (named, True)

    @pytest.mark.quick("twice in one epoch")
    @pytest.mark.parametrize("kill", KILLS)
    def test_windows_of_two_continue_exactly(self, kit: Kit, kill: str) -> None:
        options = {"accumulate": 2, "augment": True, "mark": kill == "on the boundary"}
        kit.assert_exact(self.cell(kill, options))

    def test_a_window_that_goes_over_the_end_of_an_epoch_continues_exactly(self, kit: Kit) -> None:
        # 24 batches in two epochs make accumulation windows of 8, and the second is in both epochs.
        options = {"accumulate": 8, "save_every": 1, "mark": False}
        kit.assert_exact(self.cell((KillPoint.step(2),), options))

    @pytest.mark.quick(
        "in epochs, steps not marked", "bf16, gradients*", "an optimizer that loads itself, stage 3"
    )
    @pytest.mark.parametrize("style", STYLES)
    def test_every_way_to_train_continues_exactly(self, kit: Kit, style: str) -> None:
        world_size, options = STYLES[style]
        kit.assert_exact(self.cell("mid-epoch 1", options, world_size=world_size))

    @pytest.mark.full
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("stage", STAGES)
    def test_at_every_stage_what_changes_after_a_save_is_not_in_the_checkpoint(
        self, kit: Kit, stage: str, precision: str
    ) -> None:
        number, world_size = STAGES[stage]
        options = {"stage": number, "precision": precision}
        require_independent_copy(kit, self.cell(options=options, world_size=world_size), step=3)

    @pytest.mark.quick("stage 3 on 2 ranks-True")
    @pytest.mark.parametrize("async_save", [False, True])
    @pytest.mark.parametrize("stage", STAGES)
    def test_frozen_parameters_are_linked_and_continue_exactly(
        self, kit: Kit, stage: str, async_save: bool
    ) -> None:
        number, world_size = STAGES[stage]
        options = {"stage": number, "frozen": True, "width": WIDE, "async_save": async_save}
        kills = (KillPoint.step(4),) if async_save else (KillPoint.step(4), KillPoint.step(8))
        cell = self.cell(kills, {**options, "save_every": 1}, world_size=world_size)
        require_exact_and_linked(kit, cell)

    @pytest.mark.quick("stage 0")
    @pytest.mark.parametrize("stage", [0, 2], ids="stage {}".format)
    def test_a_gradient_scaler_continues_exactly_and_is_caught_when_left_out(
        self, kit: Kit, stage: int
    ) -> None:
        cell = self.cell("mid-epoch 1", {"stage": stage, "precision": "autocast"})
        kit.assert_exact(cell)
        kit.assert_caught(cell, "grad_scaler")

    @pytest.mark.quick("stage 3 on 2 ranks")
    @pytest.mark.parametrize("stage", STAGES)
    def test_what_no_state_dict_holds_continues_exactly_and_is_caught_when_left_out(
        self, kit: Kit, stage: str
    ) -> None:
        number, world_size = STAGES[stage]
        cell = self.cell("mid-epoch 1", {"stage": number, "annealed": True}, world_size=world_size)
        kit.assert_exact(cell)
        kit.assert_caught(cell, "model/attributes")

    @pytest.mark.quick("stage 3 on 2 ranks")
    @pytest.mark.parametrize("stage", FP16)
    def test_fp16_with_skipped_steps_continues_exactly(self, kit: Kit, stage: str) -> None:
        number, world_size = FP16[stage]
        self.require_exact_in_fp16(kit, {"stage": number, "precision": "fp16"}, world_size)

    @pytest.mark.full
    def test_fp16_with_the_fused_optimizer_continues_exactly(self, kit: Kit) -> None:
        compile_once("FusedAdamBuilder")
        self.require_exact_in_fp16(kit, {"stage": 0, "precision": "fp16, fused"}, 1)

    def require_exact_in_fp16(self, kit: Kit, options: dict[str, Any], world_size: int) -> None:
        kills = (KillPoint.step(6), KillPoint.step(9))
        cell = self.cell(kills, {**options, "save_every": 2}, world_size=world_size)
        kit.assert_exact(cell)
        log = kit.run_uninterrupted(cell).directory / "launch-00000-rank-00000.log"
        skipped, scale = re.findall(r"skipped (\d+), scale (.*)", log.read_text())[0]
        print(f"{options}: {skipped} steps skipped, scale {scale} at the end")
        assert int(skipped) >= len(OVERFLOWS)  # one before the kills, one after them

    @pytest.mark.quick("stage 3 on 2 ranks")
    @pytest.mark.parametrize("stage", FP16)
    def test_a_loss_scale_left_out_is_caught(self, kit: Kit, stage: str) -> None:
        number, world_size = FP16[stage]
        options = {"stage": number, "precision": "fp16", "save_every": 2}
        cell = self.cell((KillPoint.step(6),), options, world_size=world_size)
        kit.assert_caught(cell, "grad_scaler")

    def test_the_loader_that_the_engine_makes_continues_exactly(self, kit: Kit) -> None:
        # It is replayed, and reported as equivalent.
        options = {"loader": "own", "augment": True}
        kit.assert_exact(self.cell("twice in one epoch", options, world_size=2))

    @pytest.mark.full
    def test_a_cold_start_continues_exactly(self, tmp_path: Path) -> None:
        with self.new_kit(tmp_path, cold=True) as cold:
            cold.assert_exact(self.cell("mid-epoch 1", self.everything))

    @classmethod
    def steps_in_epoch(cls, options: Any, world_size: int) -> int:
        return super().steps_in_epoch(options, world_size) // options.get("accumulate", 1)
