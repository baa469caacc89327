"""Accelerate: killed by SIGKILL and started again, a run ends with the same bits.

Beside the cells of the suite stand those in which every two values of two factors meet;
``--full-matrix`` runs the whole product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from adapter_suite import AdapterSuite
from frozen_backbone import require_exact_and_linked
from preloads import ACCELERATE

pytest.importorskip("accelerate")

from accelerate_workloads import train

from resumekit.testing import KILL_POINTS, KillPoint, Kit

FEEDS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "from a generator": {"loader": "generator"},
    "seedable": {"loader": "seedable"},
    "augmented": {"augment": True},
    "augmented by 2 workers": {"augment": True, "workers": "2"},
    "augmented by persistent workers": {"augment": True, "workers": "persistent"},
    "stateful": {"stateful": True, "augment": True},
    "stateful with 2 workers": {"stateful": True, "augment": True, "workers": "2"},
    "dispatched": {"dispatch": True, "augment": True},
}
# How Accelerate shards a map-style dataset; 6 steps an epoch, or 12 where batches are split.
SHARDINGS: dict[str, dict[str, Any]] = {
    "seedable": {"loader": "seedable"},
    "augmented": {"augment": True},
    "stateful": {"stateful": True, "augment": True},
    "split batches": {"split": True, "augment": True},
    "uneven batches": {"even": False, "augment": True},
    "dispatched": {"dispatch": True, "augment": True},
    "dispatched and split, by 2 workers": {
        "dispatch": True,
        "split": True,
        "augment": True,
        "workers": "2",
    },
    "dispatched, stateful": {"dispatch": True, "stateful": True, "augment": True},
    "dispatched, from a generator": {"dispatch": True, "loader": "generator"},
}
STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scheduler registered": {"scheduler": "registered"},
    "bf16": {"precision": "bf16"},
    "gradient scaler": {"scaler": True},
    "in epochs, steps not marked": {"loop": "epochs", "mark": False},
}
EVERYTHING = {"augment": True, "scaler": True, "report": True}
MATRICES = {"combination": {"kill": KILL_POINTS, "feed": tuple(FEEDS), "style": tuple(STYLES)}}


class TestAccelerate(AdapterSuite):
    function = train
    steps_per_epoch = 12
    save_every = 3
    everything = EVERYTHING
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
        "callbacks/accelerator",
        "callbacks/Curriculum-0",
        "extras",
    )
    world_sizes = (1, 2)
    preload = ACCELERATE
    matrices = MATRICES

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
        marks = {"mark": kill == "boundary"}
        options = {"accumulate": accumulate, "augment": True, "save_every": 1, **marks}
        kit.assert_exact(self.cell(kills, options))

    @classmethod
    def steps_in_epoch(cls, options: Mapping[str, Any], world_size: int) -> int:
        return super().steps_in_epoch(options, 1 if options.get("split") else world_size)

    @pytest.mark.quick(
        "augmented-on the boundary",
        "split batches-mid-epoch 1",
        "uneven batches-mid-epoch 1",
        "dispatched-mid-epoch 1",
        "dispatched and split, by 2 workers-mid*",
    )
    @pytest.mark.parametrize("kill", ["mid-epoch 1", "on the boundary"])
    @pytest.mark.parametrize("sharding", SHARDINGS)
    def test_two_ranks_fed_otherwise_continue_exactly(
        self, kit: Kit, sharding: str, kill: str
    ) -> None:
        kit.assert_exact(self.cell(kill, SHARDINGS[sharding], world_size=2))

    @pytest.mark.full
    def test_four_ranks_sum_gradients_in_the_order_that_they_had(self, kit: Kit) -> None:
        cell = self.cell((KillPoint.step(2),), {"save_every": 1}, world_size=4)
        kit.assert_exact(cell)
        verdict, _ = kit.judge(cell, inject="model/gradient_buckets")
        assert verdict.divergence is not None

    @pytest.mark.quick("2")
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_what_no_state_dict_holds_continues_exactly_and_is_caught_when_left_out(
        self, kit: Kit, world_size: int
    ) -> None:
        cell = self.cell("mid-epoch 1", {"annealed": True}, world_size=world_size)
        kit.assert_exact(cell)
        kit.assert_caught(cell, "model/attributes")

    @pytest.mark.full
    @pytest.mark.parametrize("async_save", [False, True])
    def test_a_frozen_backbone_is_linked_and_continues_exactly(
        self, kit: Kit, async_save: bool, world_size: int
    ) -> None:
        options = {"frozen": True, "save_every": 1, "async_save": async_save}
        kills = (KillPoint.step(4), KillPoint.step(8))
        require_exact_and_linked(kit, self.cell(kills, options, world_size=world_size))
