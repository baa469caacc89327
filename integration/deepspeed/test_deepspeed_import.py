"""A run continues with resumekit from what ``engine.save_checkpoint`` wrote, as DeepSpeed does."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from deepspeed_export_workloads import (
    NATIVE,
    SAME,
    SAVED_AT,
    continue_from,
    continue_import,
    save_both,
    save_elastic,
)
from followed_exports import continued, differing, noted, saved

from resumekit.cli import main
from resumekit.testing import Cell, Kit, Run

PRELOAD = DEEPSPEED
IMPORTED = "imported"
OTHERWISE: tuple[tuple[int, dict[str, Any], int, int], ...] = (
    (2, {"stage": 2, "tied": True}, 3, 1),
    (2, {"stage": 3, "frozen": True}, 3, 1),
    (1, {"stage": 1}, 0, 2),
    (1, {"stage": 0, "precision": "bf16"}, 2, 2),
    (1, {"stage": 0}, 2, 2),
)


def import_tag(run: Run, *, source: str = NATIVE) -> int:
    """The exit code of the command, which gives the position in the middle of an epoch."""
    folder = run.directory / "training"
    position = ["--epoch", "0", "--batch", str(SAVED_AT)]
    with pytest.raises(SystemExit) as ended:
        main(["import", str(folder / source), str(folder / IMPORTED), *position])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.quick("2-{'stage': 3, 'tied': True}")
@pytest.mark.parametrize(("num_ranks", "options"), SAME, ids=str)
def test_a_run_continues_as_by_deepspeeds_own_resume(
    kit: Kit, num_ranks: int, options: dict[str, Any]
) -> None:
    run = saved(kit, save_both, options, num_ranks)
    assert import_tag(run) == 0
    expected = continued(kit, run, continue_from, NATIVE)
    assert not differing(continued(kit, run, continue_import, IMPORTED), expected)
    assert any("exp_avg" in name for name in expected)
    assert any("losses" in name for name in expected)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "options", "stage", "ranks"), OTHERWISE, ids=str)
def test_another_stage_and_number_of_ranks_load_the_same_state(
    kit: Kit, num_ranks: int, options: dict[str, Any], stage: int, ranks: int
) -> None:
    run = saved(kit, save_both, options, num_ranks)
    assert import_tag(run) == 0
    other = replace(run, cell=Cell(save_both, {**options, "stage": stage}, ranks))
    found = continued(kit, other, continue_import, IMPORTED)
    expected = noted(replace(run, cell=Cell(save_both, options)), "gathered")
    assert sum("exp_avg" in name for name in expected) >= 10
    for name, value in expected.items():
        assert torch.equal(found[name.replace("[0]", "[0]['loaded']", 1)], value), name


@pytest.mark.full
def test_swapped_moments_are_found(kit: Kit) -> None:
    run = saved(kit, save_both, {"stage": 0})
    expected = continued(kit, run, continue_from, NATIVE)
    (path,) = (run.directory / "training" / NATIVE).rglob("*model_states.pt")
    content = torch.load(path, weights_only=True)
    for state in content["optimizer"]["state"].values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()
    torch.save(content, path)
    assert import_tag(run) == 0
    found = differing(continued(kit, run, continue_import, IMPORTED), expected)
    assert any("['losses']" in name for name in found)
    assert not any("['loaded']['head.weight']" in name for name in found)


@pytest.mark.full
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_deepspeed_saves_elastic_and_cannot_load_is_refused(
    kit: Kit, capsys: pytest.CaptureFixture[str], stage: int, elastic: bool
) -> None:
    run = saved(kit, save_elastic, {"stage": stage}, 2)
    again = {"stage": stage, "source": NATIVE, "elastic": elastic}
    by_deepspeed = kit.run_again(replace(run, cell=Cell(save_elastic, again, 2)))
    # With an optimizer of torch, whose param groups have no step.
    assert (
        "AssertionError" if elastic else "KeyError: 'base_optimizer_state_step'"
    ) in by_deepspeed.failure
    assert import_tag(run) == 2
    assert "elastic_checkpoint, which leaves hyperparameters out" in capsys.readouterr().err


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.full
@pytest.mark.parametrize("end", ["model_states", "optim_states"])
def test_nothing_in_a_file_runs(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    run = saved(kit, save_both, {"stage": 2})
    folder = run.directory / "training"
    (path,) = (folder / NATIVE).rglob(f"*{end}.pt")
    content = torch.load(path, weights_only=False)
    torch.save({**content, "more": Hostile(tmp_path / "made")}, path)
    assert import_tag(run) == 2
    assert "objects that only an unrestricted pickle can make" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert not list(folder.glob(f"{IMPORTED}/step-*"))


@pytest.mark.full
def test_a_missing_partition_is_named(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved(kit, save_both, {"stage": 1}, 2)
    folder = run.directory / "training"
    shutil.copytree(folder / NATIVE, folder / "torn")
    next(folder.glob("torn/*/zero_pp_rank_1_*optim_states.pt")).unlink()
    assert import_tag(run, source="torn") == 2
    assert "1 files of partitions, expected those of 2 ranks" in capsys.readouterr().err
