"""One training in five frameworks, each with the parameter names that its users have.

The network is the same everywhere; the class around it is the one that people write for the
framework. Each step notes its samples, its loss and a digest of the weights before it, in a file
that the library does not know of.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from digits import Digits
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.deepspeed import Checkpointer as DeepSpeedCheckpointer
from resumekit.adapters.lightning import ResumeCallback as LightningCallback
from resumekit.adapters.torch import Checkpointer
from resumekit.adapters.transformers import ResumeCallback

NUM_SAMPLES = 40
BATCH_SIZE = 4
EPOCHS = 2
SAVE_EVERY = 2
OPTIONS: dict[str, Any] = {"save_every": SAVE_EVERY}


class Images(Dataset[dict[str, Any]]):
    """Digits by name, with their number."""

    def __init__(self) -> None:
        self.digits = Digits(NUM_SAMPLES, augment=False)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.digits[index]
        return {"images": image, "labels": label, "index": index}


class Counted(nn.Module):
    """Its attribute changes what it computes, and is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        return x * (1 + self.num_calls / 1000)


class Net(nn.Module):
    """A small classifier with dropout, buffers, an attribute and two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.counted = Counted()
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(self.stem(images)).relu())
        scores: Tensor = self.head(self.counted(hidden))
        return scores


class Training:
    """The network, its average, and the notes of each step.

    Args:
        directory: the run directory.
        two_heads: the network has a second head, as after a change of the script.
    """

    def __init__(self, directory: str, *, two_heads: bool) -> None:
        self.net = Net()
        if two_heads:
            self.net.second_head = nn.Linear(16, 10)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self._file = Path(directory).parent / "notes.jsonl"

    def loss(self, scores: Tensor, batch: dict[str, Any]) -> Tensor:
        """The loss of a step, which is noted; averages the weights before it."""
        loss = nn.functional.cross_entropy(scores, batch["labels"])
        self.average.update_parameters(self.net)
        weights = [_digest(module) for module in (self.net, self.average.module)]
        line = [os.getpid(), batch["index"].tolist(), loss.item().hex(), *weights]
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return loss


def _digest(module: nn.Module) -> str:
    parameters = (each.detach().numpy().tobytes() for each in module.parameters())
    return hashlib.sha256(b"".join(parameters)).hexdigest()[:16]


class Inner(nn.Module):
    """The network is its attribute ``model``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model = net

    def forward(self, images: Tensor) -> Any:
        return self.model(images)


class Adapted(nn.Module):
    """The network is its attribute ``base_model.model``, as in PEFT's models."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.base_model = Inner(net)

    def forward(self, images: Tensor) -> Any:
        return self.base_model(images)


class Engineered(nn.Module):
    """The network is its attribute ``module``, in the manner of a wrapper."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.module = net

    def forward(self, images: Tensor) -> Any:
        return self.module(images)


class WithLoss(nn.Module):
    """The network is its attribute ``net`` and gives its loss, as the Trainer wants it."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.net = training.net
        self.loss_of = training.loss

    def forward(self, images: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss_of(self.net(images), {"labels": labels, "index": index})}


class Lit(LightningModule):
    """The network is its attribute ``model``."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model = training.net
        self.loss_of = training.loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss_of(self.model(batch["images"]), batch)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = make_optimizer(self)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def make_optimizer(model: nn.Module) -> tuple[AdamW, LambdaLR]:
    """The optimizer and its schedule."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return optimizer, LambdaLR(optimizer, _decay)


def _decay(step: int) -> float:
    return 0.95**step


def make_loader() -> DataLoader[Any]:
    """The loader, of which a framework may make its own."""
    return DataLoader(Images(), BATCH_SIZE, shuffle=True)


def train(directory: str, *, framework: str, two_heads: bool = False) -> None:
    """Trains with dropout, AdamW, a schedule and averaged weights on one rank.

    Args:
        directory: the run directory.
        framework: one of ``FRAMEWORKS``.
        two_heads: see ``Training``.
    """
    torch.manual_seed(0)
    FRAMEWORKS[framework](directory, Training(directory, two_heads=two_heads))


def in_plain_pytorch(directory: str, training: Training) -> None:
    """The loop of plain PyTorch, around ``DataParallel``."""
    model = nn.DataParallel(training.net)
    optimizer, scheduler = make_optimizer(model)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        ema=training.average,
        **OPTIONS,
    )
    for batch in checkpointer.batches(make_loader(), epochs=EPOCHS):
        loss = training.loss(model(batch["images"]), batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def in_accelerate(directory: str, training: Training) -> None:
    """The same with an Accelerator."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model: Any = Adapted(training.net)
    optimizer, scheduler = make_optimizer(model)
    prepared: Any = accelerator.prepare(model, optimizer, make_loader(), scheduler)
    model, prepared_optimizer, loader, prepared_scheduler = prepared
    checkpointer = AccelerateCheckpointer(accelerator, directory, ema=training.average, **OPTIONS)
    for batch in checkpointer.batches(loader, epochs=EPOCHS):
        loss = training.loss(model(batch["images"]), batch)
        accelerator.backward(loss)
        prepared_optimizer.step()
        prepared_scheduler.step()
        prepared_optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def in_deepspeed(directory: str, training: Training) -> None:
    """The same with an engine at ZeRO stage 1."""
    import deepspeed
    from deepspeed_workloads import start_ranks

    start_ranks()
    model = Engineered(training.net)
    optimizer, scheduler = make_optimizer(model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_clipping": 0.0,  # the default is 1
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    checkpointer = DeepSpeedCheckpointer(engine, directory, ema=training.average, **OPTIONS)
    for batch in checkpointer.batches(make_loader(), epochs=EPOCHS):
        loss = training.loss(engine(batch["images"]), batch)
        engine.backward(loss)
        engine.step()
        checkpointer.step(loss=loss)
    checkpointer.close()
    torch.distributed.destroy_process_group()


def in_the_trainer(directory: str, training: Training) -> None:
    """The same with the Hugging Face Trainer."""
    model = WithLoss(training)
    arguments = TrainingArguments(
        output_dir=str(Path(directory).parent / "output"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        max_grad_norm=0,
        seed=0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model, arguments, train_dataset=Images(), optimizers=make_optimizer(model))
    trainer.add_callback(ResumeCallback(trainer, directory, ema=training.average, **OPTIONS))
    trainer.train()


def in_lightning(directory: str, training: Training) -> None:
    """The same with Lightning."""
    trainer = LightningTrainer(
        max_epochs=EPOCHS,
        callbacks=[LightningCallback(directory, ema=training.average, **OPTIONS)],
        default_root_dir=str(Path(directory).parent / "output"),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(training), make_loader())


FRAMEWORKS: dict[str, Callable[[str, Training], None]] = {
    "torch": in_plain_pytorch,
    "accelerate": in_accelerate,
    "trainer": in_the_trainer,
    "lightning": in_lightning,
    "deepspeed": in_deepspeed,
}
