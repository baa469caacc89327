"""``dcp.load`` of checkpoints of ZeRO in one process without DeepSpeed's state."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from zero_workloads import MOMENTS, Classifier, digest_of, param_groups, take_over

from resumekit.dcp import StorageReader
from resumekit.testing import Cell, Kit

PRELOAD = DEEPSPEED

WRITTEN: tuple[dict[str, Any], ...] = (
    {"stage": 0, "tied": True},
    {"stage": 1},
    {"stage": 2, "tied": True},
    {"stage": 3, "tied": True},
    {"stage": 3, "precision": "bf16"},
)


@pytest.mark.quick("{'stage': 3, 'precision': 'bf16'}")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", WRITTEN, ids=str)
def test_a_plain_process_loads_what_deepspeed_gathers(kit: Kit, options: dict[str, Any]) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, options, 2)))
    assert not run.failure, run.failure
    expected = json.loads((run.directory / "notes.jsonl").read_text())["saved"]
    torch.manual_seed(5)
    model = Classifier(tied=options.get("tied", False), frozen=False, unused=False)
    optimizer = torch.optim.AdamW(param_groups(model), lr=0.5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: Any = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=StorageReader(run.directory / "training"))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        values = optimizer.state[parameter]
        found[name] = digest_of(parameter)
        found |= {f"{name}.{moment}": digest_of(values[moment]) for moment in MOMENTS}
    steps = {int(values["step"]) for values in optimizer.state.values()}
    found["steps"] = ", ".join(map(str, sorted(steps)))
    assert found == {name: value for name, value in expected.items() if name != "loss_scale"}
    assert [group["lr"] for group in optimizer.param_groups] != [0.5, 0.5]
