"""Trainings of the Hugging Face Trainer and of Lightning with state outside the model's parameters.

AdaLoRA's importance scores, a Trainer class with attributes, a callback with a deque, an object
for ``compute_loss_func``; a LightningModule with a helper object and a closure.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from peft import AdaLoraConfig, get_peft_model
from tiny_training import BATCHES, EPOCHS, Recorder, loss_of, make
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from resumekit.adapters.lightning import ResumeCallback as LightningResume
from resumekit.adapters.transformers import ResumeCallback

NUM_STEPS = EPOCHS * BATCHES


class Recording(TrainerCallback):
    """Records the loss that the model gave last, and the weights, at the end of each step."""

    def __init__(self, record: Recorder) -> None:
        self.record = record

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record(torch.zeros(()), kwargs["model"])


def arguments(directory: str, **settings: Any) -> TrainingArguments:
    """Three epochs of seven batches of four."""
    given: dict[str, Any] = {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 4}
    given |= {"learning_rate": 0.02, "lr_scheduler_type": "constant", "report_to": "none"}
    given |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(output_dir=f"{directory}-output", **{**given, **settings})


def train(trainer: Any, directory: str, record: Recorder, **options: Any) -> None:
    """Trains with the callback of the library."""
    trainer.add_callback(Recording(record))
    trainer.add_callback(ResumeCallback(trainer, directory, **options))
    trainer.train()


# ---------------------------------------------------------------- AdaLoRA


class Allocating(TrainerCallback):
    """Calls ``update_and_allocate`` between the optimizer's step and ``zero_grad``."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step)


def sentences() -> list[dict[str, torch.Tensor]]:
    """Random tokens."""
    tokens = torch.randint(19, (BATCHES * 4, 6))
    return [{"input_ids": row, "labels": row} for row in tokens]


def adalora(directory: str, *, record: Recorder, **options: Any) -> None:
    """PEFT's AdaLoRA on a tiny GPT-2: ranks are masked every four steps, from scores it keeps."""
    set_seed(0)
    config = GPT2Config(vocab_size=19, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    adapter = AdaLoraConfig(
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,
        init_r=6,
        target_r=2,
        tinit=4,
        tfinal=4,
        deltaT=4,
        beta1=0.85,
        beta2=0.85,
        total_step=NUM_STEPS,
        lora_dropout=0.1,
    )
    model = get_peft_model(GPT2LMHeadModel(config), adapter)
    trainer = Trainer(
        model, arguments(directory), train_dataset=sentences(), callbacks=[Allocating()]
    )
    train(trainer, directory, record, **options)


# ---------------------------------------------------------------- a helper of an installed library

LIBRARY = '''
import torch


class Scores:
    """Importance of each weight: what it is multiplied with depends on it."""

    def __init__(self, beta):
        self.beta, self.num_updates = beta, 0
        self.ipt, self.exp_avg_ipt = {}, {}

    def update(self, named):
        self.num_updates += 1
        for name, p in named:
            self.ipt[name] = (p.detach() * p.grad).abs()
            kept = self.exp_avg_ipt.get(name, torch.zeros_like(self.ipt[name]))
            self.exp_avg_ipt[name] = self.beta * kept + (1 - self.beta) * self.ipt[name]

    def shrink(self, named):
        if self.num_updates % 4:
            return
        with torch.no_grad():
            for name, p in named:
                scores = self.exp_avg_ipt[name]
                p.mul_(1 - 0.5 * (scores < scores.median()))


class Scored(torch.nn.Module):
    """A module of the library, which holds its helper."""

    def __init__(self, inner, beta=0.8):
        super().__init__()
        self.inner, self.allocator = inner, Scores(beta)

    def forward(self, x):
        return self.inner(x)

    def update_and_allocate(self):
        named = [*self.inner.named_parameters()]
        self.allocator.update(named)
        self.allocator.shrink(named)
'''


def installed_library(directory: str) -> Any:
    """The module ``scoring_library`` of a folder that pip could have written."""
    folder = Path(f"{directory}-venv", "site-packages")
    package = folder / "scoring_library"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(LIBRARY, encoding="utf-8")
    sys.path.insert(0, str(folder))
    import scoring_library  # type: ignore[import-not-found, unused-ignore]

    return scoring_library


class Regression(nn.Module):
    """The arguments and the loss that the Trainer asks for."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        out = self.layers(x)
        if labels is None:
            return {"logits": out}
        return {"loss": nn.functional.mse_loss(out[:, 0], labels[:, 0]), "logits": out}


def rows() -> list[dict[str, torch.Tensor]]:
    """Inputs and targets."""
    return [{"x": x, "labels": y} for x, y in torch.randn(BATCHES * 4, 2, 4)]


def layers() -> nn.Module:
    """Like the model of ``tiny_training``."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


class Scoring(TrainerCallback):
    """Calls the module of the library, as AdaLoRA's users do."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].layers.update_and_allocate()


def helper_of_a_library(directory: str, *, record: Recorder, **options: Any) -> None:
    """A plain object of an installed library, inside a module of it, under the Trainer."""
    set_seed(0)
    library = installed_library(directory)
    trainer = Trainer(
        Regression(library.Scored(layers())),
        arguments(directory),
        train_dataset=rows(),
        callbacks=[Scoring()],
    )
    train(trainer, directory, record, **options)


def helper_of_a_library_in_a_loop(directory: str, *, record: Recorder, **options: Any) -> None:
    """The same in a loop, with the model and the optimizer passed."""
    from resumekit.adapters.torch import Checkpointer

    inner, _, loader = make()
    model = installed_library(directory).Scored(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        model.update_and_allocate()
        optimizer.zero_grad()
        ckpt.step(loss=loss.item())
        record(loss, model)


# ---------------------------------------------------------------- the Trainer's own parts


class WeightedTrainer(Trainer):
    """Attributes of a class derived from Trainer weigh the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.level, self.losses = 1.0, deque(maxlen=4)
        self.centre = torch.zeros(())

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] * (0.4 + self.level + sum(self.losses) / 8 + self.centre)
        self.level = 0.8 * self.level + 0.1 * loss.item()
        self.losses.append(loss.item())
        self.centre.mul_(0.9).add_(0.02 * loss.item())
        return (loss, outputs) if return_outputs else loss


