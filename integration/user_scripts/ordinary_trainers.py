"""Ordinary scripts of the Trainer and of Lightning; see ``ordinary_loops``.

The records are written by a callback of the test's own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from digits import Digits
from judged_script import record
from torch import nn

NUM_SAMPLES, BATCH_SIZE = 80, 16
SEEN: dict[str, Any] = {}  # of the step under way, for the record


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Digits by the names that the Trainer hands to a model."""

    def __init__(self, num_samples: int, *, augment: bool) -> None:
        self.digits = Digits(num_samples, augment=augment)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.digits[index]
        return {"images": image, "labels": label}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.layers(images))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels)
        if self.training:
            SEEN.update(loss=loss.item(), inputs=images)
        return {"loss": loss, "logits": logits}


def compute_metrics(prediction: Any) -> dict[str, float]:
    guesses = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((guesses == prediction.label_ids).mean())}


def train_classifier(
    directory: str, *, kind: Any = None, callbacks: Any = (), collator: Any = None, **settings: Any
) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from resumekit.adapters.transformers import ResumeCallback

    class Recording(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"]
            record(state.global_step, optimizers=optimizer, **SEEN)

    set_seed(0)
    plain: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": BATCH_SIZE}
    plain |= {"save_strategy": "no", "report_to": "none", "use_cpu": True}
    trainer = (kind or Trainer)(
        Classifier(),
        TrainingArguments(output_dir=f"{directory}-output", **{**plain, **settings}),
        train_dataset=Rows(NUM_SAMPLES, augment=True),
        eval_dataset=Rows(40, augment=False),
        data_collator=collator,
        compute_metrics=compute_metrics,
        callbacks=[*callbacks, Recording()],
    )
    trainer.add_callback(ResumeCallback(trainer, directory, save_every=3, strict=True))
    trainer.train()


def trainer_evaluating(directory: str) -> None:
    """Logs every second step, evaluates each epoch, with the progress bar."""
    settings = {"logging_steps": 2, "eval_strategy": "epoch", "lr_scheduler_type": "cosine"}
    train_classifier(directory, warmup_steps=2, **settings)


def trainer_early_stopping(directory: str) -> None:
    """Early stopping, and a callback with a cache, a history and a timer."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    class Timing(TrainerCallback):
        def __init__(self) -> None:
            self.started = time.time()
            self.seconds: list[float] = []
            self.cache: dict[str, Any] = {}
            self.history: dict[str, list[float]] = defaultdict(list)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds.append(time.time() - self.started)
            self.cache["last_step"] = state.global_step

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            for name, value in logs.items():
                self.history[name].append(value)

    settings = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
    settings |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    callbacks = [EarlyStoppingCallback(early_stopping_patience=3), Timing()]
    train_classifier(directory, callbacks=callbacks, disable_tqdm=True, **settings)


def trainer_accumulating(directory: str) -> None:
    """bf16, accumulation windows of two batches, clipped gradients; a collator with a cache."""

    class Collator:
        def __init__(self) -> None:
            self.cache: dict[int, torch.Tensor] = {}
            self._warned_columns: set[tuple[str, ...]] = set()

        def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            self._warned_columns.add(tuple(rows[0]))
            weights = self.cache.setdefault(len(rows), torch.ones(len(rows), 1))
            images = torch.stack([row["images"] for row in rows]) * weights
            return {"images": images, "labels": torch.tensor([row["labels"] for row in rows])}

    settings: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    settings |= {"bf16": True, "max_grad_norm": 0.5, "disable_tqdm": True}
    train_classifier(directory, collator=Collator(), **settings)


def trainer_with_metrics(directory: str) -> None:
    """A custom Trainer that gathers metrics and adds them to the log."""
    from transformers import Trainer

    class MetricTrainer(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._metrics: dict[str, list[float]] = defaultdict(list)
            self.last_log_time = time.time()

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            self._metrics["confidence"].append(outputs["logits"].softmax(-1).max().item())
            return (outputs["loss"], outputs) if kwargs.get("return_outputs") else outputs["loss"]

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            logs |= {name: sum(each) / len(each) for name, each in self._metrics.items()}
            self._metrics.clear()
            self.last_log_time = time.time()
            super().log(logs, *args, **kwargs)

    train_classifier(directory, kind=MetricTrainer, logging_steps=2, disable_tqdm=True)


def trainer_language_model(directory: str) -> None:
    """A tokenizer made here, and the collator that pads and masks at random."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from resumekit.adapters.transformers import ResumeCallback

    class Recording(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"]
            record(state.global_step, loss=0.0, optimizers=optimizer)

    set_seed(0)
    words = ["[PAD]", "[MASK]", "[UNK]", *"abcdefghijklmnop"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )
    texts = [
        " ".join(words[3 + (i * j) % 16] for j in range(4 + i % 5)) for i in range(NUM_SAMPLES)
    ]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=32, **sizes)
    trainer = Trainer(
        BertForMaskedLM(config),
        TrainingArguments(
            output_dir=f"{directory}-output",
            num_train_epochs=2,
            per_device_train_batch_size=BATCH_SIZE,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[tokenizer(text) for text in texts],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        callbacks=[Recording()],
    )
    trainer.add_callback(ResumeCallback(trainer, directory, save_every=3, strict=True))
    trainer.train()


# ---------------------------------------------------------------- Lightning


def fit(directory: str, module: Any, *, callbacks: Any = (), **settings: Any) -> None:
    import lightning
    from lightning.pytorch.callbacks import Callback
    from torch.utils.data import DataLoader

    from resumekit.adapters.lightning import ResumeCallback

    class Recording(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            optimizer = pl_module.optimizers()
            loss = outputs["loss"]
            record(trainer.global_step, loss=loss, optimizers=optimizer, inputs=batch)

    plain = {"max_epochs": 2, "accelerator": "cpu", "logger": False}
    plain |= {"enable_checkpointing": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        default_root_dir=f"{directory}-output",
        num_sanity_val_steps=0,
        callbacks=[*callbacks, Recording(), ResumeCallback(directory, save_every=3, strict=True)],
        **{**plain, **settings},
    )
    train_loader = DataLoader(Digits(NUM_SAMPLES, augment=True), BATCH_SIZE, shuffle=True)
    trainer.fit(module, train_loader, DataLoader(Digits(40, augment=False), batch_size=20))


def make_module(*, accuracy: bool = False, collects: bool = False, decays: bool = False) -> Any:
    import lightning
    from torchmetrics.classification import MulticlassAccuracy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
            )
            self.training_step_outputs: list[torch.Tensor] = []
            if accuracy:
                self.accuracy = MulticlassAccuracy(num_classes=10)
                self.val_accuracy = MulticlassAccuracy(num_classes=10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            outputs = self.layers(batch[0])
            loss = nn.functional.cross_entropy(outputs, batch[1])
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            if accuracy:
                self.accuracy(outputs, batch[1])
                self.log("accuracy", self.accuracy, on_epoch=True)
            if collects:
                self.training_step_outputs.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            outputs = self.layers(batch[0])
            self.log("val_loss", nn.functional.cross_entropy(outputs, batch[1]))
            if accuracy:
                self.val_accuracy(outputs, batch[1])
                self.log("val_accuracy", self.val_accuracy)

        def on_train_epoch_end(self) -> None:
            if collects:
                self.log("epoch_mean", torch.stack(self.training_step_outputs).mean())
                self.training_step_outputs.clear()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            if not decays:
                return optimizer
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    lightning.seed_everything(0)
    return Module()


def lightning_logging(directory: str) -> None:
    """A CSV log, the learning rates, the progress bar, outputs in a list."""
    from lightning.pytorch.callbacks import LearningRateMonitor, TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    module = make_module(collects=True, decays=True)
    callbacks = [LearningRateMonitor("step"), TQDMProgressBar(refresh_rate=1)]
    logger = CSVLogger(f"{directory}-logs", version=0)
    fit(directory, module, callbacks=callbacks, logger=logger, log_every_n_steps=1)


def lightning_metrics(directory: str) -> None:
    """Torchmetrics, early stopping, the best model by ModelCheckpoint."""
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    module = make_module(accuracy=True)
    callbacks = [EarlyStopping("val_loss", patience=3), ModelCheckpoint(monitor="val_loss")]
    fit(
        directory, module, callbacks=callbacks, enable_checkpointing=True, enable_progress_bar=False
    )


def lightning_callbacks(directory: str) -> None:
    """A callback with a cache and timers; accumulation windows, clipping, bf16."""
    from lightning.pytorch.callbacks import Callback, Timer

    class Caching(Callback):
        def __init__(self) -> None:
            self.cache: dict[int, float] = {}
            self.started = time.time()
            self.seconds: list[float] = []

        def on_train_batch_start(self, *arguments: Any) -> None:
            self.started = time.time()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.cache[batch_idx] = outputs["loss"].item()
            self.seconds.append(time.time() - self.started)

    settings: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "max_epochs": 4,
    }
    settings |= {"precision": "bf16-mixed", "enable_progress_bar": False}
    fit(directory, make_module(), callbacks=[Caching(), Timer()], **settings)
