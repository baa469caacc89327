"""The remedy for a model that Accelerate shards in another way, followed."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import DistributedType
from followed_remedies import Remedy
from preloads import ALL
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("deepspeed")

from accelerate_sharded_workloads import make_accelerator, of_type

from resumekit.adapters.accelerate import Checkpointer
from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL
NUM_STEPS = 6


def train(directory: str, **plugin: Any) -> None:
    """Trains under FSDP with these settings of the plugin."""
    torch.manual_seed(0)
    accelerator = make_accelerator("FSDP1", 1)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        **plugin,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
    )
    of_type(DistributedType.FSDP, accelerator)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader: Any = DataLoader(torch.ones(4 * NUM_STEPS, 4), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with Checkpointer(accelerator, directory, save_every=1) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=1):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
        assert checkpointer.progress.step == NUM_STEPS


@pytest.mark.remedy(
    "Pass use_orig_params=True to FullyShardedDataParallelPlugin, or fsdp_version=2"
)
def test_the_plugin_keeps_the_parameters(kit: Kit, remedy: Remedy) -> None:
    given = {"fsdp_version": 1, "use_orig_params": False}
    run = kit.run_again(kit.new_run(Cell(train, given, 2)))
    (log, _) = sorted(run.directory.glob("launch-*.log"))
    options = re.findall(r"(\w+)=(\w+)", remedy.in_text(log.read_text()))
    assert len(options) == 2
    for name, value in options:
        found = {"fsdp_version": 1, name: ast.literal_eval(value)}
        run = kit.run_again(kit.new_run(Cell(train, found, 2)), kill=KillPoint.step(3))
        assert not kit.run_again(run).failure
