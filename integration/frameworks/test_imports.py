"""A run that began without resumekit continues with it, from what its framework has saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloads import ALL

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

import torch
from import_workloads import (
    BATCH,
    EPOCH,
    EPOCHS,
    PER_EPOCH,
    RECORDS,
    in_accelerate,
    in_lightning,
    in_plain_pytorch,
    in_shards,
    in_trainer,
)
from pair_import_workloads import in_accelerate as a_pair_in_accelerate
from pair_import_workloads import in_lightning as a_pair_in_lightning
from safetensors.torch import load_file, save_file

from resumekit.cli import main
from resumekit.testing import Cell, Kit

PRELOAD = ALL
ADAPTER = "adapter_model.safetensors"

Records = dict[str, list[Any]]


def launch(kit: Kit, train: Callable[..., None], *, ranks: int = 1, **given: Any) -> Path:
    """The directory of a run that was launched once and came to its end."""
    run = kit.run_again(kit.new_run(Cell(train, given, ranks)))
    assert not run.failure, run.failure
    return run.directory / "training"


def stock(kit: Kit, train: Callable[..., None], *, ranks: int = 1, **given: Any) -> Path:
    """The directory of an uninterrupted run without resumekit, made once."""
    return (
        kit.run_uninterrupted(Cell(train, {"how": "stock", **given}, ranks)).directory / "training"
    )


def records(directory: Path, rank: int = 0) -> Records:
    found: Records = torch.load(directory / RECORDS.format(rank), weights_only=True)
    return found


def log_of(directory: Path) -> str:
    return (directory.parent / "launch-00000-rank-00000.log").read_text()


def is_same(found: Records, whole: Records, *, names: tuple[str, ...] = ()) -> bool:
    """Whether a run that was continued has the last steps of the uninterrupted one, bit for bit."""
    for name in names or ("losses", "samples", "weights"):
        here, there = found[name], whole[name][-len(found[name]) :]
        equal = torch.equal if name != "losses" else float.__eq__
        if not here or not all(map(equal, here, there)):
            return False
    return True


def import_command(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["import", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# ---------------------------------------------------------------- the Trainer


@pytest.mark.parametrize(("step", "accumulate"), [(14, 1), (20, 1), (7, 2)])
@pytest.mark.quick("14-1")
def test_a_trainer_continues_as_by_its_own_resume(kit: Kit, step: int, accumulate: int) -> None:
    given = {"accumulate": accumulate}
    theirs = stock(kit, in_trainer, **given)
    source = str(theirs / "output" / f"checkpoint-{step}")
    whole = records(theirs)
    resumed = records(launch(kit, in_trainer, how="own", source=source, **given))
    ours = launch(kit, in_trainer, how="resumekit", source=source, **given)
    found = records(ours)
    assert len(found["weights"]) == len(whole["weights"]) - step == len(resumed["weights"])
    assert is_same(found, whole)
    assert is_same(resumed, whole)
    log = log_of(ours)
    assert log.count(f"imported from Trainer checkpoint-{step}\n") == 1
    assert "was None in the checkpoint" not in log


def test_two_ranks_of_a_trainer_continue(kit: Kit) -> None:
    theirs = stock(kit, in_trainer, ranks=2)
    source = str(theirs / "output" / "checkpoint-7")
    ours = launch(kit, in_trainer, ranks=2, how="resumekit", source=source)
    for rank in range(2):
        found = records(ours, rank)
        assert len(found["weights"]) == 8
        assert is_same(found, records(theirs, rank))


@pytest.mark.full
def test_only_the_batch_that_was_fetched_ahead_has_other_random_numbers(kit: Kit) -> None:
    theirs = stock(kit, in_trainer, augment=True)
    source = str(theirs / "output" / "checkpoint-14")
    whole = records(theirs)["samples"][14:]
    found = records(launch(kit, in_trainer, how="resumekit", source=source, augment=True))
    resumed = records(launch(kit, in_trainer, how="own", source=source, augment=True))
    same = [torch.equal(*pair) for pair in zip(found["samples"], whole, strict=True)]
    assert same == [False, *[True] * 15]
    later = {"samples": resumed["samples"][1:]}
    assert not is_same(later, {"samples": whole}, names=("samples",))


def test_a_position_or_a_random_state_that_is_missing_is_seen(kit: Kit, tmp_path: Path) -> None:
    theirs = stock(kit, in_trainer, accumulate=1)
    source = tmp_path / "checkpoint-14"
    shutil.copytree(theirs / "output" / "checkpoint-14", source)
    (source / "rng_state.pth").unlink()
    ours = launch(kit, in_trainer, how="resumekit", source=str(source))
    assert "imported from Trainer checkpoint-14: no RNG state; started afresh" in log_of(ours)
    assert is_same(records(ours), records(theirs), names=("samples",))
    assert not is_same(records(ours), records(theirs), names=("losses",))

    shutil.copy(theirs / "output" / "checkpoint-14" / "rng_state.pth", source)
    state = json.loads((source / "trainer_state.json").read_text())
    state["epoch"] = 1.0  # as if all of its batches were to come
    (source / "trainer_state.json").write_text(json.dumps(state))
    moved = records(launch(kit, in_trainer, how="resumekit", source=str(source)))
    assert not is_same(moved, records(theirs), names=("samples",))


@pytest.mark.full
def test_an_adapter_continues_on_the_base_model_of_the_script(kit: Kit, tmp_path: Path) -> None:
    theirs = stock(kit, in_trainer, lora=True)
    source = theirs / "output" / "checkpoint-14"
    assert not (source / "model.safetensors").exists()
    ours = launch(kit, in_trainer, how="resumekit", source=str(source), lora=True)
    assert is_same(records(ours), records(theirs))
    assert "checkpoint-14: no weights of the base model, which are the script's" in log_of(ours)
    edited = tmp_path / "checkpoint-14"
    shutil.copytree(source, edited)
    weights = load_file(edited / ADAPTER)
    save_file({n: each + (each == each.max()) for n, each in weights.items()}, edited / ADAPTER)
    moved = launch(kit, in_trainer, how="resumekit", source=str(edited), lora=True)
    assert not is_same(records(moved), records(theirs), names=("losses",))


# ---------------------------------------------------------------- a plain loop


def test_a_plain_loop_continues_at_the_epoch_that_it_is_given(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = stock(kit, in_plain_pytorch)
    source, run = theirs / "epoch-0.pt", tmp_path / "run"
    assert import_command(source, run) == 2
    assert "--epoch 0 or --epoch 1" in capsys.readouterr().err
    assert import_command(source, run, "--epoch", "1") == 0
    assert "no RNG state, a place for 'best_accuracy'" in capsys.readouterr().out
    whole = records(theirs)
    assert is_same(records(launch(kit, in_plain_pytorch, how="own", source=str(source))), whole)
    ours = launch(kit, in_plain_pytorch, how="resumekit", source=str(run))
    found = records(ours)
    assert len(found["losses"]) == 2 * PER_EPOCH
    assert is_same(found, whole)
    assert import_command(source, run, "--epoch", "1") == 2
    assert "expected a run directory without checkpoints" in capsys.readouterr().err


@pytest.mark.full
def test_a_model_in_shards_takes_over_whole_tensors(kit: Kit, tmp_path: Path) -> None:
    source, run = stock(kit, in_plain_pytorch) / "epoch-0.pt", tmp_path / "run"
    assert import_command(source, run, "--epoch", "1") == 0
    directory = launch(kit, in_shards, ranks=2, source=str(run))
    weights, moments = torch.load(directory / "state.pt", weights_only=True)
    saved = torch.load(source, weights_only=True)
    expected = saved["model_state_dict"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], each) for name, each in expected.items())
    for index, values in saved["optimizer_state_dict"]["state"].items():
        assert all(torch.equal(moments[index][name], each) for name, each in values.items())


# ---------------------------------------------------------------- Lightning


@pytest.mark.parametrize("step", [14, 20])
@pytest.mark.quick("14")
def test_lightning_continues_where_its_own_resume_repeats_samples(kit: Kit, step: int) -> None:
    theirs = stock(kit, in_lightning)
    source = str(theirs / f"step={step}.ckpt")
    whole = records(theirs)
    resumed = records(launch(kit, in_lightning, how="own", source=source))
    ours = launch(kit, in_lightning, how="resumekit", source=source)
    found = records(ours)
    assert len(found["weights"]) == len(whole["weights"]) - step
    assert is_same(found, whole)
    assert is_same(resumed, whole) == (step == 20)  # in the epoch it starts at the first sample
    assert f"imported from Lightning step={step}.ckpt: no RNG state" in log_of(ours)


# ---------------------------------------------------------------- Accelerate


def test_accelerate_continues_with_the_dropout_that_its_own_resume_loses(
    kit: Kit, tmp_path: Path
) -> None:
    theirs = stock(kit, in_accelerate)
    source, run, whole = theirs / "state", tmp_path / "run", records(theirs)
    resumed = records(launch(kit, in_accelerate, how="own", source=str(source)))
    assert is_same(resumed, whole, names=("samples",))
    assert not is_same(resumed, whole, names=("losses",))
    assert import_command(source, run, "--epoch", str(EPOCH), "--batch", str(BATCH)) == 0
    found = records(launch(kit, in_accelerate, how="resumekit", source=str(run)))
    assert len(found["losses"]) == len(whole["losses"]) - EPOCH * PER_EPOCH - BATCH
    assert is_same(found, whole)


# ---------------------------------------------------------------- several objects


@pytest.mark.full
def test_two_models_and_optimizers_of_accelerate_keep_their_order(kit: Kit, tmp_path: Path) -> None:
    theirs, run = stock(kit, a_pair_in_accelerate), tmp_path / "run"
    position = ("--epoch", str(EPOCH), "--batch", str(BATCH))
    assert import_command(theirs / "state", run, *position) == 0
    found = records(launch(kit, a_pair_in_accelerate, how="resumekit", source=str(run)))
    assert len(found["losses"]) == (EPOCHS - EPOCH) * PER_EPOCH - BATCH
    assert is_same(found, records(theirs))
    other = tmp_path / "other"
    assert import_command(theirs / "state", other, *position) == 0
    given: dict[str, Any] = {"how": "resumekit", "source": str(other), "swapped": True}
    assert not is_same(records(launch(kit, a_pair_in_accelerate, **given)), records(theirs))


@pytest.mark.full
def test_two_optimizers_and_schedulers_of_lightning_keep_their_order(kit: Kit) -> None:
    theirs = stock(kit, a_pair_in_lightning)
    source = theirs / "step=28.ckpt"  # of each optimizer, so the 14th batch
    ours = launch(kit, a_pair_in_lightning, how="resumekit", source=str(source))
    found = records(ours)
    assert len(found["losses"]) == EPOCHS * PER_EPOCH - 14
    assert is_same(found, records(theirs))
