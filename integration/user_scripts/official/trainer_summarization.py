"""An encoder and decoder with the Seq2SeqTrainer, after the official ``run_summarization.py``.

It generates at each evaluation. Its own resume: ``--resume_from_checkpoint``.
"""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from small_data import VOCABULARY_SIZE, sentences, word_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)


def main():
    (training_args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = word_tokenizer()
    texts = sentences(80)
    summaries = [" ".join(text.split()[:4]) for text in texts]

    def preprocess_function(examples):
        model_inputs = tokenizer(examples["text"], return_token_type_ids=False)
        model_inputs["labels"] = tokenizer(text_target=examples["summary"])["input_ids"]
        return model_inputs

    dataset = Dataset.from_dict({"text": texts, "summary": summaries})
    dataset = dataset.map(preprocess_function, batched=True, remove_columns=["text", "summary"])
    splits = dataset.train_test_split(16, seed=0)

    config = T5Config(
        vocab_size=VOCABULARY_SIZE,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    model = T5ForConditionalGeneration(config)

    def compute_metrics(predictions):
        found = np.where(predictions.predictions < 0, 0, predictions.predictions)
        return {"gen_len": float(np.count_nonzero(found, axis=1).mean())}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
