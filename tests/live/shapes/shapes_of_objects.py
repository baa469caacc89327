"""Shapes whose state is in objects and classes of the script, and in the functions it defines."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import schedule_module
import torch
from tiny_training import EPOCHS, loss_of, make, run_as_script, step
from torch import nn

from resumekit.adapters.torch import Checkpointer

# ---------------------------------------------------------------- objects and classes


class Scale:
    """A helper object with attributes."""

    def __init__(self) -> None:
        self.value = 1.0
        self.history: list[float] = []

    def update(self, loss: float) -> None:
        self.value = 0.7 * self.value + 0.2 * loss
        self.history.append(loss)

    def factor(self) -> float:
        return self.value + sum(self.history[-2:]) / 10


class Follower(Scale):
    """One method changes it and gives the factor."""

    def follow(self, loss: float) -> float:
        self.update(loss)
        return self.factor()


class SlottedScale:
    """The same with slots."""

    __slots__ = ("history", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self.history: list[float] = []

    update = Scale.update
    factor = Scale.factor


class PartialState(Scale):
    """Its ``state_dict`` lacks an attribute, as that of a counter which somebody added later."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Resumable(PartialState):
    """It has what nothing can read, and its ``state_dict`` has that; loading makes new objects."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = iter([])
        self.load_state_dict({"value": 1.0, "used": 0})

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "used": self.used}

    def load_state_dict(self, state: dict[str, float]) -> None:
        super().load_state_dict(state)
        self.used = state["used"]
        self.inner = Scale()
        self.rates = itertools.islice(itertools.cycle([0.1, 0.7, 0.4]), self.used, None)

    def update(self, loss: float) -> None:
        super().update(loss)
        self.inner.update(next(self.rates))
        self.used += 1

    def factor(self) -> float:
        return (super().factor() + self.inner.factor()) / 2


class Losses(list):
    """A list with an attribute and a method."""

    peak = 0.0

    def update(self, loss: float) -> None:
        self.append(loss)
        self.peak = max(0.9 * self.peak, loss)

    def factor(self) -> float:
        return 0.3 + sum(self[-2:]) / 4 + self.peak / 4


@dataclass
class Nested:
    """Containers in containers; two names for one list."""

    by_name: dict[str, Any] = field(default_factory=lambda: {"losses": [], "pairs": [(1.0, [0.5])]})
    same: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.same = self.by_name["losses"]

    def update(self, loss: float) -> None:
        self.same.append(loss)
        self.by_name["pairs"].append((loss, [self.by_name["losses"][-1] / 2]))

    def factor(self) -> float:
        return 0.3 + sum(self.by_name["losses"][-2:]) / 4 + self.by_name["pairs"][-1][1][0] / 2


class Node:
    """Nodes of a ring, which refer to one another."""

    def __init__(self) -> None:
        self.value, self.next = 1.0, self

    def update(self, loss: float) -> None:
        added = Node()
        added.value = 0.7 * self.next.value + 0.2 * loss
        added.next, self.next = self.next, added

    def factor(self) -> float:
        return self.next.value + self.next.next.value / 4


class Guarded:
    """Its value is reached by a property; ``__getattr__`` refuses everything else."""

    def __init__(self) -> None:
        self.__value = 1.0

    @property
    def value(self) -> float:
        return self.__value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def update(self, loss: float) -> None:
        self.__value = 0.7 * self.__value + 0.3 * loss

    def factor(self) -> float:
        return self.value


class Counted:
    """Its value is an attribute of the class."""

    value = 1.0

    @classmethod
    def update(cls, loss: float) -> None:
        cls.value = 0.7 * cls.value + 0.3 * loss

    def factor(self) -> float:
        return self.value


class Criterion(nn.Module):
    """A loss module with a buffer, which nobody gives to the Checkpointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.ones(()))

    def update(self, loss: float) -> None:
        self.centre.mul_(0.7).add_(0.3 * loss)

    def factor(self) -> float:
        return self.centre.item()


