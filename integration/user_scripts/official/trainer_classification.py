"""Sequence classification with the Trainer, after the official example ``run_glue.py``.

It knows nothing of resumekit. Its own resume is that of the examples: the newest checkpoint of the
output directory.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from unreliable import Samples


class Averaging(TrainerCallback):
    """Weights for the evaluation, averaged over the steps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ema.update_parameters(kwargs["model"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--only_evaluate", action="store_true")
    parser.add_argument("--second_training", action="store_true")
    options = parser.parse_args()

    set_seed(0)
    tokens = torch.randint(1, 64, (80, 12))
    rows = [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    averaging = Averaging(model)
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=2,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Samples(rows), callbacks=[averaging])

    if options.only_evaluate:
        trainer.evaluate(Samples(rows))
        return
    checkpoint = options.resume_from_checkpoint
    if checkpoint is None and os.path.isdir(options.output_dir):
        checkpoint = get_last_checkpoint(options.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        torch.save(averaging.ema.state_dict(), os.path.join(options.output_dir, "averaged.pt"))
    if options.second_training:
        arguments.output_dir = os.path.join(options.output_dir, "second")
        arguments.save_strategy = "no"
        Trainer(model, arguments, train_dataset=Samples(rows)).train()


if __name__ == "__main__":
    main()
