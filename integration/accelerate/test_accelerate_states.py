"""``save_state`` and ``load_state`` beside a Checkpointer: exact, named on, and read by others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from preloads import ACCELERATE

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_states_workloads import prepared, train

from resumekit.adapters.accelerate import Checkpointer
from resumekit.prove import compare
from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.kit import Run

PRELOAD = ACCELERATE
# A step is marked after its folder was written: a kill there leaves a folder without a checkpoint.
BETWEEN = KillPoint.step(6)
KILLS = {
    "between two saves": (KillPoint.step(5),),
    "after a checkpoint": (KillPoint.checkpoint(6),),
    "between a folder and its checkpoint, twice": (BETWEEN, KillPoint.step(9)),
    "three times": (KillPoint.step(4), KillPoint.step(8), KillPoint.step(14)),
}


@pytest.fixture(autouse=True)
def _a_new_process() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.mark.quick("load_state-between a*", "no load_state-after a checkpoint")
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("load", [True, False], ids=["load_state", "no load_state"])
def test_a_run_that_saves_by_save_state_continues_exactly(kit: Kit, kill: str, load: bool) -> None:
    kit.assert_exact(Cell(train, {"load": load}, 1, KILLS[kill]))


@pytest.mark.quick("model", "callbacks/Best-0")
@pytest.mark.parametrize("component", ["model", "callbacks/Best-0", "rng", "data"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(Cell(train, {}, 1, (KillPoint.step(5),)), component)


@pytest.mark.full
def test_two_ranks_that_save_by_save_state_continue_exactly(kit: Kit) -> None:
    kit.assert_exact(Cell(train, {"epochs": 3}, 2, (BETWEEN, KillPoint.step(11))))


def numbers(run: Run) -> list[int]:
    folders = Path(run.directory, "training", "checkpoints").glob("checkpoint_*")
    return sorted(int(folder.name.removeprefix("checkpoint_")) for folder in folders)


@pytest.mark.full
@pytest.mark.parametrize("limit", [None, 2])
def test_the_names_of_save_state_go_on_and_its_limit_keeps_the_newest(
    kit: Kit, limit: int | None
) -> None:
    options = {"naming": "automatic", "limit": limit}
    kills = (BETWEEN, KillPoint.checkpoint(9), KillPoint.step(14))
    verdict, run = kit.judge(Cell(train, options, 1, kills))
    assert verdict.exact, str(verdict)
    # 3 | 6 (killed before its checkpoint) | 6 once more, 9 | 12 | 15, 18, 21, 24
    made = list(range(9))
    assert numbers(run) == (made if limit is None else made[-2:])


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FOLDER, OURS = "training/states/step_6", "training/run/step-00000006"


@pytest.mark.quick("training/states/step_6/model*")
@pytest.mark.parametrize(
    ("what", "harm", "step"),
    [
        (f"{FOLDER}/model.safetensors", truncated, 6),
        (f"{FOLDER}/optimizer.bin", Path.unlink, 6),
        (f"{FOLDER}/custom_checkpoint_0.pkl", truncated, 6),
        (f"{FOLDER}/resumekit.json", truncated, 6),
        (f"{OURS}/model/rank-00000.safetensors", damaged, 3),
        (f"{OURS}/model/rank-00000.safetensors", truncated, 3),
        (f"{OURS}/manifest.json", truncated, 3),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_damage_costs_nothing_or_sends_the_run_to_the_checkpoint_before(
    kit: Kit, what: str, harm: Callable[[Path], None], step: int
) -> None:
    cell = Cell(train, {})
    run = kit.run_again(kit.new_run(cell), kill=KillPoint.step(7))
    harm(run.directory / what)
    run = kit.run_again(run)
    assert not run.failure, run.failure
    verdict = compare(kit.run_uninterrupted(cell).trace, run.trace, expect_resume=True)
    assert verdict.exact, str(verdict)
    assert [resume.step for resume in verdict.resumes] == [step]


def test_plain_accelerate_reads_what_was_written(tmp_path: Path) -> None:
    train(str(tmp_path), epochs=1)
    assert json.loads((tmp_path / "states/step_12/resumekit.json").read_text())["step"] == 12
    _forget()
    accelerator, best, model, *_ = prepared(str(tmp_path))
    accelerator.load_state(str(tmp_path / "states/step_12"))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    plain_best = best.loss
    _forget()
    accelerator, best, model, *_ = prepared(str(tmp_path))
    with Checkpointer(accelerator, tmp_path / "run") as checkpointer:
        assert checkpointer.resume().step == 12
    assert best.loss == plain_best
    assert all(torch.equal(plain[name], value) for name, value in model.state_dict().items())


@pytest.mark.full
def test_an_older_folder_is_gone_back_to_and_a_foreign_one_is_not_asked(tmp_path: Path) -> None:
    def step_after(folder: Path) -> int:
        _forget()
        accelerator, *_ = prepared(str(tmp_path))
        checkpointer = Checkpointer(accelerator, tmp_path / "run", keep_latest=None)
        accelerator.load_state(str(folder))
        step = checkpointer.progress.step
        checkpointer.close()
        return step

    train(str(tmp_path), epochs=1)  # keeps the checkpoints of steps 9 and 12
    train_elsewhere = tmp_path / "elsewhere"
    _forget()
    train(str(train_elsewhere), epochs=1)
    states = tmp_path / "states"
    assert step_after(states / "step_9") == 9
    assert step_after(states / "step_3") == 12  # retention has removed it: the newest
    assert step_after(train_elsewhere / "states/step_9") == 12


def test_before_there_is_a_checkpoint_load_state_loads_as_ever(tmp_path: Path) -> None:
    train(str(tmp_path), epochs=1)
    _forget()
    accelerator, best, model, *_ = prepared(str(tmp_path))
    before = model.state_dict()["0.weight"].clone()
    with Checkpointer(accelerator, tmp_path / "another run") as checkpointer:
        accelerator.load_state(str(tmp_path / "states/step_12"))
        assert best.loss < 1e9
        assert not torch.equal(before, model.state_dict()["0.weight"])
        assert checkpointer.progress.step == 0
        with pytest.raises(ValueError, match="folder does not exist"):
            accelerator.load_state(str(tmp_path / "states/step_13"))
    assert "load_state" not in vars(accelerator)


def test_outside_of_a_run_save_state_writes_no_mark(tmp_path: Path) -> None:
    accelerator, *_ = prepared(str(tmp_path))
    with Checkpointer(accelerator, tmp_path / "run"):
        accelerator.save_state(str(tmp_path / "before"))
    assert not (tmp_path / "before/resumekit.json").exists()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
