"""Exports of several kinds of models, from 1, 2 and 4 ranks, read by the readers of the formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_workloads import train
from preloads import TORCH
from safetensors.torch import load_file

from resumekit.cli import main
from resumekit.testing import Cell, Kit

PRELOAD = (*TORCH, "tensor_classes")
NEEDS = {"lora": "peft", "int8": "torchao"}

Tensors = Mapping[str, torch.Tensor]


def read_torch(path: Path, _: Tensors) -> Tensors:
    found: Tensors = torch.load(path, weights_only=True)
    return found


def read_dcp(path: Path, expected: Tensors) -> Tensors:
    found = {name: torch.zeros_like(each) for name, each in expected.items()}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def read_shards(path: Path, _: Tensors) -> Tensors:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


READERS: dict[str, tuple[tuple[str, ...], Callable[[Path, Tensors], Tensors]]] = {
    "safetensors": ((), lambda path, _: load_file(path)),
    "shards": (("--max-shard-size", "10KB"), read_shards),
    "torch": (("--to", "torch"), read_torch),
    "dcp": (("--to", "dcp"), read_dcp),
}


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """The names whose type or bits are not the same."""
    assert found.keys() == expected.keys()
    same = (
        found[name].dtype == each.dtype and torch.equal(found[name], each)
        for name, each in expected.items()
    )
    return [name for name, is_same in zip(expected, same, strict=True) if not is_same]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.quick("2-bf16")
@pytest.mark.parametrize("kind", ["tied", "frozen", "bf16", "lora", "int8"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_readers_of_the_formats_find_the_bits_of_the_model(
    kit: Kit, tmp_path: Path, kind: str, num_ranks: int
) -> None:
    if not find_spec(NEEDS.get(kind, "torch")):
        pytest.skip(f"{NEEDS[kind]} is not installed")
    run = kit.run_again(kit.new_run(Cell(train, {"kind": kind}, num_ranks)))
    assert not run.failure, run.failure
    training = run.directory / "training"
    before, after = (torch.load(f"{training}-step-{n}.pt") for n in (1, 2))
    for name, (options, read) in READERS.items():
        path = tmp_path / name
        arguments = ["export", str(training), str(path), "--dtype", "as-trained", *options]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        found = read(path, after)
        assert differing(found, after) == [], name
        assert differing(found, before), f"{name}: the control has no other weights"
