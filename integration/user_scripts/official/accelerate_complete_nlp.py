"""Classification of sentence pairs, after Accelerate's official ``complete_nlp_example.py``.

It saves every few steps or after each epoch. Its own resume: ``--resume_from_checkpoint``, and
``skip_first_batches`` in an interrupted epoch.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from small_data import VOCABULARY_SIZE, sentences, word_tokenizer
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

EVAL_BATCH_SIZE = 16


def get_dataloaders(accelerator, batch_size):
    tokenizer = word_tokenizer()
    texts = sentences(80)
    examples = [
        {**tokenizer(first, second), "labels": len(first.split()) % 2}
        for first, second in zip(texts, reversed(texts), strict=True)
    ]

    def collate_fn(batch):
        return tokenizer.pad(batch, padding="longest", return_tensors="pt")

    train_dataloader = DataLoader(
        examples[:64], shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    eval_dataloader = DataLoader(
        examples[64:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader


def training_function(config, args):
    accelerator = Accelerator(cpu=True)
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps != "epoch":
        checkpointing_steps = int(checkpointing_steps)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, config["batch_size"])

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
        )
    )
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=4,
        num_training_steps=len(train_dataloader) * config["num_epochs"],
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    overall_step = 0
    starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        name = os.path.basename(args.resume_from_checkpoint)
        if "epoch" in name:
            starting_epoch = int(name.replace("epoch_", "")) + 1
            overall_step = starting_epoch * len(train_dataloader)
        else:
            overall_step = int(name.replace("step_", ""))
            starting_epoch = overall_step // len(train_dataloader)
            resume_step = overall_step - starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if checkpointing_steps != "epoch" and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))

        model.eval()
        correct = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.3f}")
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    # torch 2.13 may hang at exit if the last collective call under gloo was a gather.
    accelerator.wait_for_everyone()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--checkpointing_steps", default="epoch", help="a number, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()
    config = {"lr": 1e-3, "num_epochs": 3, "seed": 42, "batch_size": args.batch_size}
    training_function(config, args)


if __name__ == "__main__":
    main()
