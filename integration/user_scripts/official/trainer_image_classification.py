"""A vision transformer with the Trainer, after the official ``run_image_classification.py``.

The images are cropped and flipped at random when they are read, in the training process. Its own
resume: ``--resume_from_checkpoint``.
"""

from __future__ import annotations

import numpy as np
import torch
from datasets import Dataset
from small_data import NUM_CLASSES, images
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)


def random_crop_and_flip(image):
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    top, left = torch.randint(3, (2,)).tolist()
    cropped = padded[:, top : top + 8, left : left + 8]
    return cropped.flip(2) if torch.rand(()) < 0.5 else cropped


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)

    pixels, labels = images(80)
    dataset = Dataset.from_dict({"image": pixels.tolist(), "label": labels.tolist()})
    splits = dataset.train_test_split(16, seed=0)

    def train_transforms(batch):
        batch["pixel_values"] = [
            random_crop_and_flip(torch.tensor(each)) for each in batch["image"]
        ]
        return batch

    def val_transforms(batch):
        batch["pixel_values"] = [torch.tensor(each) for each in batch["image"]]
        return batch

    splits["train"].set_transform(train_transforms)
    splits["test"].set_transform(val_transforms)

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.1,
        num_labels=NUM_CLASSES,
    )

    def compute_metrics(p):
        return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        data_collator=collate_fn,
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
