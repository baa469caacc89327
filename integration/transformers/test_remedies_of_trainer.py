"""The remedies for a Trainer and for an Accelerator, followed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from followed_remedies import Remedy
from small_trainer import attach, interrupted, make_trainer, stop_at
from torch.utils.data import DataLoader, Subset
from transformers import GPT2LMHeadModel, Trainer

from resumekit.adapters.accelerate import Checkpointer

END = 24


def continued(directory: Path, **options: Any) -> Trainer:
    trainer = make_trainer(directory)
    attach(trainer, directory, **options)
    return trainer


@pytest.mark.remedy("Call {} alone: it resumes from the run directory, or starts the run there")
def test_a_run_is_resumed_without_the_argument(tmp_path: Path, remedy: Remedy) -> None:
    interrupted(tmp_path, 17)
    path = str(tmp_path / "output" / "checkpoint-5")
    text = remedy.of(continued(tmp_path).train, resume_from_checkpoint=path)
    method = re.findall(r"trainer\.(\w+)\(\)", text)[0]
    assert getattr(continued(tmp_path), method)().global_step == END


@pytest.mark.remedy("Make a Trainer with a ResumeCallback and a directory for each trial")
def test_each_trial_has_a_trainer_and_a_directory(tmp_path: Path, remedy: Remedy) -> None:
    remedy.of(continued(tmp_path).train, trial={"learning_rate": 0.1})
    assert continued(tmp_path / "a").train().global_step == END


@pytest.mark.remedy("Make a Trainer with a ResumeCallback and a directory for each training")
def test_each_training_has_a_trainer_and_a_directory(tmp_path: Path, remedy: Remedy) -> None:
    trainer = continued(tmp_path)
    trainer.train()
    data: Any = trainer.train_dataset
    trainer.train_dataset = Subset(data, range(len(data)))
    remedy.of(trainer.train)
    assert continued(tmp_path / "b").train().global_step == END


@pytest.mark.remedy(
    "Pass import_from={} to ResumeCallback to continue that run, or begin a new one from its "
    "weights alone: {}"
)
def test_a_run_of_the_stock_trainer_is_continued_or_its_weights_begin_one(
    tmp_path: Path, remedy: Remedy
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    stock = make_trainer(tmp_path, **saving)
    with stop_at(stock, 3):
        stock.train()
    path = str(tmp_path / "output" / "checkpoint-2")
    text = remedy.of(continued(tmp_path).train, resume_from_checkpoint=path)
    imported = make_trainer(tmp_path / "imported", **{**saving, "save_strategy": "no"})
    given = re.findall(r"import_from='(.+?)'", text)[0]
    attach(imported, tmp_path / "imported", import_from=given)
    assert imported.train().global_step == 4
    load = getattr(GPT2LMHeadModel, re.findall(r"(\w+)\(that path\)", text)[0])
    made = make_trainer(tmp_path / "new", max_steps=4)
    trainer = Trainer(load(path), made.args, train_dataset=made.train_dataset)
    attach(trainer, tmp_path / "new")
    assert trainer.train().global_step == 4


def prepared() -> tuple[Accelerator, list[Any], Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    loader: Any = DataLoader([*torch.ones(8, 1)], batch_size=2)  # type: ignore[arg-type]
    return accelerator, [model, torch.optim.SGD(model.parameters(), 0.1)], loader


@pytest.mark.remedy("Make the Checkpointer after accelerator.prepare(model, optimizer, ...)")
def test_a_checkpointer_is_made_after_prepare(tmp_path: Path, remedy: Remedy) -> None:
    accelerator, objects, loader = prepared()

    def train() -> int:
        with Checkpointer(accelerator, tmp_path) as checkpointer:
            for _ in checkpointer.batches(loader, epochs=1):
                checkpointer.step()
            return checkpointer.progress.step

    text = remedy.of(train)
    method = re.findall(r"accelerator\.(\w+)\(", text)[0]
    *_, loader = getattr(accelerator, method)(*objects, loader)
    assert train() == 4


@pytest.mark.remedy("Pass the loader itself: batches() continues at the next unseen batch")
def test_batches_are_not_skipped_twice(tmp_path: Path, remedy: Remedy) -> None:
    accelerator, objects, loader = prepared()
    *_, loader = accelerator.prepare(*objects, loader)

    def train(given: Any, leave_after: int = 9) -> list[int]:
        seen = []
        with Checkpointer(accelerator, tmp_path, save_every=1) as checkpointer:
            for _ in checkpointer.batches(given, epochs=1):
                checkpointer.step()
                seen.append(checkpointer.progress.step)
                if seen[-1] == leave_after:
                    break
        return seen

    assert train(loader, leave_after=3) == [1, 2, 3]
    remedy.of(train, accelerator.skip_first_batches(loader, 2))
    assert train(loader)[-1] == 4
