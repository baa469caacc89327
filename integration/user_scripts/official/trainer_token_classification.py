"""Labels of tokens with the Trainer, after the official example ``run_ner.py``.

It keeps the best model and stops early. Its own resume: ``--resume_from_checkpoint``.
"""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from small_data import VOCABULARY_SIZE, sentences, word_tokenizer
from transformers import (
    DataCollatorForTokenClassification,
    DistilBertConfig,
    DistilBertForTokenClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

LABELS = ["O", "B-NAME", "I-NAME"]


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = word_tokenizer()
    tokens = [sentence.split() for sentence in sentences(144)]
    dataset = Dataset.from_dict({"tokens": tokens})

    def tokenize_and_align_labels(examples):
        tokenized = tokenizer(
            examples["tokens"], is_split_into_words=True, return_token_type_ids=False
        )
        tokenized["labels"] = [
            [token % len(LABELS) for token in row] for row in tokenized["input_ids"]
        ]
        return tokenized

    dataset = dataset.map(tokenize_and_align_labels, batched=True, remove_columns=["tokens"])
    splits = dataset.train_test_split(16, seed=0)

    def compute_metrics(p):
        is_token = p.label_ids != -100
        right = np.argmax(p.predictions, axis=2) == p.label_ids
        return {"accuracy": float(right[is_token].mean())}

    config = DistilBertConfig(
        vocab_size=VOCABULARY_SIZE,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=16,
        num_labels=len(LABELS),
    )
    trainer = Trainer(
        model=DistilBertForTokenClassification(config),
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
