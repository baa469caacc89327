"""Under each framework, an optimizer that trains more than the model that the framework knows.

Each imports its framework when it is called: the others may be missing.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from digits import Digits
from torch import nn
from torch.utils.data import DataLoader

NUM_SAMPLES = 96
BATCH_SIZE = 8


def begin() -> tuple[nn.Module, Digits]:
    """The model and the data, from fixed seeds."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    return model, Digits(NUM_SAMPLES, augment=False)


def with_accelerate(directory: str) -> None:
    """A bare tensor, which no wrapper prepares."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    bare, data = begin()
    scale = torch.ones(1, requires_grad=True)
    made = torch.optim.AdamW([*bare.parameters(), scale], lr=1e-2)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, batches = accelerator.prepare(bare, made, loader)
    checkpointer = Checkpointer(accelerator, directory, save_every=3, strict=True)
    for images, labels in checkpointer.batches(batches, epochs=1):
        loss = nn.functional.cross_entropy(model(images) * scale, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def with_deepspeed(directory: str, *, precision: str = "fp32") -> None:
    """A bare parameter at stage 0; the other stages of DeepSpeed refuse it themselves."""
    import deepspeed
    from deepspeed_workloads import start_ranks

    from resumekit.adapters.deepspeed import Checkpointer

    start_ranks()
    bare, data = begin()
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*bare.parameters(), scale], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = deepspeed.initialize(model=bare, optimizer=optimizer, config=config)[0]
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    checkpointer = Checkpointer(engine, directory, save_every=3, strict=True)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for images, labels in checkpointer.batches(loader, epochs=1):
        outputs = engine(images.to(dtype)) * scale
        loss = nn.functional.cross_entropy(outputs.float(), labels)
        engine.backward(loss)
        engine.step()
        checkpointer.step(loss=loss)
    checkpointer.close()
    torch.distributed.destroy_process_group()


def with_lightning(directory: str) -> None:
    """Layers in a plain list."""
    import lightning.pytorch as lightning

    from resumekit.adapters.lightning import ResumeCallback

    bare, data = begin()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.layers = bare, [nn.Linear(10, 10)]

        def training_step(self, batch: Any) -> torch.Tensor:
            outputs = self.model(batch[0])
            for layer in self.layers:
                outputs = layer(outputs)
            return nn.functional.cross_entropy(outputs, batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            more = [p for layer in self.layers for p in layer.parameters()]
            return torch.optim.AdamW([*self.model.parameters(), *more], lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResumeCallback(directory, save_every=3)],
    )
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))


def with_transformers(directory: str) -> None:
    """A Trainer with a loss module that refers to the model and has a head."""
    from transformers import Trainer, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    bare, data = begin()

    class HeadLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = bare, nn.Linear(10, 10)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.model(images)), labels)

    class LossTrainer(Trainer):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.loss = HeadLoss()

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=1e-2)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, **others: Any) -> torch.Tensor:
            return self.loss(inputs["images"], inputs["labels"])

    def collate(items: list[Any]) -> dict[str, torch.Tensor]:
        images, labels = zip(*items, strict=True)
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}

    settings = TrainingArguments(
        output_dir=f"{directory}/output",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH_SIZE,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = LossTrainer(bare, settings, train_dataset=data, data_collator=collate)
    trainer.add_callback(ResumeCallback(trainer, f"{directory}/run", save_every=3))
    trainer.train()
