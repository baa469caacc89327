"""Plain PyTorch and DDP: killed by SIGKILL and started again, a run ends with the same bits.

Beside the cells of the suite stand those in which every two values of two factors meet;
``--full-matrix`` runs the whole product.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from adapter_suite import AdapterSuite
from preloads import TORCH
from workloads import BATCH_SIZE, NUM_SAMPLES, train

from resumekit.testing import KILL_POINTS, KillPoint, Kit

FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    "ema": {"dropout": False, "ema": True},
    "scheduler": {"dropout": False, "scheduler": "onecycle"},
    "bf16": {"dropout": False, "amp": "bf16"},
    "fp16": {"dropout": False, "amp": "fp16"},
    "all of them": {"dropout": True, "ema": True, "scheduler": "lambda", "amp": "fp16"},
}
STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "augmented": {"augment": True},
    "accumulated": {"augment": True, "accumulate": 2},
    "in epochs with evaluation": {"augment": True, "loop": "epochs", "report": True},
}
EVERYTHING = {
    "optimizer": "adamw",
    "ema": True,
    "scheduler": "onecycle",
    "amp": "fp16",
    "augment": True,
    "report": True,
}
MATRICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "trained": {
        "kill": KILL_POINTS,
        "optimizer": ("sgd", "adamw", "adam with two groups"),
        "feature": tuple(FEATURES),
        "world_size": (1, 2),
    },
    "fed": {
        "kill": ("mid-epoch 0", "mid-epoch 1", "on the boundary", "three times"),
        "loader": ("shuffle", "generator", "replacement", "weighted", "own", "batch_sampler"),
        "workers": ("0", "2", "persistent"),
        "style": tuple(STYLES),
    },
}


class TestTorch(AdapterSuite):
    function = train
    steps_per_epoch = NUM_SAMPLES // BATCH_SIZE
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
        "extras",
    )
    world_sizes = (1, 2)
    preload = TORCH
    matrices = MATRICES

    @classmethod
    def steps_in_epoch(cls, options: Mapping[str, Any], world_size: int) -> int:
        samples = 80 if options.get("loader") == "replacement" else NUM_SAMPLES
        return samples // BATCH_SIZE // world_size // int(options.get("accumulate", 1))

    def test_without_a_place_in_memory_a_kill_costs_more_than_one_step(self, kit: Kit) -> None:
        verdict = kit.assert_exact(self.cell((KillPoint.step(2 * self.save_every - 1),)))
        assert [resume.num_repeated_steps for resume in verdict.resumes] == [self.save_every - 1]

    def test_every_way_to_train_continues_exactly(self, kit: Kit, trained: dict[str, Any]) -> None:
        options = {"optimizer": trained["optimizer"], **FEATURES[trained["feature"]]}
        kit.assert_exact(self.cell(trained["kill"], options, world_size=trained["world_size"]))

    def test_every_way_to_feed_continues_exactly(self, kit: Kit, fed: dict[str, Any]) -> None:
        options = {"loader": fed["loader"], "workers": fed["workers"], **STYLES[fed["style"]]}
        epoch = self.steps_in_epoch(options, 1)
        every = next(number for number in (3, 5, 1) if epoch % number == 0 and epoch > number)
        kit.assert_exact(self.cell(fed["kill"], {**options, "save_every": every}))

    @pytest.mark.quick("1-2")
    @pytest.mark.parametrize(("save_every", "killed_at"), [(1, 2), (2, 3)])
    def test_several_ranks_sum_gradients_in_the_order_that_they_had(
        self, kit: Kit, save_every: int, killed_at: int
    ) -> None:
        # Two ranks would not show it: a + b is b + a.
        options = {"save_every": save_every, "optimizer": "sgd"}
        cell = self.cell((KillPoint.step(killed_at),), options, world_size=4)
        kit.assert_exact(cell)
        verdict, _ = kit.judge(cell, inject="model/gradient_buckets")
        assert verdict.divergence is not None
        assert verdict.divergence.component in ("model", "optimizer", "model/gradient_buckets")

    @pytest.mark.full
    def test_a_cold_start_continues_exactly(self, tmp_path: Path) -> None:
        with self.new_kit(tmp_path, cold=True) as cold:
            cold.assert_exact(self.cell("three times", self.everything))

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_what_no_state_dict_holds_continues_exactly_and_is_caught_when_left_out(
        self, kit: Kit, world_size: int
    ) -> None:
        cell = self.cell("mid-epoch 1", {"annealed": True}, world_size=world_size)
        kit.assert_exact(cell)
        kit.assert_caught(cell, "model/attributes")
