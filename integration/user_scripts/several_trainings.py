"""A program that trains several times: folds, configurations, a pretraining and what follows it.

It knows nothing of resumekit. It is killed once, in the training and at the sample that a variable
names, or between two trainings, and writes the loss and the weights of each training to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

NUM_SAMPLES, BATCH_SIZE, EPOCHS, NUM_FOLDS = 48, 8, 3, 3
KILL_AT, MARKER = "KILL_AT", "KILL_ONCE"  # "2:17": in training 2, at its read 17; "2:end"


def kill(training: int, at: int | str) -> None:
    """Kills the process once, where the variable says so."""
    marker = Path(os.environ.get(MARKER, os.devnull))
    if os.environ.get(KILL_AT) == f"{training}:{at}" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples of a linear function with noise.

    Args:
        seed: of the samples.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(NUM_SAMPLES, 4, generator=generator)
        self.y = self.x.sum(1) + torch.randn(NUM_SAMPLES, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        Reads.count += 1
        kill(Reads.training, Reads.count)
        return {"x": self.x[index], "y": self.y[index]}


class Reads:
    """How many samples the training in progress has read in this launch."""

    training = 0
    count = 0


class Net(nn.Module):
    """A model as the Trainer wants it: it gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(x).squeeze(1)
        return {"loss": nn.functional.mse_loss(found, y), "logits": found}


Again = Callable[[], Any]


def with_trainer(net: Net, data: Dataset[Any], rate: float, directory: Path) -> Again:
    """Trains under the Trainer of transformers; returns what trains with it again."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(directory),
        learning_rate=rate,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(net, arguments, train_dataset=data)
    trainer.train()
    return trainer.train


def with_lightning(net: Net, data: Dataset[Any], rate: float, directory: Path) -> Again:
    """Trains under Lightning's Trainer; returns what trains with it again."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.net, self.rate = net, rate

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.rate)

    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        default_root_dir=str(directory),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loader = Module(rate), DataLoader(data, BATCH_SIZE, shuffle=True)

    def again() -> None:
        trainer.fit_loop.max_epochs = 2 * EPOCHS
        trainer.fit(module, loader)

    trainer.fit(module, loader)
    return again


# Trains: a name, data, a learning rate, and the net to begin with; or the last net and Trainer.
Train = Callable[[str, Dataset[Any] | None, float, Net | None], Net]


def folds(train: Train, done: dict[str, Any]) -> None:
    """A cross-validation that trains each fold again."""
    data = Samples(0)
    for fold in range(NUM_FOLDS):
        rows = [index for index in range(NUM_SAMPLES) if index % NUM_FOLDS != fold]
        train(f"fold {fold}", Subset(data, rows), 0.05, None)


def left_folds(train: Train, done: dict[str, Any]) -> None:
    """One that leaves out the folds that have a result."""
    data = Samples(0)
    for fold in range(NUM_FOLDS):
        rows = [index for index in range(NUM_SAMPLES) if index % NUM_FOLDS != fold]
        if f"fold {fold}" not in done:
            train(f"fold {fold}", Subset(data, rows), 0.05, None)


def left_rates(train: Train, done: dict[str, Any]) -> None:
    """A sweep over learning rates that leaves out those that have a result."""
    for rate in (0.2, 0.05, 0.01):
        if f"rate {rate}" not in done:
            train(f"rate {rate}", Samples(0), rate, None)


def drawn_rates(train: Train, done: dict[str, Any]) -> None:
    """A search that draws the same rates in each launch."""
    draws = random.Random(7)
    for trial in range(3):
        train(f"trial {trial}", Samples(0), round(draws.uniform(0.01, 0.2), 4), None)


def left_repetitions(train: Train, done: dict[str, Any]) -> None:
    """The same training three times; only the variable of the loop differs."""
    for repetition in range(3):
        if f"repetition {repetition}" not in done:
            train(f"repetition {repetition}", Samples(0), 0.05, None)


def left_twins(train: Train, done: dict[str, Any]) -> None:
    """Two trainings that nothing distinguishes, after one that has a result."""
    if "first" not in done:
        train("first", Samples(1), 0.05, None)
    train("twin", Samples(0), 0.05, None)
    train("twin", Samples(0), 0.05, None)


def finetuning(train: Train, done: dict[str, Any]) -> None:
    """A pretraining, and two trainings that continue with its weights."""
    net = train("pretraining", Samples(0), 0.05, None)
    for seed in (1, 2):
        net = train(f"finetuning {seed}", Subset(Samples(seed), range(32)), 0.01, net)


def two_fits(train: Train, done: dict[str, Any]) -> None:
    """One Trainer that trains, and trains on."""
    train("first", Samples(0), 0.05, None)
    train("second", None, 0.05, None)


PROGRAMS = {
    each.__name__: each
    for each in (
        folds,
        left_folds,
        left_rates,
        drawn_rates,
        left_repetitions,
        left_twins,
        finetuning,
        two_fits,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("framework", choices=["trainer", "lightning"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = arguments.out / "results.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    done = json.loads(results.read_text()) if results.exists() else {}
    train_with = with_trainer if arguments.framework == "trainer" else with_lightning
    numbers = iter(range(1, 99))
    last: tuple[Net, Again] | None = None

    def train(name: str, data: Dataset[Any] | None, rate: float, net: Net | None) -> Net:
        nonlocal last
        Reads.training, Reads.count = next(numbers), 0
        torch.manual_seed(len(name))
        if data is not None:
            net = net or Net()
            last = net, train_with(net, data, rate, arguments.out / "work")
        else:
            assert last is not None
            net, again = last
            again()
        weights = {key: value.tolist() for key, value in net.state_dict().items()}
        done[name] = {"weights": weights}
        results.write_text(json.dumps(done))
        kill(Reads.training, "end")
        return net

    PROGRAMS[arguments.program](train, done)


if __name__ == "__main__":
    main()
