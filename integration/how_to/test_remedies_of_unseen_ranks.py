"""The remedies for ranks that a framework does not see, followed under the real launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from followed_remedies import Remedy
from how_to_pages import Page, Workplace, same

PAGE = Page("launchers")
TORCHRUN = "torchrun --standalone --nproc-per-node=2 program.py"


def refused(place: Workplace, program: str, remedy: Remedy) -> None:
    """Starts two ranks of a program in which each would train alone; no step is trained."""
    (place.directory / "program.py").write_text(program, encoding="utf-8")
    started = place.start(TORCHRUN)
    assert started.status() != 0
    output = started.log.read_text()
    assert "it trains with 1 of 2 ranks, so each would use all data" in output
    remedy.in_text(output)
    assert not list(place.records.glob("rank-*"))
    assert not list(place.directory.glob("runs/*/step-*"))


def require_trained_together(place: Workplace, program: str, num_steps: int) -> None:
    """Starts the same with the remedy: both ranks have the same weights after each step."""
    (place.directory / "program.py").write_text(program, encoding="utf-8")
    place.run(TORCHRUN)
    (first,), (second,) = place.launches(0), place.launches(1)
    assert len(first) == len(second) == num_steps
    assert all(same(a["weights"], b["weights"]) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0]["loss"], second[0]["loss"])


def with_and_without(program: str, setting: str, other: str = "") -> tuple[str, str]:
    assert program.count(setting) == 1
    return program, program.replace(setting, other)


@pytest.mark.parametrize("framework", ["Accelerate", "the Trainer"])
@pytest.mark.quick("Accelerate")
@pytest.mark.remedy("Without GPUs pass Accelerator cpu=True, or TrainingArguments use_cpu=True")
def test_ranks_that_accelerate_does_not_see_are_refused(
    tmp_path: Path, remedy: Remedy, framework: str
) -> None:
    pytest.importorskip("transformers" if "Trainer" in framework else "accelerate")
    place = Workplace(tmp_path / "run", PAGE)
    if framework == "Accelerate":
        program = (place.directory / "train_accelerate.py").read_text(encoding="utf-8")
        good, alone = with_and_without(program, "cpu=not torch.cuda.is_available()")
        num_steps = 24  # 3 epochs of 256 samples, 16 of each rank in a step
    else:
        stock = Path(__file__).with_name("migrated_scripts").joinpath("from_trainer.py").read_text()
        add = "from resumekit.adapters.transformers import ResumeCallback\n"
        add += 'trainer.add_callback(ResumeCallback(trainer, "runs/a"))\ntrainer.train()\n'
        good, alone = with_and_without(stock.partition("last =")[0] + add, "    use_cpu=True,\n")
        num_steps = 600
    refused(place, alone, remedy)
    require_trained_together(place, good, num_steps)


@pytest.mark.full
@pytest.mark.remedy("Set devices= and num_nodes= to those of the launcher")
def test_ranks_that_lightning_does_not_see_are_refused(tmp_path: Path, remedy: Remedy) -> None:
    pytest.importorskip("lightning")
    place = Workplace(tmp_path / "run", PAGE)
    program = (place.directory / "train_lightning.py").read_text(encoding="utf-8")
    ranks = 'devices=2,\n        strategy="ddp",'
    good, alone = with_and_without(program, ranks, "devices=1,")  # Lightning refuses it under DDP
    refused(place, alone, remedy)
    require_trained_together(place, good, 24)
