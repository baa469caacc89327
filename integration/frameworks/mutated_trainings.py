"""One small training in each framework, for checkpoints whose content is changed.

Two epochs of four batches, an optimizer step after two of them. A launch builds all objects in
this process; what the training computes is noted where no framework saves it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from one_rank import one_rank
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from crashlab.judging import NEWEST, OLDER, POSITIONS, Judge
from crashlab.programs import apart
from resumekit import ResumeReport
from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.deepspeed import Checkpointer as DeepSpeedCheckpointer
from resumekit.adapters.lightning import ResumeCallback as LightningCallback
from resumekit.adapters.transformers import ResumeCallback
from resumekit.serialization.digests import state_digest
from resumekit.state import CLOCK_SUFFIXES

BATCH_SIZE, EPOCHS, WINDOW = 2, 2, 2
NUM_AFTER = 2  # batches after the newest checkpoint

NOTES = logging.getLogger("mutated_trainings")  # a logger has no state that a checkpoint saves


class Noted(logging.Handler):
    """Collects what is noted of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.batches.append(record.args)


class Samples(Dataset[dict[str, Tensor]]):
    """Samples with noise and their number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.linspace(-1, 1, 48).reshape(8, 6)[index]
        return {"inputs": inputs + 0.1 * torch.rand(6), "index": torch.tensor(index)}


class Net(nn.Module):
    """It gives its loss, which is noted with the numbers of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)
        )

    def forward(self, inputs: Tensor, index: Tensor) -> dict[str, Tensor]:
        loss = self.layers(inputs).square().mean()
        if self.training:
            NOTES.error("%s: %s", index.tolist(), loss.item().hex())
        return {"loss": loss}


class Launch:
    """What the launches have in common; see ``crashlab.judging.Launch``.

    Args:
        directory: the run directory.
        seed: of what the script makes.
        options: of the library.

    Attributes:
        positions: how the names of values begin that decide which batch and step come next.
    """

    positions: ClassVar[tuple[str, ...]] = ()

    def __init__(self, directory: Path, *, seed: int = 9, **options: Any) -> None:
        for function in (random.seed, np.random.seed, torch.manual_seed):
            function(seed)
        self.model: Any = Net()
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.build(directory, {"save_every": None, "keep_latest": None, **options})

    def build(self, directory: Path, options: dict[str, Any]) -> None:
        """Makes the framework's objects."""
        raise NotImplementedError

    def train(self) -> None:
        """Resumes and trains to the end."""
        raise NotImplementedError

    def checkpointer(self) -> Any:
        """The run's, or None before there is one."""
        raise NotImplementedError

    def live(self) -> Any:
        """The states of the framework's own objects."""
        raise NotImplementedError

    @property
    def report(self) -> ResumeReport | None:
        checkpointer = self.checkpointer()
        running = None if checkpointer is None else checkpointer._run.resumed
        return None if running is None else running.report

    def digest(self) -> str:
        objects = (self.model, self.optimizer, self.scheduler)
        return state_digest([*(each.state_dict() for each in objects), self.live()])

    def run(self) -> Any:
        NOTES.handlers[:] = [noted := Noted()]
        NOTES.propagate = False
        apart(self.train)
        numpy, of_torch = np.random.get_state(legacy=False), torch.get_rng_state()
        random_state = state_digest((repr(random.getstate()), numpy, of_torch))
        return noted.batches[-NUM_AFTER:], random_state

    def abandon(self) -> None:
        """Closes what the error has left open."""
        checkpointer = self.checkpointer()
        if checkpointer is not None:
            checkpointer._loop.abandon()


# ---------------------------------------------------------------- the Trainer


class CountingCallback(TrainerCallback):
    """User state: attributes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses.append(kwargs["logs"].get("loss", 0.0))


class InTheTrainer(Launch):
    positions = ("callbacks/trainer_state.global_step",)

    def build(self, directory: Path, options: dict[str, Any]) -> None:
        arguments = TrainingArguments(
            output_dir=str(directory.parent / "output"),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            gradient_accumulation_steps=WINDOW,
            logging_steps=1,
            eval_strategy="epoch",
            label_names=["index"],  # only with labels it evaluates a loss
            metric_for_best_model="loss",
            greater_is_better=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        self.counting, stopping = CountingCallback(), EarlyStoppingCallback(9)
        self.stopping = stopping
        self.trainer = Trainer(
            self.model,
            arguments,
            train_dataset=Samples(),
            eval_dataset=Samples(),
            optimizers=(self.optimizer, self.scheduler),
            callbacks=[self.counting, stopping],
        )
        self.callback = ResumeCallback(self.trainer, directory, **options)
        self.trainer.add_callback(self.callback)

    def train(self) -> None:
        self.trainer.train()

    def checkpointer(self) -> Any:
        return getattr(self.callback, "_checkpointer", None)

    def live(self) -> Any:
        state = self.trainer.state
        log = [
            {key: value for key, value in line.items() if not key.endswith(CLOCK_SUFFIXES)}
            for line in state.log_history
        ]
        counts = (state.global_step, state.best_metric, state.best_global_step, state.total_flos)
        return log, counts, self.counting.losses, self.stopping.early_stopping_patience_counter


# ---------------------------------------------------------------- Accelerate


class InAccelerate(Launch):
    positions = ("callbacks/accelerator.sync_gradients",)

    def build(self, directory: Path, options: dict[str, Any]) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
        loader, unused = (DataLoader(Samples(), BATCH_SIZE, shuffle=True) for _ in range(2))
        prepared: Any = accelerator.prepare(
            self.model, self.optimizer, loader, unused, self.scheduler
        )
        self.prepared = prepared
        self.ours = AccelerateCheckpointer(accelerator, directory, **options)

    def train(self) -> None:
        model, optimizer, loader, _, scheduler = self.prepared
        with self.ours as checkpointer:
            for batch in checkpointer.batches(loader, epochs=EPOCHS):
                with self.accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    self.accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                checkpointer.step(loss=loss)

    def checkpointer(self) -> Any:
        return self.ours

    def live(self) -> Any:
        return self.accelerator.step, self.accelerator.gradient_accumulation_steps


# ---------------------------------------------------------------- Lightning


class Keeping(Callback):
    """User state: a state dict, which a load checks as little as most do."""

    def __init__(self) -> None:
        self.sums = {"loss": 0.0}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.sums["loss"] += outputs["loss"].item()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sums)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sums["loss"] = state_dict["loss"] + 0.0


class Attributed(Callback):
    """User state: attributes."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, *given: Any) -> None:
        self.num_batches += 1


