"""What the journal records of a Trainer's steps: the loss of each step, whatever is logged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from small_trainer import attach, make_trainer, stop_at
from transformers import Trainer

from resumekit.record.comparison import verdicts
from resumekit.record.journal import STEP, find_attempts


@pytest.fixture(autouse=True)
def _a_program_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a test worker has none, and nothing equals what ran in a shell before."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)


def train(directory: Path, *, stop: int | None = None, **arguments: Any) -> list[float]:
    """One launch, which saves each third step; gives the losses of all batches."""
    losses: list[float] = []
    trainer = make_trainer(directory, num_train_epochs=1, **arguments)
    train_on = trainer.training_step

    def noted(*batch: Any) -> Any:
        loss = train_on(*batch)
        losses.append(float(loss))
        return loss

    trainer.training_step = noted  # type: ignore[method-assign]
    attach(trainer, directory, save_every=3)
    with stop_at(trainer, stop):
        trainer.train()
    return losses


def last_verdict(directory: Path) -> str:
    *_, last = verdicts(directory / "run" / "journal")
    return str(last.verdict)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_each_step_has_the_loss_of_its_own_batches(tmp_path: Path, num_batches: int) -> None:
    losses = train(tmp_path, gradient_accumulation_steps=num_batches)
    (attempt,) = find_attempts(tmp_path / "run" / "journal")
    recorded = [each.loss for each in attempt.records() if each.kind == STEP]
    sums = [sum(losses[at : at + num_batches]) for at in range(0, len(losses), num_batches)]
    assert recorded == pytest.approx(sums, rel=1e-6)
    assert len(recorded) == -(-12 // num_batches)


def test_another_logging_interval_is_no_other_training(tmp_path: Path) -> None:
    train(tmp_path, stop=8)
    train(tmp_path, logging_steps=2)
    assert last_verdict(tmp_path) == "2 repeated steps: identical"


def test_other_weights_are_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, stop=8)
    step = Trainer.training_step

    def change(trainer: Any, model: Any, *rest: Any) -> Any:
        model.transformer.h[0].mlp.c_fc.weight.data[0, 0] += 1e-3
        return step(trainer, model, *rest)

    monkeypatch.setattr(Trainer, "training_step", change)
    train(tmp_path)
    assert "different" in last_verdict(tmp_path)
