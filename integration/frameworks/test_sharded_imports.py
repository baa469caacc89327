"""A sharded run that began without resumekit continues with it, from shards of its framework."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloads import ALL

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import torch
from import_workloads import RECORDS
from sharded_import_workloads import (
    BATCH,
    EPOCH,
    EPOCHS,
    OF_RANKS,
    PER_EPOCH,
    in_accelerate,
    in_lightning,
    in_trainer,
)

from resumekit.cli import main
from resumekit.testing import Cell, Kit

PRELOAD = ALL

STEP = EPOCH * PER_EPOCH + BATCH
NUM_LEFT = EPOCHS * PER_EPOCH - STEP


def launch(kit: Kit, train: Callable[..., None], **given: Any) -> Path:
    """The directory of a run of two ranks that was launched once and came to its end."""
    run = kit.run_again(kit.new_run(Cell(train, given, 2)))
    assert not run.failure, run.failure
    return run.directory / "training"


def stock(kit: Kit, train: Callable[..., None], **given: Any) -> Path:
    """The directory of an uninterrupted run without resumekit, made once."""
    return kit.run_uninterrupted(Cell(train, {"how": "stock", **given}, 2)).directory / "training"


def is_same(here: Path, there: Path, names: str = "losses samples weights") -> bool:
    """Whether all ranks have the last steps of the uninterrupted run, bit for bit."""
    for rank in range(2):
        found, whole = (
            torch.load(each / RECORDS.format(rank), weights_only=True) for each in (here, there)
        )
        for name in names.split():
            assert len(found[name]) == NUM_LEFT
            pairs = zip(found[name], whole[name][-NUM_LEFT:], strict=True)
            if not all(torch.equal(*map(torch.as_tensor, pair)) for pair in pairs):
                return False
    return True


def names_in(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def log_of(directory: Path) -> str:
    return (directory.parent / "launch-00000-rank-00000.log").read_text()


def import_it(source: Path, run: Path, code: int = 0) -> None:
    words = ["import", str(source), str(run), "--epoch", str(EPOCH), "--batch", str(BATCH)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@pytest.mark.parametrize(
    ("sharding", "kind"),
    # torch 2.13: FSDP1 that gathers on CPUs ends with a segmentation fault, also without us.
    [("FSDP2", SHARDED), ("FSDP2", FULL), ("FSDP1", SHARDED)],
)
@pytest.mark.full
def test_accelerate_continues_with_the_dropout_of_each_rank(
    kit: Kit, tmp_path: Path, sharding: str, kind: str
) -> None:
    given = {"sharding": sharding, "kind": kind}
    theirs, run = stock(kit, in_accelerate, **given), tmp_path / "run"
    source = theirs / "state"
    resumed = launch(kit, in_accelerate, how="own", source=str(source), **given)
    assert is_same(resumed, theirs, "samples")
    assert not is_same(resumed, theirs, "losses")
    import_it(source, run)
    ours = launch(kit, in_accelerate, how="resumekit", source=str(run), **given)
    assert is_same(ours, theirs)
    assert "imported from Accelerate state: no callbacks/accelerator, callbacks/loaders;" in log_of(
        ours
    )


def test_files_of_each_rank_continue_on_as_many_ranks(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"sharding": "FSDP2", "kind": OF_RANKS}
    theirs = stock(kit, in_accelerate, **given)
    source = tmp_path / "state"
    shutil.copytree(theirs / "state", source)
    assert {"optimizer_0_rank1.bin", "pytorch_model_fsdp_0_rank1.bin"} <= names_in(source)
    import_it(source, tmp_path / "run")
    ours = launch(kit, in_accelerate, how="resumekit", source=str(tmp_path / "run"), **given)
    assert is_same(ours, theirs)
    assert "imported from Accelerate state: no RNG state" in log_of(ours)

    (source / "optimizer_0_rank1.bin").unlink()
    import_it(source, tmp_path / "torn", 2)
    assert "0.weight.exp_avg: " in capsys.readouterr().err
    file = source / "pytorch_model_fsdp_0_rank1.bin"
    shutil.copyfile(theirs / "state" / "optimizer_0_rank1.bin", source / "optimizer_0_rank1.bin")
    edited = torch.load(file, weights_only=True)
    edited["4.bias"].to_local()[-1] += 0.5
    torch.save(edited, file)
    import_it(source, tmp_path / "edited")
    other = launch(kit, in_accelerate, how="resumekit", source=str(tmp_path / "edited"), **given)
    assert is_same(other, theirs, "samples")
    assert not is_same(other, theirs, "losses")


@pytest.mark.full
def test_files_of_each_rank_are_loaded_by_accelerate_alike(kit: Kit) -> None:
    given = {"sharding": "FSDP2", "kind": OF_RANKS}
    theirs = stock(kit, in_accelerate, **given)
    by_accelerate = launch(kit, in_accelerate, how="own", source=str(theirs / "state"), **given)
    assert is_same(by_accelerate, theirs)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["LOCAL_STATE_DICT", OF_RANKS])
def test_files_of_ranks_under_fsdp1_are_loaded_neither_by_accelerate_nor_here(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    given = {"sharding": "FSDP1", "kind": kind}
    source = stock(kit, in_accelerate, **given) / "state"
    by_accelerate = kit.run_again(
        kit.new_run(Cell(in_accelerate, {"how": "own", "source": str(source), **given}, 2))
    )
    assert "Weights only load failed" in by_accelerate.failure
    import_it(source, tmp_path / "run", 2)
    assert "ShardedTensors of FSDP1, which need the process group" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [SHARDED, FULL])
@pytest.mark.full
def test_a_trainer_continues_as_by_its_own_resume(kit: Kit, kind: str) -> None:
    theirs = stock(kit, in_trainer, kind=kind)
    source = str(theirs / "output" / f"checkpoint-{STEP}")
    assert is_same(launch(kit, in_trainer, how="own", source=source, kind=kind), theirs)
    ours = launch(kit, in_trainer, how="resumekit", source=source, kind=kind)
    assert is_same(ours, theirs)
    # Where it saves shards, the Trainer leaves its arguments out.
    lacks = ": no gradient_accumulation_steps (taken to be 1)" if kind == SHARDED else "\n"
    assert f"imported from Trainer checkpoint-{STEP}{lacks}" in log_of(ours)


def test_lightning_continues_where_its_own_resume_repeats_samples(kit: Kit, tmp_path: Path) -> None:
    theirs = stock(kit, in_lightning)
    source = theirs / f"step={STEP}.ckpt"
    assert source.is_dir()
    assert not is_same(launch(kit, in_lightning, how="own", source=str(source)), theirs)
    ours = launch(kit, in_lightning, how="resumekit", source=str(source))
    assert is_same(ours, theirs)
    assert f"imported from Lightning step={STEP}.ckpt: no RNG state" in log_of(ours)

    edited = tmp_path / "edited.ckpt"
    shutil.copytree(source, edited)
    meta = torch.load(edited / "meta.pt", weights_only=True)
    meta["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] -= 1
    torch.save(meta, edited / "meta.pt")
    moved = launch(kit, in_lightning, how="resumekit", source=str(edited))
    found = torch.load(moved / RECORDS.format(0), weights_only=True)
    assert len(found["losses"]) == NUM_LEFT + 1