def trainer_with_attributes(directory: str, *, record: Recorder, **options: Any) -> None:
    """A float, a deque and a tensor."""
    set_seed(0)
    trainer = WeightedTrainer(Regression(layers()), arguments(directory), train_dataset=rows())
    train(trainer, directory, record, **options)


class Windowed(TrainerCallback):
    """Keeps the norms of the last gradients and sets the rate from their median."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque(maxlen=5)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad.norm() for p in kwargs["model"].parameters()]
        self.norms.append(float(torch.stack(grads).norm()))
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = 0.02 * min(1.0, float(np.median(self.norms)))


def callback_with_a_deque(directory: str, *, record: Recorder, **options: Any) -> None:
    """The rate of each step depends on the last five."""
    set_seed(0)
    trainer = Trainer(
        Regression(layers()), arguments(directory), train_dataset=rows(), callbacks=[Windowed()]
    )
    train(trainer, directory, record, **options)


class MovingLoss:
    """Called for the loss; the running mean of it is subtracted as a baseline."""

    def __init__(self) -> None:
        self.mean, self.calls = 0.0, 0

    def __call__(self, outputs: Any, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs["logits"][:, 0], labels[:, 0])
        self.calls += 1
        self.mean += (loss.item() - self.mean) / self.calls
        return (loss - self.mean / 2).square()


def loss_object(directory: str, *, record: Recorder, **options: Any) -> None:
    """``compute_loss_func`` is an object with state."""
    set_seed(0)
    trainer = Trainer(
        Regression(layers()),
        arguments(directory),
        train_dataset=rows(),
        compute_loss_func=MovingLoss(),
    )
    train(trainer, directory, record, **options)


def make_moving_loss() -> Any:
    """A function with the same state in its closure."""
    mean, losses = 0.0, []

    def moving(outputs: Any, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        nonlocal mean
        loss = nn.functional.mse_loss(outputs["logits"][:, 0], labels[:, 0])
        losses.append(loss.item())
        mean += (loss.item() - mean) / len(losses)
        return (loss - mean / 2).square()

    return moving


def loss_closure(directory: str, *, record: Recorder, **options: Any) -> None:
    """``compute_loss_func`` is a function with variables of its own."""
    set_seed(0)
    trainer = Trainer(
        Regression(layers()),
        arguments(directory),
        train_dataset=rows(),
        compute_loss_func=make_moving_loss(),
    )
    train(trainer, directory, record, **options)


# ---------------------------------------------------------------- Lightning


class Memory:
    """A helper object: a running mean and the last losses."""

    def __init__(self) -> None:
        self.mean, self.losses = 1.0, deque(maxlen=3)

    def observe(self, loss: float) -> None:
        self.mean = 0.8 * self.mean + 0.2 * loss
        self.losses.append(loss)

    def factor(self) -> float:
        return 0.4 + self.mean / 2 + sum(self.losses) / 6


class LightningRecording(Callback):
    """Records the weights at the end of each batch."""

    def __init__(self, record: Recorder) -> None:
        self.record = record

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.record(outputs["loss"], pl_module)


class WithHelper(lightning.LightningModule):
    """The loss is scaled by ``self.memory``."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.memory = layers(), Memory()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.net, batch) * self.memory.factor()
        self.memory.observe(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class WithClosure(WithHelper):
    """The loss is scaled by a function in an attribute, which has variables of its own."""

    def __init__(self) -> None:
        super().__init__()
        count, seen = 0, []

        def weigh(loss: float) -> float:
            nonlocal count
            count += 1
            seen.append(loss)
            return 0.3 + count / 21 + sum(seen[-3:]) / 6

        self.weigh = weigh

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.net, batch)
        return loss * self.weigh(loss.item())


def fit(
    module: Any, directory: str, record: Recorder, *, loader: Any = None, **options: Any
) -> None:
    """Three epochs; of the loader that all programs have, if no other is given."""
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=f"{directory}-output",
        callbacks=[LightningRecording(record), LightningResume(directory, **options)],
    )
    trainer.fit(module, make().loader if loader is None else loader)


def module_with_a_helper(directory: str, *, record: Recorder, **options: Any) -> None:
    """A helper object of the user's in an attribute."""
    lightning.seed_everything(0, verbose=False)
    fit(WithHelper(), directory, record, **options)


def module_with_a_closure(directory: str, *, record: Recorder, **options: Any) -> None:
    """A function with a list and a number in its closure in an attribute."""
    lightning.seed_everything(0, verbose=False)
    fit(WithClosure(), directory, record, **options)