class WarmUp:
    """Training deletes an attribute of it, of its class and of a module, and a buffer's tensor."""

    def __init__(self) -> None:
        type(self).late = 0.5
        self.early, self.module = 0.2, nn.Identity()
        self.module.rate = 0.3
        self.module.register_buffer("mask", torch.tensor(0.4), persistent=False)

    def update(self, loss: float) -> None:
        if "early" in vars(self):
            del self.early
        elif "rate" in vars(self.module):
            del self.module.rate
        elif self.module.mask is not None:
            self.module.mask = None
        elif "late" in vars(type(self)):
            del type(self).late

    def factor(self) -> float:
        factors = [getattr(owner, name, 1.0) for owner, name in self.owners()]
        return sum(factors) + (0.7 if self.module.mask is None else self.module.mask.item())

    def owners(self) -> list[tuple[Any, str]]:
        """The objects with the attributes that are deleted."""
        return [(self, "early"), (self.module, "rate"), (type(self), "late")]


class CallableScale(Scale):
    """It is called for the factor; the value is in an object of the object."""

    def __init__(self) -> None:
        self.inner = {"scale": [Scale()]}

    def update(self, loss: float) -> None:
        self.inner["scale"][0].update(loss)

    def factor(self) -> float:
        return self.inner["scale"][0].factor()


def with_object(make_object):
    """A shape in which an object of the script scales the loss and learns from it."""

    def train(directory, *, record, **options):
        model, optimizer, loader = make()
        helper = make_object()
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = helper.factor() * loss_of(model, batch)
            step(ckpt, optimizer, loss)
            helper.update(loss.item())
            record(loss, model)

    return train


helper_object = with_object(Scale)
object_with_a_partial_state = with_object(PartialState)
object_that_loads_new_objects = with_object(Resumable)
object_with_slots = with_object(SlottedScale)
list_with_attributes = with_object(Losses)
dataclass_with_aliases = with_object(Nested)
ring_of_objects = with_object(Node)
private_attribute = with_object(Guarded)
class_attribute = with_object(Counted)
loss_module_that_is_not_given = with_object(Criterion)
object_in_an_object = with_object(CallableScale)
attributes_that_are_deleted = with_object(WarmUp)


class Trainer:
    """A trainer of the script: the loop is in a method that changes the object."""

    def __init__(self, directory, record, options):
        self.model, self.optimizer, self.loader = make()
        self.ckpt = Checkpointer(directory, model=self.model, optimizer=self.optimizer, **options)
        self.record = record
        self.scale = 1.0

    def train(self):
        for _ in self.ckpt.epochs(EPOCHS):
            self.train_epoch()

    def train_epoch(self):
        for batch in self.ckpt.batches(self.loader):
            loss = self.scale * loss_of(self.model, batch)
            step(self.ckpt, self.optimizer, loss)
            self.scale = 0.7 * self.scale + 0.3 * loss.item()
            self.record(loss, self.model)


def method_that_changes_its_object(directory, *, record, **options):
    """A trainer class of the script; its scale is an attribute that the loop's method assigns."""
    Trainer(directory, record, options).train()


def namespace_of_arguments(directory, *, record, **options):
    """The arguments of the command line, of which the loop changes one and adds one."""
    model, optimizer, loader = make()
    args = argparse.Namespace(scale=1.0, batch_size=4)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = (args.scale + getattr(args, "best", 1.0)) * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        args.scale = 0.6 * args.scale + 0.2 * loss.item()
        args.best = min(getattr(args, "best", 1.0), loss.item())
        record(loss, model)


class Best:
    """The best loss; nothing else makes one than training."""

    def __init__(self, loss):
        self.loss = loss

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, state):
        self.loss = state["loss"]


def object_that_training_makes(directory, *, record, **options):
    """The variable is None at the start, and a checkpoint makes the object again."""
    model, optimizer, loader = make()
    best = None
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch) * (1.0 if best is None else 0.5 + best.loss % 1)
            step(ckpt, optimizer, loss)
            if best is None or loss < best.loss:
                best = Best(loss.item())
            record(loss, model)


def function_of_the_model(directory, *, record, **options):
    """A function that is an attribute of the model is replaced by training."""
    model, optimizer, loader = make()
    model.activation = torch.relu
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (1.0 if model.activation is torch.relu else 0.3)
        step(ckpt, optimizer, loss)
        model.activation = torch.tanh
        record(loss, model)


