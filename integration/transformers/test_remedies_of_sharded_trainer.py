"""The remedy for the best model of a Trainer that is sharded, followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from followed_remedies import Remedy
from preloads import TRAINER

pytest.importorskip("deepspeed")

from safetensors.torch import load_file
from trainer_sharded_workloads import OnCpu
from trainer_workloads import Sentences, causal
from transformers import Trainer, TrainingArguments, set_seed

from resumekit.adapters.transformers import ResumeCallback
from resumekit.cli import main
from resumekit.testing import Cell, Kit

PRELOAD = TRAINER


def make_trainer(directory: str, *, load_best_model_at_end: bool) -> Trainer:
    """One that is sharded over two ranks, and evaluates; the first evaluation stays the best."""
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        max_steps=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    # TrainingArguments() takes it with its saving only.
    arguments.load_best_model_at_end = load_best_model_at_end
    data = Sentences(lambda tokens: tokens)
    return OnCpu(causal(), arguments, train_dataset=data, eval_dataset=data)


def train(directory: str, *, load_best_model_at_end: bool) -> None:
    """Trains, and writes which checkpoint is the best."""
    trainer = make_trainer(directory, load_best_model_at_end=load_best_model_at_end)
    trainer.add_callback(ResumeCallback(trainer, Path(directory) / "run", save_every=1))
    trainer.train()
    (Path(directory) / "best").write_text(str(trainer.state.best_model_checkpoint))


@pytest.mark.remedy(
    "Pass load_best_model_at_end=False; `resumekit export` reads the directory "
    "above trainer.state.best_model_checkpoint"
)
def test_the_best_model_that_is_sharded_is_exported(
    kit: Kit, tmp_path: Path, remedy: Remedy
) -> None:
    run = kit.run_again(kit.new_run(Cell(train, {"load_best_model_at_end": True}, 2)))
    text = remedy.in_text((run.directory / "launch-00000-rank-00000.log").read_text())
    command = re.findall(r"`resumekit (\w+)`", text)[0]
    run = kit.run_again(kit.new_run(Cell(train, {"load_best_model_at_end": False}, 2)))
    assert not run.failure
    best = Path((run.directory / "training" / "best").read_text())
    files = tmp_path / "best", tmp_path / "newest"
    for step, file in zip((best.parent, run.directory / "training" / "run"), files, strict=True):
        with pytest.raises(SystemExit, match="0"):
            main([command, str(step), str(file)])
    weights, newest = map(load_file, files)
    assert not causal().load_state_dict(weights, strict=False).unexpected_keys
    assert any(not weights[name].equal(newest[name]) for name in newest)
