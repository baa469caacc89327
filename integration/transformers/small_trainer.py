"""A tiny Trainer in this process, interrupted and made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers_workloads import BATCH_SIZE, BLOCK_SIZE, NUM_BLOCKS, Blocks

from resumekit.adapters.transformers import ResumeCallback

STEPS_PER_EPOCH = 12


def make_trainer(
    directory: Path,
    *callbacks: TrainerCallback,
    augment: bool = False,
    num_samples: int = NUM_BLOCKS,
    **arguments: Any,
) -> Trainer:
    set_seed(0)
    data = Blocks(augment=augment)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    settings: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH_SIZE,
        "logging_steps": 5,
        "save_strategy": "no",
    }
    return Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=BLOCK_SIZE, **sizes)),
        TrainingArguments(
            output_dir=str(directory / "output"),
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
            **{**settings, **arguments},
        ),
        train_dataset=data if num_samples == NUM_BLOCKS else Subset(data, range(num_samples)),
        eval_dataset=Blocks(augment=False),
        callbacks=list(callbacks),
    )


def attach(trainer: Trainer, directory: Path, **options: Any) -> ResumeCallback:
    callback = ResumeCallback(trainer, directory / "run", **options)
    trainer.add_callback(callback)
    return callback


def without_clock(log_history: list[dict[str, float]]) -> list[dict[str, float]]:
    clock = ("_runtime", "_per_second")
    return [
        {key: value for key, value in line.items() if not key.endswith(clock)}
        for line in log_history
    ]


class StopAt(TrainerCallback):
    """Raises at a step, as a crash that the process survives."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Recorder(TrainerCallback):
    """Notes what it is called for."""

    def __init__(self) -> None:
        self.begun_at: list[int] = []
        self.epochs: list[float] = []
        self.num_steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun_at.append(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps += 1


@contextmanager
def stop_at(trainer: Trainer, step: int | None) -> Iterator[None]:
    """Lets the training in it crash at a step; with None nothing is done."""
    if step is None:
        yield
        return
    trainer.add_callback(StopAt(step))
    with pytest.raises(KeyboardInterrupt):
        yield


def interrupted(directory: Path, step: int, **arguments: Any) -> None:
    trainer = make_trainer(directory, StopAt(step), **arguments)
    attach(trainer, directory, save_every=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
