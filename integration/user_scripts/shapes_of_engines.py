"""Forms of keeping state in a loop that Accelerate or DeepSpeed trains, nothing of them passed.

Each form makes two functions: one gives the weight of the next loss, the other one takes a loss and
changes what the weight follows from.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from tiny_training import BATCH_SIZE, BATCHES, EPOCHS, loss_of, run_as_script
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Form = Callable[[], tuple[Callable[[], float], Callable[[float], None]]]
last = 1.0


def in_a_closure() -> Any:
    """A variable of an enclosing function."""
    value = 1.0

    def change(loss: float) -> None:
        nonlocal value
        value = 0.8 * value + 0.3 * loss

    return lambda: value, change


def in_a_global() -> Any:
    """A variable of the module."""

    def change(loss: float) -> None:
        global last
        last = 0.8 * last + 0.3 * loss

    return lambda: last, change


class Average:
    """Keeps the average as an attribute of its class."""

    value = 1.0

    @classmethod
    def change(cls, loss: float) -> None:
        """Adds a loss."""
        cls.value = 0.8 * cls.value + 0.3 * loss


def in_a_class() -> Any:
    """An attribute of a class."""
    return lambda: Average.value, Average.change


def in_a_default() -> Any:
    """The default of an argument."""

    def change(loss: float | None, losses: list[float] = [1.0]) -> float:  # noqa: B006  the form
        losses += [] if loss is None else [loss]
        return sum(losses) / len(losses)

    return lambda: change(None), change


def in_a_partial() -> Any:
    """The argument of a partial function."""
    losses = deque([1.0], maxlen=4)
    return lambda: sum(losses) / len(losses), partial(deque.append, losses)


def in_an_array() -> Any:
    """An array that is rolled in place."""
    losses = np.ones(3)

    def change(loss: float) -> None:
        losses[:] = np.roll(losses, 1)
        losses[0] = loss

    return lambda: float(losses.mean()), change


def in_a_tensor() -> Any:
    """A tensor that is changed in place."""
    hidden = torch.ones(2)
    return lambda: float(hidden.mean()), lambda loss: hidden.mul_(0.8).add_(0.3 * loss)


def in_a_generator() -> Any:
    """A random generator of its own."""
    rng = np.random.default_rng(3)
    drawn = [1.0]
    return lambda: drawn[-1], lambda loss: drawn.append(0.5 + float(rng.random()))


class Meter:
    """An object that counts in a dict."""

    def __init__(self) -> None:
        self.seen = {"loss": 1.0, "number": 1}

    def weight(self) -> float:
        """The mean."""
        return self.seen["loss"] / self.seen["number"]

    def change(self, loss: float) -> None:
        """Adds a loss."""
        self.seen["loss"] += loss
        self.seen["number"] += 1


def in_an_object() -> Any:
    """A helper object, by its bound methods."""
    meter = Meter()
    return meter.weight, meter.change


def in_a_module() -> Any:
    """A buffer of a module that nothing trains."""
    norm = nn.BatchNorm1d(1, affine=False)
    mean: Any = norm.running_mean

    def change(loss: float) -> None:
        norm(torch.tensor([[loss], [2 * loss]]))

    return lambda: 0.5 + float(mean), change


FORMS: dict[str, Form] = {name: form for name, form in globals().items() if name.startswith("in_a")}


def dataset() -> TensorDataset:
    """The data of all ranks."""
    torch.manual_seed(0)
    num_ranks = int(os.environ["WORLD_SIZE"])
    return TensorDataset(*torch.randn(2, num_ranks * BATCHES * BATCH_SIZE, 4))


def network() -> nn.Module:
    """With dropout: each rank draws another mask."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def under_accelerate(form: Form, directory: str, *, record: Any, **options: Any) -> None:
    """The loop of Accelerate's examples."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(dataset(), batch_size=BATCH_SIZE, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(accelerator.process_index)
    checkpointer = Checkpointer(accelerator, directory, **options)
    weight, change = form()
    for batch in checkpointer.batches(loader, epochs=EPOCHS):
        loss = weight() * loss_of(model, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        change(loss.item())
        record(loss, model)


def under_deepspeed(form: Form, directory: str, *, record: Any, **options: Any) -> None:
    """The loop of DeepSpeed's tutorial, at stage 1."""
    import deepspeed

    from resumekit.adapters.deepspeed import Checkpointer

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    data, model = dataset(), network()
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]
    torch.manual_seed(int(os.environ["RANK"]))
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    checkpointer = Checkpointer(engine, directory, **options)
    weight, change = form()
    for batch in checkpointer.batches(loader, epochs=EPOCHS):
        loss = weight() * loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        change(loss.item())
        record(loss, engine.module)


def shapes() -> Iterable[tuple[str, Callable[..., None]]]:
    """Each form under each engine, by name."""
    for name, form in FORMS.items():
        yield f"accelerate_{name}", partial(under_accelerate, form)
        yield f"deepspeed_{name}", partial(under_deepspeed, form)


if __name__ == "__main__":
    run_as_script(dict(shapes()))
