"""One training in three frameworks: model, data, optimizer and schedule are the same.

Each run notes the loss of every step, so that a run that changed its framework on the way can be
compared with one that did not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed_workloads import start_ranks
from torch.utils.data import DataLoader
from trainer_workloads import Sentences, causal
from transformers import default_data_collator, get_constant_schedule, set_seed

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.deepspeed import Checkpointer
from resumekit.adapters.torch import Checkpointer as PlainCheckpointer

BATCH_SIZE = 4
EPOCHS = 2
SAVE_EVERY = 2


def train(directory: str, *, stage: int | str | None) -> None:
    """Trains with dropout and AdamW on one rank.

    Args:
        directory: the run directory.
        stage: of ZeRO; None for plain PyTorch, ``"accelerate"`` for Accelerate.
    """
    set_seed(0)
    losses = Losses(Path(directory).parent / "losses.jsonl")
    if stage is None:
        in_plain_pytorch(directory, losses)
    elif isinstance(stage, str):
        in_accelerate(directory, losses)
    else:
        in_deepspeed(directory, losses, stage)


class Losses:
    """Notes losses by step; a step that is trained again is noted again."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def note(self, step: int, loss: torch.Tensor) -> None:
        """The loss of a step, counted from 0."""
        with self.file.open("a") as file:
            file.write(json.dumps([step, float(loss.detach())]) + "\n")


def make() -> tuple[Any, Any, Any, Any]:
    """The model, the optimizer, its schedule and the loader."""
    model: Any = causal()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = Sentences(lambda tokens: tokens)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, collate_fn=default_data_collator)
    return model, optimizer, get_constant_schedule(optimizer), loader


def in_plain_pytorch(directory: str, losses: Losses) -> None:
    """The loop of plain PyTorch."""
    model, optimizer, scheduler, loader = make()
    checkpointer = PlainCheckpointer(
        directory, model=model, optimizer=optimizer, lr_scheduler=scheduler, save_every=SAVE_EVERY
    )
    for batch in checkpointer.batches(loader, epochs=EPOCHS):
        loss = model(**batch).loss
        losses.note(checkpointer.progress.step, loss)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def in_accelerate(directory: str, losses: Losses) -> None:
    """The same with an Accelerator."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = _prepared(accelerator)
    checkpointer = AccelerateCheckpointer(accelerator, directory, save_every=SAVE_EVERY)
    for batch in checkpointer.batches(loader, epochs=EPOCHS):
        loss = model(**batch).loss
        losses.note(checkpointer.progress.step, loss)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def _prepared(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    model, optimizer, scheduler, loader = make()
    prepared: Any = accelerator.prepare(model, optimizer, loader, scheduler)
    return tuple(prepared)  # type: ignore[return-value]


def in_deepspeed(directory: str, losses: Losses, stage: int) -> None:
    """The same with an engine."""
    start_ranks()
    model, optimizer, scheduler, loader = make()
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_clipping": 0.0,  # without a word, DeepSpeed clips at 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    checkpointer = Checkpointer(engine, directory, save_every=SAVE_EVERY)
    for batch in checkpointer.batches(loader, epochs=EPOCHS):
        loss = engine(**batch).loss
        losses.note(checkpointer.progress.step, loss)
        engine.backward(loss)
        engine.step()
        checkpointer.step(loss=loss)
    checkpointer.close()
    torch.distributed.destroy_process_group()
