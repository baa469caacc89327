"""``llm_lora.py`` with the Trainer's own resume: ``train(resume_from_checkpoint=...)``.

Prove: resumekit prove --at step:45 -- python examples/stock/llm_lora.py --dir {dir}
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

# A byte is a token; three more mark the parts of a text whose middle is to be filled in.
PREFIX, SUFFIX, MIDDLE, VOCAB_SIZE = 256, 257, 258, 259
BLOCK_SIZE = 128


class Sources(Dataset):
    """Blocks of source code, half of them rearranged so that the model learns to fill in."""

    def __init__(self, files, fim_rate):
        text = b"".join(path.read_bytes() for path in files)
        self.blocks = [text[i : i + BLOCK_SIZE] for i in range(0, len(text), BLOCK_SIZE)][:-1]
        self.fim_rate = fim_rate

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        tokens = list(self.blocks[index])
        if random.random() < self.fim_rate:
            start, end = sorted(random.sample(range(len(tokens)), 2))
            prefix, middle, suffix = tokens[:start], tokens[start:end], tokens[end:]
            tokens = [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle][:BLOCK_SIZE]
        return {"input_ids": tokens, "labels": tokens}


def make_model():
    """A base model (here with random weights) with adapters in its attention."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BLOCK_SIZE,
    )
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), lora)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/llm_lora")
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    set_seed(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))[: args.files + 1]
    model = make_model()
    model.print_trainable_parameters()
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.dir,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            eval_strategy="epoch",
            logging_steps=20,
            save_steps=20,
            save_total_limit=2,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=Sources(files[:-1], fim_rate=0.5),
        eval_dataset=Sources(files[-1:], fim_rate=0.0),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.dir))
    trainer.save_model(os.path.join(args.dir, "adapter"))


if __name__ == "__main__":
    main()
