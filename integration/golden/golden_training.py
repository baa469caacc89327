"""Small trainings whose checkpoints are stored beside this script; each records its own steps.

``python golden_training.py NAME DIRECTORY RECORDS [--stop-after STEP]``. All values are multiples
of powers of two, so that every processor computes the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, SAVE_EVERY = 24, 4, 2, 8
NUM_STEPS = NUM_EPOCHS * NUM_SAMPLES // BATCH_SIZE


class Samples(Dataset[Any]):
    """Sample i is a row of eight multiples of 1/8; a random number is drawn for each."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = random.randrange(8) + int(np.random.randint(8)) + int(torch.randint(8, ()))
        row = torch.arange(8, dtype=torch.float32) * (index % 5) + index + noise
        return {"inputs": row / 8}


class Model(nn.Module):
    """A weighted mean with dropout, a tied weight, a buffer of integers and a count in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8, dtype=torch.float32) / 16)
        self.tied = self.weight
        self.small = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, inputs: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        self.num_batches += 1  # type: ignore[operator, assignment]
        self.calls += 1
        loss = (self.dropout(inputs) * self.weight).sum(1).mean() + self.small.float().mean()
        return {"loss": loss}


class Records:
    """One line a step: the loss and the weights, written before the step can be saved."""

    def __init__(self, path: Path, stop_after: int | None) -> None:
        self.path, self.stop_after = path, stop_after
        self.done = 0

    def add(self, step: int, loss: Any, model: nn.Module) -> None:
        weights = [p.detach().float().flatten().tolist() for p in model.parameters()]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "loss": float(torch.as_tensor(loss).detach()),
                        "weights": weights,
                    }
                )
                + "\n"
            )
        if step == self.stop_after:
            os._exit(0)  # like a killed process: no exit handler runs


def loader() -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=BATCH_SIZE, shuffle=True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def train_torch(directory: Path, records: Records) -> None:
    from resumekit.adapters.torch import Checkpointer

    model = Model()
    optimizer = optimizer_of(model)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    average = AveragedModel(model, avg_fn=lambda old, new, count: (old + new) / 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    extras = {"counts": [1, 2], "name": "golden", "ratio": 0.5}
    ckpt = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        grad_scaler=scaler,
        ema=average,
        extras=extras,
        best_metric="eval_loss",
        save_every=SAVE_EVERY,
        record_command=False,
    )
    for batch in ckpt.batches(loader(), epochs=NUM_EPOCHS):
        loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        extras["counts"] = [*extras["counts"], ckpt.progress.step]  # type: ignore[misc]
        records.add(ckpt.progress.step + 1, loss, model)
        if ckpt.progress.step + 1 == SAVE_EVERY:
            ckpt.report(eval_loss=0.5)
        ckpt.step(loss=loss)


def train_sharded(directory: Path, records: Records) -> None:
    """FSDP2 on two ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DistributedSampler

    from resumekit.adapters.torch import Checkpointer

    dist.init_process_group("gloo")
    stop_after, records.stop_after = records.stop_after, None  # both ranks stop together
    model = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 / 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    samples = Samples()
    sampler: DistributedSampler[Any] = DistributedSampler(samples, shuffle=True)
    data: DataLoader[Any] = DataLoader(samples, batch_size=BATCH_SIZE // 2, sampler=sampler)
    ckpt = Checkpointer(
        directory, model=model, optimizer=optimizer, save_every=SAVE_EVERY, record_command=False
    )
    for epoch in ckpt.epochs(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in ckpt.batches(data):
            loss = model(batch["inputs"]).mean()
            optimizer.zero_grad()
            loss.backward()  # reshards the parameters
            for parameter in model.parameters():  # independent of the order of a sum of products
                parameter.grad = torch.full_like(parameter, 1 / 8)
            optimizer.step()
            whole = nn.Module()
            for number, parameter in enumerate(model.parameters()):
                whole.register_parameter(
                    str(number),
                    nn.Parameter(parameter.full_tensor().detach()),  # type: ignore[attr-defined]
                )
            value = batch["inputs"].sum()
            dist.all_reduce(value)
            if dist.get_rank() == 0:
                records.add(ckpt.progress.step + 1, value, whole)
            dist.barrier()
            if ckpt.progress.step + 1 == stop_after:
                os._exit(0)
            ckpt.step(loss=loss)
    dist.destroy_process_group()


def train_accelerate(directory: Path, records: Records) -> None:
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, loader())
    ckpt = Checkpointer(accelerator, directory, save_every=SAVE_EVERY, record_command=False)
    for batch in ckpt.batches(data, epochs=NUM_EPOCHS):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        records.add(ckpt.progress.step + 1, loss, model)
        ckpt.step(loss=loss)


def train_transformers(directory: Path, records: Records) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    model = Model()
    losses: list[float] = []

    class Recording(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            records.add(state.global_step, losses[-1], model)

    class GoldenTrainer(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    optimizer = optimizer_of(model)
    trainer = GoldenTrainer(
        model,
        TrainingArguments(
            output_dir=str(directory),
            num_train_epochs=NUM_EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_steps=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=0,
        ),
        train_dataset=Samples(),
        optimizers=(optimizer, StepLR(optimizer, step_size=3, gamma=0.5)),
        callbacks=[Recording()],
    )
    trainer.add_callback(
        ResumeCallback(trainer, directory, save_every=SAVE_EVERY, record_command=False)
    )
    trainer.train()


def train_lightning(directory: Path, records: Records) -> None:
    import lightning

    from resumekit.adapters.lightning import ResumeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            records.add(self.trainer.global_step, outputs["loss"], self.model)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.model)
            scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=NUM_EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResumeCallback(directory, save_every=SAVE_EVERY, record_command=False)],
    )
    trainer.fit(Module(), loader())


def equal_gradients(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """All 16 gradients are equal: their norm is exact, also where ``sqrt`` rounds wrongly.

    MKL's square root does on some processors, and the engine's norm is in the checkpoint.
    """
    return (inputs.mean(1) * weight.sum()).mean()


def other_gradients(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (inputs * weight[0] + inputs * weight[1]).sum(1).mean()


def train_deepspeed(
    directory: Path,
    records: Records,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = equal_gradients,
) -> None:
    """ZeRO-1 on one rank."""
    import deepspeed

    from resumekit.adapters.deepspeed import Checkpointer

    deepspeed.init_distributed("gloo")
    model = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(16).view(2, 8) / 16)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5),
        config={
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )
    ckpt = Checkpointer(engine, directory, save_every=SAVE_EVERY, record_command=False)
    for batch in ckpt.batches(loader(), epochs=NUM_EPOCHS):
        inputs = batch["inputs"]
        engine.backward(loss_of(inputs, engine.module.weight))
        engine.step()
        records.add(engine.global_steps, inputs.sum(), model)


TRAININGS: dict[str, Callable[[Path, Records], None]] = {
    "torch": train_torch,
    "sharded": train_sharded,
    "accelerate": train_accelerate,
    "transformers": train_transformers,
    "lightning": train_lightning,
    "deepspeed": train_deepspeed,
    "deepspeed-1": partial(train_deepspeed, loss_of=other_gradients),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=TRAININGS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--stop-after", type=int)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    records = Records(arguments.records, arguments.stop_after)
    TRAININGS[arguments.name](arguments.directory, records)


if __name__ == "__main__":
    main()