def names_of_one_list_that_part(directory, *, record, **options):
    """Two variables begin as one list; training binds one of them to another."""
    model, optimizer, loader = make()
    start = np.zeros(2), [1.0, 1.0], {"loss": 1.0}, bytearray(b"11")
    array, values, named, numbers = start
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        parts = [float(each) for each in (array[0], values[0], named["loss"], numbers[0])]
        first = [float(each) for each in (start[0][0], start[1][0], start[2]["loss"], start[3][0])]
        loss = loss_of(model, batch) * (0.5 + (sum(parts) + 2 * sum(first)) % 1)
        step(ckpt, optimizer, loss)
        now = loss.item()
        array, values, named = np.full(2, now), [now, now], {"loss": now}
        numbers = bytearray([int(10 * now) % 256, 1])
        record(loss, model)


def views_of_one_tensor(directory, *, record, **options):
    """A write into a view changes the tensor; both were there before the loop."""
    model, optimizer, loader = make()
    ring = torch.full((4,), 0.5)
    first, second = ring.chunk(2)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch) * (0.5 + ring.sum().item() % 1)
            step(ckpt, optimizer, loss)
            first.mul_(0.9).add_(loss.item() / 7)
            second.add_(first)
            record(loss, model)


def views_that_part(directory, *, record, **options):
    """Training binds one of two views to a tensor of its own, of the same values at first."""
    model, optimizer, loader = make()
    ring = torch.full((2,), 0.5)
    view = ring[1:]
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (0.5 + (ring.sum() + 3 * view.sum()).item() % 1)
        step(ckpt, optimizer, loss)
        ring.mul_(0.9).add_(0.1)
        if ckpt.progress.step % 3 == 0:
            view = ring[1:].clone()
        view.add_(0.2) if ckpt.progress.step % 3 == 1 else None
        record(loss, model)


def views_that_training_makes(directory, *, record, **options):
    """Training makes a tensor with its parts, and a view of a tensor of the script."""
    model, optimizer, loader = make()
    ring = torch.full((3,), 0.5)
    state = first = last = None
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (0.5 + ring.sum().item() % 1)
        step(ckpt, optimizer, loss)
        if state is None:
            state, last = torch.zeros(2, 2), ring[1:]
            first = [*state.chunk(2)]
        first[1].add_(loss.item())
        if ckpt.progress.step > 8:
            last.mul_(0.9).add_(state.sum().item() / 50)
        record(loss, model)


def arrays_that_share_memory(directory, *, record, **options):
    """A view of an array, and a tensor in the memory of both; training makes all."""
    model, optimizer, loader = make()
    ring = view = tensor = None
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (1 if ring is None else 0.5 + ring.sum() % 1)
        step(ckpt, optimizer, loss)
        if ring is None:
            ring = np.zeros(4)
            view, tensor = ring[::-2], torch.from_numpy(ring)
        view += loss.item() / 7
        tensor.mul_(0.9)
        record(loss, model)


def gradient_without_an_optimizer(directory, *, record, **options):
    """A multiplier sums up its gradient over three steps and is changed by hand."""
    model, optimizer, loader = make()
    weight = torch.ones(1, requires_grad=True)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (0.5 + weight.item() % 1)
        step(ckpt, optimizer, loss)
        (weight * loss.item()).sum().backward()
        if ckpt.progress.step % 3 == 0:
            with torch.no_grad():
                weight += 0.5 * weight.grad
            weight.grad = None
        record(loss, model)


