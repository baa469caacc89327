"""Training functions that log to a tracker; the conformance kit launches and kills them.

Each logs as users do, with the tracker's own defaults. ``trackers="off"`` is the control. None
looks at whether it was started before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from digits import Digits
from torch import nn
from torch.utils.data import DataLoader

Follows = Literal["continue", "off"]
SAVE_EVERY = 3
EPOCHS = 2


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(Digits(92, augment=False), batch_size=8, shuffle=True)


def database(directory: str | Path) -> str:
    """The address of MLflow's data; it has one name for all processes of a run."""
    return f"sqlite:///{directory}/mlflow.db"


def plain_mlflow(directory: str, *, trackers: Follows = "continue") -> None:
    """A loop that logs with MLflow's functions."""
    import mlflow

    from resumekit.adapters.torch import Checkpointer

    mlflow.set_tracking_uri(database(directory))
    model, optimizer, loader = _parts()
    with mlflow.start_run():
        mlflow.log_params({"lr": 1e-2})
        ckpt = Checkpointer(Path(directory, "run"), save_every=SAVE_EVERY, trackers=trackers)
        for inputs, labels in ckpt.batches(loader, epochs=EPOCHS):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
            mlflow.log_metric("loss", loss.item(), step=ckpt.progress.step)
            mlflow.log_metrics({"double": 2 * loss.item()}, step=ckpt.progress.step)


def plain_trackio(directory: str, *, trackers: Follows = "continue", steps: bool = False) -> None:
    """A loop that logs with trackio's functions, with or without steps."""
    os.environ["TRACKIO_DIR"] = directory
    import trackio

    from resumekit.adapters.torch import Checkpointer

    model, optimizer, loader = _parts()
    run = trackio.init(project="project", config={"lr": 1e-2})
    trackio.log({"num_parameters": 1210})
    ckpt = Checkpointer(Path(directory, "run"), save_every=SAVE_EVERY, trackers=trackers)
    for inputs, labels in ckpt.batches(loader, epochs=EPOCHS):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = ckpt.progress.step + 1 if steps else None
        trackio.log({"loss": loss.item()}, step=step)
        ckpt.step(loss=loss)
        run.log({"double": 2 * loss.item()}, step=step)
    trackio.finish()


def plain(directory: str, *, trackers: Follows = "continue", fixed: bool = False) -> None:
    """A loop with a SummaryWriter, whose tags count steps, samples and epochs."""
    from torch.utils.tensorboard import SummaryWriter

    from resumekit.adapters.torch import Checkpointer

    model, optimizer, loader = _parts()
    logs = Path(directory, "logs") if fixed else Path(directory, f"logs-{time.time_ns()}")
    writer = SummaryWriter(logs)
    writer.add_text("arguments", "lr=1e-2")
    ckpt = Checkpointer(Path(directory, "run"), save_every=SAVE_EVERY, trackers=trackers)
    for epoch in ckpt.epochs(EPOCHS):
        last = 0.0
        for inputs, labels in ckpt.batches(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = loss.item()
            ckpt.step(loss=loss)
            step = ckpt.progress.step
            writer.add_scalar("loss by step", last, step)
            writer.add_scalar("loss by samples", last, step * 8)
            writer.add_scalars("parts", {"first": last, "second": 2 * last}, step)
        writer.add_scalar("epoch", last, epoch)
    writer.close()


def accelerate(directory: str, *, trackers: Follows = "continue", log_with: str) -> None:
    """A loop that logs with ``accelerator.log``."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    os.environ.update(MLFLOW_TRACKING_URI=database(directory), TRACKIO_DIR=directory)
    accelerator = Accelerator(cpu=True, log_with=log_with, project_dir=directory)
    accelerator.init_trackers("project", config={"lr": 1e-2})
    model, optimizer, loader = accelerator.prepare(*_parts())
    run = Path(directory, "run")
    ckpt = Checkpointer(accelerator, run, save_every=SAVE_EVERY, trackers=trackers)
    for inputs, labels in ckpt.batches(loader, epochs=EPOCHS):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        ckpt.step(loss=loss)
        accelerator.log({"loss": loss.item()}, step=ckpt.progress.step)
    accelerator.end_training()


def trainer(directory: str, *, trackers: Follows = "continue", report_to: str) -> None:
    """The Trainer with ``report_to``; it evaluates every five steps."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
    from transformers_workloads import BATCH_SIZE, BLOCK_SIZE, Blocks

    from resumekit.adapters.transformers import ResumeCallback

    os.environ.update(MLFLOW_TRACKING_URI=database(directory), TRACKIO_DIR=directory)
    set_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    training = Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=BLOCK_SIZE, **sizes)),
        TrainingArguments(
            output_dir=str(Path(directory, "output")),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="no",
            report_to=report_to,
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=Blocks(augment=False),
        eval_dataset=Blocks(augment=False),
    )
    run = Path(directory, "run")
    saving = ResumeCallback(training, run, save_every=SAVE_EVERY, trackers=trackers)
    training.add_callback(saving)
    training.train()


def lightning(
    directory: str,
    *,
    trackers: Follows = "continue",
    loggers: tuple[str, ...] = ("tensorboard", "csv"),
    version: str | None = None,
) -> None:
    """Lightning with the loggers' own versions, or with one that the script gives."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
    from lightning_workloads import QUIET, Classifier, make_loader

    from resumekit.adapters.lightning import ResumeCallback

    class Logged(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("step_loss", loss, on_step=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            inputs, labels = batch
            self.log("val_loss", nn.functional.cross_entropy(self.layers(inputs), labels))

    torch.manual_seed(1)
    module = Logged()
    module.save_hyperparameters({"lr": 1e-2})
    kinds: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: TensorBoardLogger(Path(directory, "tensorboard"), version=version),
        "csv": lambda: CSVLogger(Path(directory, "csv"), version=version),
        "mlflow": lambda: MLFlowLogger(tracking_uri=database(directory)),
    }
    made = [kinds[each]() for each in loggers]
    saving = ResumeCallback(Path(directory, "run"), save_every=SAVE_EVERY, trackers=trackers)
    Trainer(
        max_epochs=EPOCHS,
        default_root_dir=directory,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor(), saving],
        **{**QUIET, "logger": made},
    ).fit(
        module,
        make_loader(False, "shuffle", "0", 92),
        make_loader(False, "in order", "0", 20),
    )
