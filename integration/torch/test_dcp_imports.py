"""A run that saved by ``dcp.save`` continues with resumekit, on as many ranks or on others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_import_workloads import BATCH, EPOCH, EPOCHS, PER_EPOCH, train
from preloads import TORCH

from resumekit.cli import main
from resumekit.testing import Cell, Kit

PRELOAD = TORCH

NUM_LEFT = (EPOCHS - EPOCH) * PER_EPOCH - BATCH


def launch(kit: Kit, ranks: int, **given: Any) -> Path:
    """The directory of a launch that came to its end."""
    run = kit.run_again(kit.new_run(Cell(train, given, ranks)))
    assert not run.failure, run.failure
    return run.directory / "training"


def stock(kit: Kit, ranks: int, **given: Any) -> Path:
    """The same of a run without resumekit, made once."""
    run = kit.run_uninterrupted(Cell(train, {"how": "stock", **given}, ranks))
    return run.directory / "training"


def notes(directory: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / f"notes-{rank}.pt", weights_only=True)
    return found


def import_it(source: Path, run: Path) -> None:
    words = ["import", str(source), str(run), "--epoch", str(EPOCH), "--batch", str(BATCH)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("optimizer", ["adamw", "groups"])
@pytest.mark.parametrize("layout", ["fsdp", "fsdp1", "tp", "ddp"])
@pytest.mark.quick("fsdp-adamw-nested")
def test_a_run_on_as_many_ranks_continues_bit_for_bit(
    kit: Kit, tmp_path: Path, layout: str, optimizer: str, flat: bool
) -> None:
    given = {"layout": layout, "optimizer": optimizer, "flat": flat}
    theirs = stock(kit, 2, **given)
    import_it(theirs / "saved", tmp_path / "run")
    ours = launch(kit, 2, how=str(tmp_path / "run"), **given)
    for rank in range(2):
        found, whole = notes(ours, rank), notes(theirs, rank)
        assert len(found["losses"]) == NUM_LEFT
        assert found["losses"] == whole["losses"][-NUM_LEFT:]
        assert all(map(torch.equal, found["samples"], whole["samples"][-NUM_LEFT:]))
        for name in ("saved", "last"):
            assert found[name] == {**found[name], **whole[name]}
    log = (ours.parent / "launch-00000-rank-00000.log").read_text()
    assert "imported from DCP checkpoint saved: no RNG state; started afresh" in log


@pytest.mark.parametrize(
    ("source", "layout", "ranks"),
    [("fsdp", "plain", 1), ("fsdp", "fsdp", 3), ("fsdp1", "fsdp1", 3), ("ddp", "tp", 2)],
)
@pytest.mark.full
def test_another_number_of_ranks_has_the_whole_state(
    kit: Kit, tmp_path: Path, source: str, layout: str, ranks: int
) -> None:
    theirs = stock(kit, 2, layout=source, optimizer="adamw")
    import_it(theirs / "saved", tmp_path / "run")
    ours = launch(kit, ranks, how=str(tmp_path / "run"), layout=layout)
    found, whole = notes(ours)["saved"], notes(theirs)["saved"]
    assert found == {**found, **whole}


def test_an_edited_shard_is_seen(kit: Kit, tmp_path: Path) -> None:
    theirs = stock(kit, 2, layout="fsdp", optimizer="adamw")
    source, run = tmp_path / "saved", tmp_path / "run"
    shutil.copytree(theirs / "saved", source)
    file = source / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    weight = notes(theirs)["saved"]["head.weight"]
    last_row = torch.tensor(weight[-34:], dtype=torch.int32).numpy().tobytes()
    at = content.index(last_row)
    content[at] ^= 1
    file.write_bytes(content)
    import_it(source, run)
    ours = notes(launch(kit, 2, how=str(run), layout="fsdp"))
    assert ours["saved"]["head.weight"] != weight
    assert ours["losses"] != notes(theirs)["losses"][-NUM_LEFT:]
