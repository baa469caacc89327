"""A causal language model with the Trainer, after the official example ``run_clm.py``.

Its own resume: ``--resume_from_checkpoint``. All settings are those of ``TrainingArguments``.
"""

from __future__ import annotations

from itertools import chain

from datasets import Dataset
from small_data import VOCABULARY_SIZE, sentences, word_tokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

BLOCK_SIZE = 16


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = word_tokenizer()
    raw_dataset = Dataset.from_dict({"text": sentences(128)})

    def tokenize_function(examples):
        return tokenizer(examples["text"], return_token_type_ids=False)

    # Concatenates all texts and splits them into blocks; what is left over is dropped.
    def group_texts(examples):
        concatenated = {name: list(chain(*values)) for name, values in examples.items()}
        total_length = len(concatenated["input_ids"]) // BLOCK_SIZE * BLOCK_SIZE
        result = {
            name: [values[i : i + BLOCK_SIZE] for i in range(0, total_length, BLOCK_SIZE)]
            for name, values in concatenated.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    tokenized = raw_dataset.map(tokenize_function, batched=True, remove_columns=["text"])
    blocks = tokenized.map(group_texts, batched=True).train_test_split(0.25, seed=0)

    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=BLOCK_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )

    checkpoint = None
    if training_args.resume_from_checkpoint is not None:
        checkpoint = training_args.resume_from_checkpoint
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
