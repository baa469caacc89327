"""GPT-2 on source code with the Trainer: ``stock_transformers.py`` with the ResumeCallback."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
import tokenize
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from resumekit.adapters.transformers import ResumeCallback

NUM_BLOCKS, BLOCK_SIZE, BATCH_SIZE = 464, 64, 16


def blocks() -> list[dict[str, torch.Tensor]]:
    """Bytes of a few modules of the standard library; each byte is a token."""
    modules = (argparse, ast, inspect, textwrap, tokenize)
    text = b"".join(inspect.getsource(module).encode() for module in modules)
    tokens = torch.tensor(list(text[: NUM_BLOCKS * BLOCK_SIZE])).view(NUM_BLOCKS, BLOCK_SIZE)
    return [{"input_ids": block, "labels": block} for block in tokens]


class Averaging(TrainerCallback):
    def __init__(self, model: torch.nn.Module) -> None:
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ema.update_parameters(kwargs["model"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/text")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=BLOCK_SIZE,
            n_embd=48,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    averaging = Averaging(model)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=arguments.directory,
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            logging_strategy="epoch",
            save_strategy="steps",
            save_steps=arguments.save_every,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=blocks(),
        callbacks=[averaging],
    )

    trainer.add_callback(ResumeCallback(trainer, arguments.directory))
    trainer.train()


if __name__ == "__main__":
    main()
