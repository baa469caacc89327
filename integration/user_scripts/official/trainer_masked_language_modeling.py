"""A masked language model with the Trainer, after the official example ``run_mlm.py``.

The collator masks other words in each epoch. Its own resume: ``--resume_from_checkpoint``.
"""

from __future__ import annotations

from datasets import Dataset
from small_data import VOCABULARY_SIZE, sentences, word_tokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = word_tokenizer()

    def tokenize_function(examples):
        return tokenizer(
            examples["text"],
            padding="max_length",
            max_length=16,
            truncation=True,
            return_special_tokens_mask=True,
        )

    dataset = Dataset.from_dict({"text": sentences(64)})
    dataset = dataset.map(tokenize_function, batched=True, remove_columns=["text"])

    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    trainer = Trainer(
        model=BertForMaskedLM(config),
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