def one_list_with_two_names(directory, *, record, **options):
    """A list has a second name in another function's frame; both must stay one list."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    losses: list[float] = []
    box = {"losses": losses}

    def run(seen):
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = (0.4 + sum(box["losses"][-2:])) * loss_of(model, batch)
            step(ckpt, optimizer, loss)
            seen.append(loss.item() / 3)
            record(loss, model)

    run(losses)
    assert losses is box["losses"]
    assert len(losses) == 21


# ---------------------------------------------------------------- functions


def closure_with_nonlocal(directory, *, record, **options):
    """A function in the function assigns a variable of the outer one."""
    model, optimizer, loader = make()
    scale = 1.0

    def update(loss):
        nonlocal scale
        scale = 0.7 * scale + 0.3 * loss

    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = scale * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        update(loss.item())
        record(loss, model)


def make_scaler():
    scale, losses = 1.0, []

    def update(loss):
        nonlocal scale
        losses.append(loss)
        scale = 0.7 * scale + 0.1 * sum(losses[-2:])
        return scale

    return update


def closure_of_a_function_that_is_over(directory, *, record, **options):
    """The variables of a closure whose maker has returned."""
    model, optimizer, loader = make()
    update = make_scaler()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        loss = update(loss.item()) * loss
        step(ckpt, optimizer, loss)
        record(loss, model)


def running(update):
    """A shape in which ``update(loss)`` gives the factor of the loss, from state of its own."""

    def train(directory, *, record, **options):
        model, optimizer, loader = make()
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch)
            loss = update(loss.item()) * loss
            step(ckpt, optimizer, loss)
            record(loss, model)

    return train


def add(losses, loss):
    losses.append(loss)
    return 0.4 + sum(losses[-3:]) / 3


def with_default(loss, losses=[]):  # noqa: B006 - it is the state
    return add(losses, loss)


def with_attribute(loss):
    with_attribute.scale = 0.7 * with_attribute.scale + 0.3 * loss
    return with_attribute.scale


with_attribute.scale = 1.0

global_scale = 1.0


def with_global(loss):
    global global_scale
    global_scale = 0.7 * global_scale + 0.3 * loss
    return global_scale


def with_global_of_a_module(loss):
    schedule_module.update(loss)
    return schedule_module.factor


def with_environment(loss):
    scale = 0.7 * float(os.environ.get("SHAPE_SCALE", "1.0")) + 0.3 * loss
    os.environ["SHAPE_SCALE"] = str(scale)
    return scale


@functools.lru_cache
def noise(index):
    return torch.rand(()).item()


def with_cache(loss):
    return 0.4 + noise(int(10 * loss) % 3)


counts = itertools.count()


def with_count(loss):
    return 0.4 + next(counts) / 21


def counted(function):
    """A decorator that keeps the sum of what it was called with."""
    total = 0.0

    @functools.wraps(function)
    def wrapper(loss):
        nonlocal total
        total = 0.8 * total + loss
        return function(total)

    return wrapper


@counted
def with_decorator(total):
    return 0.3 + total / 4


lambda_over_a_list = running((lambda losses: lambda loss: add(losses, loss))([]))
mutable_default_argument = running(with_default)
function_attribute = running(with_attribute)
global_that_another_function_changes = running(with_global)
global_of_another_module = running(with_global_of_a_module)
partial_with_a_list = running(functools.partial(add, []))
bound_method = running(Follower().follow)
cell_of_a_decorator = running(with_decorator)
environment_variable = running(with_environment)
cache_of_a_random_number = running(with_cache)
count_of_itertools = running(with_count)


def list_in_a_closure(directory, *, record, **options):
    """A list that only a function in the function changes and reads."""
    model, optimizer, loader = make()
    losses: list[float] = []

    def weigh(loss):
        return add(losses, loss.item()) * loss

    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = weigh(loss_of(model, batch))
        step(ckpt, optimizer, loss)
        record(loss, model)


def hook_of_a_tensor(directory, *, record, **options):
    """A hook of a parameter counts its calls and scales the gradient by the count."""
    model, optimizer, loader = make()
    calls = [0]

    def scale(gradient):
        calls[0] += 1
        return gradient * (0.5 + calls[0] / 21)

    next(model.parameters()).register_hook(scale)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


def hook_of_a_module(directory, *, record, **options):
    """A forward hook of the model is a method of an object that counts."""
    model, optimizer, loader = make()
    scale = Scale()

    def weigh(module, inputs, output):
        scale.update(output.mean().item())
        return output * scale.factor()

    model.register_forward_hook(weigh)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


def hook_of_an_optimizer(directory, *, record, **options):
    """A step hook of the optimizer has a list in its closure."""
    model, optimizer, loader = make()
    calls: list[int] = []

    def anneal(*_):
        calls.append(len(calls))
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + calls[-1] / 3)

    optimizer.register_step_post_hook(anneal)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


if __name__ == "__main__":
    run_as_script(globals())