class Lit(LightningModule):
    """The network with logged averages, and a hook of its own."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.net = launch.model
        self.made = ([launch.optimizer], [{"scheduler": launch.scheduler, "interval": "step"}])
        self.hooked = 0.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.hooked += 1.0
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("score", self.net(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        return self.made

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hooked"] = self.hooked

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.hooked = checkpoint["hooked"] + 0.0


class KeptCallback(LightningCallback):
    """Its Checkpointer stays known after the fit."""

    made: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        try:
            super().on_fit_start(trainer, pl_module)
        finally:
            self.made = self._checkpointer


class InLightning(Launch):
    positions = ("callbacks/lightning.loops.",)

    def build(self, directory: Path, options: dict[str, Any]) -> None:
        models = directory.parent / "models"
        self.saving = ModelCheckpoint(
            models, monitor="loss_step", save_top_k=1, every_n_train_steps=1, save_weights_only=True
        )
        self.keeping, self.attributed = Keeping(), Attributed()
        self.callback = KeptCallback(directory, **options)
        self.trainer = LightningTrainer(
            max_epochs=EPOCHS,
            accumulate_grad_batches=WINDOW,
            callbacks=[self.saving, self.keeping, self.attributed, self.callback],
            default_root_dir=str(directory.parent / "output"),
            accelerator="cpu",
            logger=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.module = Lit(self)

    def train(self) -> None:
        loader = DataLoader(Samples(), BATCH_SIZE, shuffle=True)
        validation = DataLoader(Samples(), BATCH_SIZE)
        self.trainer.fit(self.module, loader, validation)

    def checkpointer(self) -> Any:
        return self.callback.made

    def live(self) -> Any:
        trainer, saving = self.trainer, self.saving
        counts = (trainer.global_step, trainer.current_epoch, self.attributed.num_batches)
        best = (saving.best_model_score, Path(saving.best_model_path).name, saving.current_score)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return counts, best, metrics, self.keeping.sums, self.module.hooked


# ---------------------------------------------------------------- DeepSpeed


class InDeepSpeed(Launch):
    # An engine may have stepped before the run, or less often than others: its counts are its own.
    stage = 1

    def build(self, directory: Path, options: dict[str, Any]) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "gradient_accumulation_steps": WINDOW,
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=self.model.parameters(),
            lr_scheduler=lambda made: LambdaLR(made, lambda step: 0.9**step),
            config=config,
        )
        self.optimizer = self.engine.optimizer.optimizer
        self.scheduler = self.engine.lr_scheduler
        self.ours = DeepSpeedCheckpointer(self.engine, directory, **options)

    def train(self) -> None:
        loader = DataLoader(Samples(), BATCH_SIZE, shuffle=True)
        with self.ours as checkpointer:
            for batch in checkpointer.batches(loader, epochs=EPOCHS):
                loss = self.engine(**batch)["loss"]
                self.engine.backward(loss)
                self.engine.step()
                checkpointer.step(loss=loss)

    def checkpointer(self) -> Any:
        return self.ours

    def live(self) -> Any:
        engine = self.engine
        counts = (engine.global_steps, engine.micro_steps, engine.global_samples)
        masters = list(engine.optimizer.single_partition_of_fp32_groups)
        return counts, float(engine.get_global_grad_norm() or 0.0), masters


FRAMEWORKS: dict[str, Callable[..., Launch]] = {
    "Trainer": InTheTrainer,
    "Accelerate": InAccelerate,
    "Lightning": InLightning,
    "DeepSpeed": InDeepSpeed,
}


@contextmanager
def _engines() -> Iterator[None]:
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # an engine asks for it
        yield


@contextmanager
def judge_of(kind: str, folder: Path) -> Iterator[tuple[Judge, Path]]:
    """The judge of a framework, and its run directory with two checkpoints within epochs.

    Raises:
        AssertionError: a resume from the unchanged checkpoint differs from the run.
    """
    launch: Any = FRAMEWORKS[kind]
    with _engines() if kind == "DeepSpeed" else nullcontext():
        run = folder / "pristine" / "run"
        run.parent.mkdir()
        first = launch(run, seed=0, save_every=1)
        seen = first.run()
        for each in run.glob("step-*"):
            if not each.name.startswith((NEWEST, OLDER)):
                for path in sorted(each.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                each.rmdir()
        judge = Judge(
            partial(launch),
            run,
            folder,
            code=Path(__file__).name,
            positions=(*POSITIONS, *launch.positions),
        )
        assert judge.expected == f"{first.digest()} {seen}"
        yield judge, run
