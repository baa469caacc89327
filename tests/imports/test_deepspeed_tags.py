"""Tags of DeepSpeed are read without DeepSpeed; the files are those that an export writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import ConfigurationError
from resumekit.export import export_training
from resumekit.imports.content import read_content
from resumekit.imports.deepspeed_tags import COUNTERS
from resumekit.storage.store import Store


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Store, nn.Module, torch.optim.Optimizer]:
    """A run of two steps, with two param groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    last: Any = {"params": model[2].parameters(), "lr": 0.5}
    first: Any = {"params": [*model[0].parameters(), *model[1].parameters()]}
    optimizer = torch.optim.AdamW([last, first])
    for _ in range(2):
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    return Store(tmp_path / "run"), model, optimizer


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 1), (1, 3), (2, 2), (3, 1), (3, 4)])
def test_weights_and_moments_are_whole(
    tmp_path: Path, trained: tuple[Store, nn.Module, Any], stage: int, ranks: int
) -> None:
    store, model, optimizer = trained
    step = store.open_step(store.step_names()[0])
    export_training(step, tmp_path / "out", to="deepspeed", stage=stage, ranks=ranks)
    content = read_content(tmp_path / "out")
    found, expected = content.given["model"], model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    given, expected = content.given["optimizer"], optimizer.state_dict()
    assert given["param_groups"] == expected["param_groups"]
    assert given["state"].keys() == expected["state"].keys()
    for position, values in expected["state"].items():
        assert all(torch.equal(given["state"][position][n], each) for n, each in values.items())
    assert content.all_lacks == ("state of LR scheduler", "RNG state", "position in the data")
    assert content.engine_states[COUNTERS]["global_steps"] == content.position.step


def test_what_the_script_saved_is_asked_for_or_named(
    tmp_path: Path, trained: tuple[Store, nn.Module, Any]
) -> None:
    store, _, _ = trained
    export_training(
        store.open_step(store.step_names()[0]), tmp_path / "out", to="deepspeed", stage=0, ranks=1
    )
    (path,) = (tmp_path / "out").rglob("*.pt")
    saved = torch.load(path, weights_only=True)
    saved |= {"global_steps": 7, "step": 7, "epoch": 2, "seen": 56}
    saved["ds_config"] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    torch.save(saved, path)
    content = read_content(tmp_path / "out")
    assert (content.position.step, content.named_epoch) == (7, 2)
    assert content.engine_states[COUNTERS]["gradient_accumulation_steps"] == 4
    assert content.num_batches == 28
    assert content.lacks == ("a place for 'seen'",)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mp_world_size": 2}, "tensor parallelism"),
        ({"optimizer": {"fp32_groups_flat": []}}, "stage 0 in 16 bits with a fused optimizer"),
        ({"module": None}, "so not one as a checkpoint of DeepSpeed"),
    ],
)
def test_other_kinds_are_refused(
    tmp_path: Path,
    trained: tuple[Store, nn.Module, Any],
    change: dict[str, Any],
    error: str,
) -> None:
    store, _, _ = trained
    step = store.open_step(store.step_names()[0])
    export_training(step, tmp_path / "out", to="deepspeed", stage=0, ranks=1)
    (path,) = (tmp_path / "out").rglob("*.pt")
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, **change}, path)
    with pytest.raises(ConfigurationError, match=error):
        read_content(tmp_path / "out")


ONE, NEXT = torch.ones(2), torch.ones(2) + 2.0**-12  # one in bf16


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [
        ([[ONE, 2 * ONE, NEXT]], None),
        ([[2 * ONE], [ONE, NEXT]], None),
        ([[ONE, 2 * ONE], [NEXT]], "equal in 16 bits: first, last"),
        ([[4 * ONE, 3 * ONE, ONE, NEXT]], "equal in 16 bits: first, last"),
        ([[5 * ONE]], "not in the module"),
    ],
)
def test_fp32_weights_have_the_names_of_those_in_16_bits(
    tmp_path: Path, groups: list[list[torch.Tensor]], wrong: str | None
) -> None:
    module = {"first": ONE, "other": 3 * ONE, "middle": 2 * ONE, "next": 4 * ONE, "last": ONE}
    module["tied"] = module["middle"]
    low = {name: each.bfloat16() for name, each in module.items()}
    optimizer = {
        "fp32_groups": groups,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "dynamic_loss_scale": False,
    }
    counts = {"global_steps": 1, "global_samples": 1, "skipped_steps": 0, "ds_config": {}}
    ranks = {"dp_world_size": 1, "mp_world_size": 1, "lr_scheduler": None}
    saved = {"module": low, "optimizer": optimizer, **counts, **ranks}
    torch.save(saved, tmp_path / "mp_rank_00_model_states.pt")
    if wrong is not None:
        with pytest.raises(ConfigurationError, match=wrong):
            read_content(tmp_path)
        return
    found = read_content(tmp_path).given["model"]
    assert found["other"].dtype == torch.bfloat16
    assert torch.equal(found["first"], ONE)
    assert torch.equal(found["last"], NEXT)
    assert torch.equal(found["tied"], found["middle"])
