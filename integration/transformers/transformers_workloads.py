"""Training functions on the Trainer that the conformance kit launches, kills and compares.

Each trains a tiny causal language model on the text of this very file; the options are the factors
of the test matrix. None looks at whether it was started before.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from resumekit.adapters.transformers import ResumeCallback

NUM_BLOCKS = 92  # the last batch of an epoch is a partial one
BLOCK_SIZE = 16
BATCH_SIZE = 8


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Bytes of text; each byte is a token. Some are replaced at random, as an augmentation."""

    def __init__(self, *, augment: bool) -> None:
        text = Path(__file__).read_bytes()[: NUM_BLOCKS * BLOCK_SIZE]
        self.tokens = torch.tensor(list(text)).view(NUM_BLOCKS, BLOCK_SIZE)
        self.augment = augment

    def __len__(self) -> int:
        return NUM_BLOCKS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index].clone()
        if self.augment:
            tokens[random.randrange(BLOCK_SIZE)] = np.random.randint(128)
            tokens[torch.randint(BLOCK_SIZE, ())] = 0
        return {"input_ids": tokens, "labels": tokens}


class Averaging(TrainerCallback):
    """A user's callback: it averages the weights and counts the steps."""

    def __init__(self, average: AveragedModel, extras: dict[str, int]) -> None:
        self.average = average
        self.extras = extras

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.update_parameters(kwargs["model"])
        self.extras["steps"] += 1


def train(
    directory: str,
    *,
    save_every: int,
    augment: bool = False,
    workers: str = "0",
    accumulate: int = 1,
    scheduler: str = "cosine",
    precision: str = "no",
    scaler: bool = False,
    evaluate: str = "no",
    sampling: str = "random",
    own_saving: bool = False,
    logging_steps: int = 7,
    epochs: int = 2,
    max_steps: int = -1,
    async_save: bool = False,
) -> None:
    """Trains with dropout, AdamW and averaged weights."""
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=BLOCK_SIZE,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    extras = {"steps": 0}
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        lr_scheduler_type=scheduler,
        warmup_steps=3,
        logging_steps=logging_steps,
        eval_strategy=evaluate,
        eval_steps=5,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the loss falls, so early stopping comes late
        save_strategy="steps" if own_saving else "no",
        save_steps=save_every,
        save_total_limit=2,
        bf16=precision == "bf16",
        train_sampling_strategy=sampling,
        dataloader_num_workers=0 if workers == "0" else 2,
        dataloader_persistent_workers=workers == "persistent",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    callbacks: list[TrainerCallback] = [Averaging(average, extras)]
    if evaluate != "no":
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=100))
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Blocks(augment=augment),
        eval_dataset=Blocks(augment=False),
        callbacks=callbacks,
    )
    if scaler:
        # accelerate 1.15 accelerator.py makes one for fp16, which it refuses without a GPU.
        trainer.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**12, growth_interval=4
        )
    trainer.add_callback(
        ResumeCallback(
            trainer,
            Path(directory) / "run",
            ema=average,
            extras=extras,
            save_every=save_every,
            best_metric=None if evaluate == "no" else "eval_loss",
            strict=True,
            async_save=async_save,
        )
    )
    torch.manual_seed(trainer.accelerator.process_index + 1)  # ranks draw different dropout masks
    trainer.train()
