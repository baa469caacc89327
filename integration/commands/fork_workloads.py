"""One small training in four frameworks; the model itself notes the loss of each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments, set_seed

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.lightning import ResumeCallback as LightningCallback
from resumekit.adapters.torch import Checkpointer
from resumekit.adapters.transformers import ResumeCallback

EPOCHS, BATCH_SIZE, NUM_SAMPLES = 2, 4, 24
NUM_STEPS = EPOCHS * NUM_SAMPLES // BATCH_SIZE


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random rows, the same for every seed of the training."""

    def __init__(self) -> None:
        self.rows = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.rows[index], "labels": self.rows[index].sum()}


class Net(nn.Module):
    """Has dropout and a buffer; appends the loss of each training step to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = str(file)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = nn.functional.mse_loss(self.layers(inputs)[:, 0], labels)
        with Path(self.file).open("a", encoding="ascii") as file:
            file.write(f"{loss.item().hex()}\n")
        return {"loss": loss}


class Module(LightningModule):
    """The same for Lightning."""

    def __init__(self, net: Net, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr)


def train(
    directory: str,
    *,
    framework: str,
    seed: int = 0,
    weights: str | None = None,
    lr: float = 0.05,
    strict: bool = False,
) -> None:
    """Trains on one rank and saves every second step.

    Args:
        directory: the run directory.
        framework: ``"torch"``, ``"accelerate"``, ``"trainer"`` or ``"lightning"``.
        seed: of everything but the data.
        weights: a safetensors file, loaded into the model before the training.
        lr: the learning rate.
        strict: as of the checkpointer.
    """
    set_seed(seed)
    net: Any = Net(Path(directory).parent / "losses.txt")
    if framework == "lightning":
        net = Module(net, lr)
    if weights is not None:
        net.load_state_dict(load_file(weights))
    options = {"save_every": 2, "keep_latest": None, "strict": strict}
    {
        "torch": in_plain_pytorch,
        "accelerate": in_accelerate,
        "trainer": in_trainer,
        "lightning": in_lightning,
    }[framework](directory, net, lr, options)


def in_plain_pytorch(directory: str, net: Any, lr: float, options: Any) -> None:
    """The loop of plain PyTorch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    loader = DataLoader(Rows(), BATCH_SIZE, shuffle=True)
    with Checkpointer(directory, model=net, optimizer=optimizer, **options) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=EPOCHS):
            net(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


def in_accelerate(directory: str, net: Any, lr: float, options: Any) -> None:
    """The same with an Accelerator."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    loader = DataLoader(Rows(), BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    with AccelerateCheckpointer(accelerator, directory, **options) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=EPOCHS):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


def in_trainer(directory: str, net: Any, lr: float, options: Any) -> None:
    """The same in the Trainer."""
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=lr,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(net, arguments, train_dataset=Rows())
    trainer.add_callback(ResumeCallback(trainer, directory, **options))
    trainer.train()


def in_lightning(directory: str, net: Any, lr: float, options: Any) -> None:
    """The same in Lightning."""
    trainer = LightningTrainer(
        max_epochs=EPOCHS,
        callbacks=[LightningCallback(directory, **options)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(Rows(), BATCH_SIZE, shuffle=True))
