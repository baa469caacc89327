"""The same tiny training under each adapter, bare or with resumekit, for ``overheads.py``.

Blocks of small layers with AdamW on a map-style dataset without workers. The collate function is
called once a step in every framework: what passes between two calls is one step.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH_SIZE = 32, 16
_NEVER = 10**9


class Samples(Dataset[Any]):
    """Rows of one tensor."""

    def __init__(self, num_samples: int) -> None:
        self.rows = torch.rand(num_samples, WIDTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Model(nn.Module):
    """Linear layers with a dropout after each; returns a dict with the loss, as the Trainer asks.

    Args:
        num_modules: about as many.
    """

    def __init__(self, num_modules: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(num_modules // 3)
        )

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            rows = layer(rows)
        return {"loss": rows.square().mean()}


@dataclass(frozen=True)
class Training:
    """What all adapters train.

    Args:
        num_modules: of the model.
        num_steps: of the run.
        collate: makes a batch of some rows; called once a step.
        saves: whether resumekit saves after every step, or not before the end.
        directory: of the run; None for a bare one.
    """

    num_modules: int
    num_steps: int
    collate: Callable[[list[torch.Tensor]], Any]
    saves: bool = False
    directory: Path | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the Checkpointer or the callback."""
        return {"save_every": 1 if self.saves else _NEVER, "keep_latest": 2, "leave_on": ()}

    def data(self) -> Samples:
        """As many samples as the run uses."""
        return Samples(self.num_steps * BATCH_SIZE)

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """Model, optimizer and loader."""
        model = Model(self.num_modules)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(self.data(), BATCH_SIZE, shuffle=True, collate_fn=self.collate)
        return model, optimizer, loader


def train_torch(training: Training) -> None:
    """A custom training loop."""
    from resumekit.adapters.torch import Checkpointer

    model, optimizer, loader = training.parts()
    run: Any = None
    if training.directory is not None:
        run = Checkpointer(training.directory, model=model, optimizer=optimizer, **training.options)
    for batch in loader if run is None else run.batches(loader, epochs=1):
        loss = model(batch["rows"])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run is not None:
            run.step(loss=loss)
    if run is not None:
        run.close()


def train_accelerate(training: Training) -> None:
    """The same with an Accelerator."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator: Any = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*training.parts())
    run: Any = None
    if training.directory is not None:
        run = Checkpointer(accelerator, training.directory, **training.options)
    for batch in loader if run is None else run.batches(loader, epochs=1):
        loss = model(batch["rows"])["loss"]
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if run is not None:
            run.step(loss=loss)
    if run is not None:
        run.close()


def train_trainer(training: Training) -> None:
    """A transformers Trainer."""
    from transformers import Trainer, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=training.num_steps,
            per_device_train_batch_size=BATCH_SIZE,
            logging_steps=_NEVER,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            Model(training.num_modules),
            arguments,
            train_dataset=training.data(),
            data_collator=training.collate,
        )
        if training.directory is not None:
            trainer.add_callback(ResumeCallback(trainer, training.directory, **training.options))
        trainer.train()


def train_lightning(training: Training) -> None:
    """A Lightning Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    from resumekit.adapters.lightning import ResumeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(training.num_modules)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(batch["rows"])["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callbacks: list[Any] = []
    if training.directory is not None:
        callbacks.append(ResumeCallback(training.directory, **training.options))
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Module(), training.parts()[2])


def train_deepspeed(training: Training) -> None:
    """A DeepSpeed engine at stage 0, one rank with gloo."""
    import deepspeed

    from resumekit.adapters.deepspeed import Checkpointer

    model, _, loader = training.parts()
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": BATCH_SIZE, "optimizer": optimizer}
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]
    run: Any = None
    if training.directory is not None:
        run = Checkpointer(engine, training.directory, **training.options)
    for batch in loader if run is None else run.batches(loader, epochs=1):
        loss = engine(batch["rows"])["loss"]
        engine.backward(loss)
        engine.step()
        if run is not None:
            run.step(loss=loss)
    if run is not None:
        run.close()


TRAININGS: Mapping[str, Callable[[Training], None]] = {
    "torch": train_torch,
    "accelerate": train_accelerate,
    "transformers": train_trainer,
    "lightning": train_lightning,
    "deepspeed": train_deepspeed,
}


@contextmanager
def prepared(adapter: str) -> Iterator[None]:
    """Initializes what DeepSpeed needs of one rank; hides warnings."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        warnings.simplefilter("ignore")
        if adapter == "deepspeed":
            os.environ["LOCAL_RANK"] = "0"  # deepspeed 0.19 runtime/engine.py requires it
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{name}/store", rank=0, world_size=1
            )
        yield
        if adapter == "deepspeed":
            torch.distributed.destroy_process_group()
