"""The Trainer and Lightning for ``gpu_training.py``: tiny models with dropout.

Each function imports its framework, because the other one may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.testing.gpu_evidence import NUM_STEPS, SAVE_EVERY, Evidence

BATCH_SIZE, NUM_TOKENS, LENGTH = 4, 64, 16
NUM_SAMPLES = NUM_STEPS * BATCH_SIZE // 2  # two epochs
OPTIONS: Mapping[str, Any] = {"save_every": SAVE_EVERY, "async_save": True}


def trainer(directory: str, evidence: Evidence, device: str) -> None:
    """Trains a GPT-2 of one layer with the Trainer.

    Args:
        directory: the run directory.
        evidence: for the judge.
        device: ``cpu``, or anything else for the device that the Trainer chooses.
    """
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from resumekit.adapters.transformers import ResumeCallback

    size: Any = {"vocab_size": NUM_TOKENS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1}
    config = GPT2Config(**size, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    losses: list[Tensor] = []

    class Recording(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            losses[:] = [loss]
            return loss

    class Evident(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evidence.begin(state.global_step, dict(model.named_parameters()))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evidence.end_step(state.global_step, losses[0], dict(model.named_parameters()))

    arguments = TrainingArguments(
        output_dir=str(Path(directory).with_name("trainer")),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        save_strategy="no",
        report_to="none",
        use_cpu=device == "cpu",
        disable_tqdm=True,
        seed=0,
    )
    tokens = torch.randint(NUM_TOKENS, (NUM_SAMPLES, LENGTH))
    blocks: Any = [{"input_ids": block, "labels": block} for block in tokens]
    training = Recording(model, arguments, train_dataset=blocks, callbacks=[Evident()])
    training.add_callback(ResumeCallback(training, directory, **OPTIONS))
    training.train()


def lightning(directory: str, evidence: Evidence, device: str) -> None:
    """Trains two layers with Lightning; the arguments are those of ``trainer``."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from resumekit.adapters.lightning import ResumeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Evident(Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            evidence.begin(trainer.global_step, dict(pl_module.named_parameters()))

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            parameters = dict(pl_module.named_parameters())
            evidence.end_step(trainer.global_step, outputs["loss"], parameters)

    samples = TensorDataset(torch.randn(NUM_SAMPLES, 16))
    training = Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Evident(), ResumeCallback(directory, **OPTIONS)],
    )
    training.fit(Module(), DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True))
