"""Runs under Accelerate's plugin and the Trainer that note what DeepSpeed gathers at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_rank
from zero_workloads import whole_state


def note(directory: str, engine: Any) -> None:
    """Writes down a digest of everything that the engine trains, and of the module's buffers."""
    saved = dict(whole_state(engine))
    if get_rank() == 0:
        (Path(directory).parent / "notes.jsonl").write_text(json.dumps({"saved": saved}))


def through_accelerate(directory: str, *, stage: int) -> None:
    """Trains with Accelerate's plugin."""
    from accelerate_sharded_workloads import make_accelerator

    from resumekit.adapters.accelerate import Checkpointer

    torch.manual_seed(0)
    accelerator = make_accelerator(f"ZeRO-{stage}", 1)
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    model: Any = nn.Sequential(nn.Linear(64, 33), nn.BatchNorm1d(33), nn.Linear(33, 10))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    checkpointer = Checkpointer(accelerator, directory)
    for _ in range(2):
        accelerator.backward(model(torch.rand(8, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    checkpointer.save()
    note(directory, model)
    checkpointer.close()
    destroy_process_group()


def through_trainer(directory: str, *, stage: int) -> None:
    """Trains a model with tied weights by the Trainer."""
    from trainer_workloads import Sentences, causal
    from transformers import Trainer, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    deepspeed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        max_steps=2,
        per_device_train_batch_size=4,
        save_strategy="no",
        deepspeed=deepspeed,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    data: Any = Sentences(lambda tokens: tokens)
    trainer = Trainer(causal(), arguments, train_dataset=data)
    trainer.add_callback(ResumeCallback(trainer, Path(directory) / "run", save_every=2))
    trainer.train()
    note(directory, trainer.deepspeed)
