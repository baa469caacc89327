"""The Trainer: killed by SIGKILL and started again, a run ends with the same bits.

Beside the cells of the suite stand those in which every two values of two factors meet;
``--full-matrix`` runs the whole product.
"""

from __future__ import annotations

from typing import Any

import pytest
from adapter_suite import AdapterSuite
from preloads import TRAINER

pytest.importorskip("transformers")

from transformers_workloads import train

from resumekit.testing import KILL_POINTS, KillPoint, Kit

FEEDS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "grouped by length": {"sampling": "group_by_length"},
    "augmented": {"augment": True},
    "augmented by 2 workers": {"augment": True, "workers": "2"},
    "augmented by persistent workers": {"augment": True, "workers": "persistent"},
}
STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "evaluated by steps": {"evaluate": "steps"},
    "evaluated by epochs": {"evaluate": "epoch"},
    "beside the Trainer's own saving": {"own_saving": True},
}


class TestTransformers(AdapterSuite):
    function = train
    steps_per_epoch = 12
    save_every = 3
    everything = {"augment": True, "scaler": True, "evaluate": "steps"}
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
        "callbacks/trainer_state",
        "callbacks/trainer",
        "callbacks/EarlyStoppingCallback-0",
        "extras",
    )
    world_sizes = (1, 2)
    preload = TRAINER
    matrices = {
        "combination": {
            "kill": KILL_POINTS,
            "feed": tuple(FEEDS),
            "style": tuple(STYLES),
        }
    }

    def test_every_way_to_feed_and_train_continues_exactly(
        self, kit: Kit, combination: dict[str, str]
    ) -> None:
        options = {**FEEDS[combination["feed"]], **STYLES[combination["style"]]}
        if options.get("workers") == "persistent":
            options["evaluate"] = "no"  # reported as lost, see test_transformers.py
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

    def test_a_run_that_ends_within_an_epoch_continues_exactly(self, kit: Kit) -> None:
        cell = self.cell((KillPoint.step(14), KillPoint.checkpoint(18)), {"max_steps": 18})
        kit.assert_finished(cell)
