"""A Trainer that trains a language model of a few parameters for 500 steps."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from resumekit.adapters.transformers import ResumeCallback


def trained(model: Any, run: str) -> Any:
    """The model after 500 steps, the last of which is a checkpoint in a run directory."""
    ids = torch.arange(8)
    settings: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(
        model,
        TrainingArguments(
            "output", max_steps=500, per_device_train_batch_size=2, save_strategy="no", **settings
        ),
        train_dataset=[{"input_ids": ids.roll(each), "labels": ids} for each in range(8)],
    )
    trainer.add_callback(ResumeCallback(trainer, run))
    trainer.train()
    return trainer.model
