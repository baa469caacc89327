"""Lightning with FSDP2 and with DeepSpeed's ZeRO: killed, it continues with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from preloads import ALL

pytest.importorskip("lightning")
pytest.importorskip("deepspeed")

from lightning_sharded_workloads import GATHERED, train

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL
# An epoch has 6 steps on two ranks.
KILLS = {
    "mid-epoch 0": (KillPoint.step(4),),
    "on the boundary": (KillPoint.checkpoint(6),),
    "twice in one epoch": (KillPoint.step(8), KillPoint.step(11)),
}


def cell(kills: tuple[KillPoint, ...], **options: Any) -> Cell:
    return Cell(train, options, 2, kills)


@pytest.mark.quick("FSDP2-twice in one epoch", "ZeRO-2-on the boundary")
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("sharding", ["FSDP2", "ZeRO-2"])
def test_a_killed_run_continues_exactly(kit: Kit, sharding: str, kill: str) -> None:
    kit.assert_exact(cell(KILLS[kill], sharding=sharding))


@pytest.mark.quick("ZeRO-3")
@pytest.mark.parametrize("sharding", ["ZeRO-1", "ZeRO-3"])
def test_each_stage_continues_exactly(kit: Kit, sharding: str) -> None:
    kit.assert_exact(cell(KILLS["twice in one epoch"], sharding=sharding))


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["FSDP2", "ZeRO-2"])
def test_accumulated_and_validated_it_continues_exactly(kit: Kit, sharding: str) -> None:
    options = {"sharding": sharding, "accumulate": 2, "validate": True, "save_every": 1}
    kit.assert_exact(cell((KillPoint.step(2), KillPoint.step(4)), **options))


@pytest.mark.quick("FSDP2-optimizer", "ZeRO-2-optimizer")
@pytest.mark.parametrize("component", ["optimizer", "rng"])
@pytest.mark.parametrize("sharding", ["FSDP2", "ZeRO-2"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, sharding: str, component: str) -> None:
    kit.assert_caught(cell((KillPoint.step(5),), sharding=sharding), component)


# Whatever it imports, neither of the two is there.
ALONE = (
    "import sys; sys.modules.update({'deepspeed': None, 'lightning': None}); "
    "from resumekit.cli import main; sys.exit(main())"
)


@pytest.mark.quick("FSDP2")
@pytest.mark.parametrize("sharding", ["ZeRO-2", "ZeRO-3", "FSDP2"])
def test_an_export_has_the_weights_by_the_modules_own_names(
    kit: Kit, tmp_path: Path, sharding: str
) -> None:
    from safetensors.torch import load_file

    run = kit.run_again(kit.new_run(cell((), sharding=sharding, epochs=1)))
    assert not run.failure, run.failure
    file = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", ALONE, "export", str(run.directory / "training"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    gathered = json.loads((run.directory / GATHERED).read_text(encoding="utf-8"))
    found = load_file(file)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert found.keys() == gathered.keys()
    for name, weights in gathered.items():
        assert torch.equal(found[name], torch.tensor(weights)), name


def test_ranks_that_share_a_batch_are_refused_and_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(cell((), sharding="tensor parallel")))
    assert "ConfigurationError" in run.failure
    assert "tensor parallelism (ModelParallelStrategy)" in run.failure
