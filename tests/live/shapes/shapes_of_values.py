"""Shapes whose state is one value in a variable of the function, by its type."""

from __future__ import annotations

import array
import cmath
import collections
import datetime
import decimal
import enum
import fractions
import functools
import heapq
import math
import os
import random
import runpy
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_training import EPOCHS, loss_of, make, run_as_script, step
from torch import nn

from resumekit.adapters.torch import Checkpointer

SCRIPT = str(Path(__file__).with_name("module_level.py"))


def float_assigned_in_each_step(directory, *, record, **options):
    """A float that each step assigns scales the next loss."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale = 1.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = scale * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        scale = 0.8 * scale + 0.3 * loss.item()
        record(loss, model)


def float_at_module_level(directory, *, record, **options):
    """The same where the loop is at the top level of a script."""
    given = {"directory": directory, "record": record, "options": options}
    runpy.run_path(SCRIPT, given, "__main__")


def assigned(start, change, weight):
    """A shape whose loss is scaled by a value that each step replaces.

    Args:
        start: makes the value.
        change: the next value, of the value and the loss.
        weight: a number between about 0.2 and 2, of the value.
    """

    def train(directory, *, record, **options):
        model, optimizer, loader = make()
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        value = start()
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = weight(value) * loss_of(model, batch)
            step(ckpt, optimizer, loss)
            value = change(value, loss.item())
            record(loss, model)

    return train


def changed(start, change, weight):
    """A shape whose loss is scaled by an object that each step changes in place."""

    def train(directory, *, record, **options):
        model, optimizer, loader = make()
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        value = start()
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = weight(value) * loss_of(model, batch)
            step(ckpt, optimizer, loss)
            change(value, loss.item())
            record(loss, model)

    return train


class Phase(enum.Enum):
    WARM_UP = 0.5
    TRAINING = 1.0
    COOL_DOWN = 0.3


class Meter(NamedTuple):
    total: float
    num_losses: int


def next_phase(phase: Phase, loss: float) -> Phase:
    return Phase.TRAINING if phase is Phase.WARM_UP and loss < 0.5 else Phase.COOL_DOWN


def roll(values: np.ndarray[Any, Any], loss: float) -> None:
    values[:] = np.roll(values, 1)
    values[0] = loss


def no_change(value: Any, loss: float) -> None:
    """The value changes where it is used."""


# Replaced in each step.
integer_of_more_than_64_bits = assigned(
    lambda: 3**50, lambda v, loss: v * 3 + int(100 * loss), lambda v: 0.2 + v % 1009 / 1009
)
complex_number = assigned(
    lambda: 1 + 0j, lambda v, loss: v * (0.8 + 0.4j) + 0.1 * loss, lambda v: 0.3 + abs(v.imag)
)
string = assigned(lambda: "a", lambda v, loss: v + str(loss)[-2:], lambda v: 0.5 + hash_of(v))
byte_string = assigned(
    lambda: b"a", lambda v, loss: v + b"%d" % (99 * loss), lambda v: 0.5 + hash_of(v)
)
truth_value = assigned(lambda: True, lambda v, loss: v != (loss > 0.7), lambda v: 1.0 if v else 0.4)
enum_member = assigned(lambda: Phase.WARM_UP, next_phase, lambda v: v.value)
named_tuple = assigned(
    lambda: Meter(1.0, 1),
    lambda v, loss: Meter(v.total + loss, v.num_losses + 1),
    lambda v: v.total / v.num_losses,
)
nested_tuple = assigned(
    lambda: (1.0, (0, [])),
    lambda v, loss: (0.9 * v[0] + 0.1 * loss, (v[1][0] + 1, [*v[1][1][-3:], loss])),
    lambda v: v[0] + 0.02 * v[1][0] + sum(v[1][1]) / 10,
)
frozen_set = assigned(
    frozenset, lambda v, loss: v ^ {int(40 * loss) % 5}, lambda v: 0.4 + 0.2 * len(v)
)
numpy_scalar = assigned(
    lambda: np.float64(1.0), lambda v, loss: v * np.float64(0.9) + loss / 10, lambda v: float(v)
)
tensor = assigned(
    lambda: torch.ones(3), lambda v, loss: 0.8 * v.roll(1) + 0.2 * loss, lambda v: v[0].item()
)
time_delta = assigned(
    datetime.timedelta,
    lambda v, loss: v + datetime.timedelta(seconds=loss),
    lambda v: 0.3 + v.total_seconds() % 1,
)
fraction = assigned(
    lambda: fractions.Fraction(1),
    lambda v, loss: v * fractions.Fraction(4, 5) + fractions.Fraction(int(100 * loss), 500),
    float,
)
decimal_number = assigned(
    lambda: decimal.Decimal(1),
    lambda v, loss: v * decimal.Decimal("0.8") + decimal.Decimal(int(100 * loss)) / 500,
    float,
)
function = assigned(
    lambda: nn.functional.mse_loss,
    lambda v, loss: nn.functional.l1_loss,
    lambda v: 1.0 if v is nn.functional.mse_loss else 0.3,
)
builtin_function = assigned(
    lambda: torch.relu, lambda v, loss: torch.tanh, lambda v: 1.0 if v is torch.relu else 0.3
)
module_of_the_stdlib = assigned(
    lambda: math, lambda v, loss: cmath, lambda v: 1.0 if v is math else 0.3
)
exception = assigned(
    lambda: None,
    lambda v, loss: ValueError(loss if v is None else v.args[0] / 2 + loss),
    lambda v: 0.4 if v is None else 0.4 + v.args[0],
)
partial_with_more_arguments = assigned(
    lambda: functools.partial(mean, 1.0),
    lambda v, loss: functools.partial(mean, *v.args[-2:], loss, base=0.3),
    lambda v: v(0.5),
)
path = assigned(
    lambda: Path("a"), lambda v, loss: v / f"{int(9 * loss)}", lambda v: 0.5 + hash_of(str(v))
)
comprehension_over_itself = assigned(
    lambda: [1.0], lambda v, loss: [0.8 * each for each in v[-4:]] + [loss], lambda v: sum(v) / 3
)


def mean(*values: float, base: float = 0.0) -> float:
    return base + sum(values) / len(values)


def hash_of(text: str | bytes) -> float:
    """A number below 1 that is the same in every process."""
    return sum(text.encode() if isinstance(text, str) else text) % 101 / 101


# Changed in place.
list_appended = changed(list, lambda v, loss: v.append(loss), lambda v: 0.5 + sum(v[-3:]) / 3)
functions_in_another_order = changed(
    lambda: [torch.relu, torch.tanh, nn.functional.mse_loss, mean],
    lambda v, loss: v.insert(0, v.pop(2 if loss > 0.7 else 3)),
    lambda v: 0.3 + v.index(torch.tanh) + v.index(mean) / 3,
)
function_in_a_dictionary = changed(
    lambda: {"loss": nn.functional.mse_loss},
    lambda v, loss: v.update(loss=nn.functional.l1_loss),
    lambda v: 1.0 if v["loss"] is nn.functional.mse_loss else 0.3,
)
list_as_a_heap = changed(list, heapq.heappush, lambda v: 0.5 + sum(v[:2]) / 2)
deque_appended = changed(
    lambda: collections.deque(maxlen=3), lambda v, loss: v.append(loss), lambda v: 0.5 + sum(v) / 3
)
dictionary = changed(
    dict,
    lambda v, loss: v.update({len(v) % 5: loss, "n": len(v)}),
    lambda v: 0.4 + sum(v.values()) / 9,
)
set_of_integers = changed(
    set,
    lambda v, loss: v.symmetric_difference_update({int(40 * loss) % 5}),
    lambda v: 0.4 + len(v) / 5,
)
set_of_tuples = changed(
    lambda: {(0, ("a", 1.5))},
    lambda v, loss: v.symmetric_difference_update({(int(40 * loss) % 5, ("a", None))}),
    lambda v: 0.4 + sum(number for number, _ in v) / 5,
)
default_dictionary = changed(
    lambda: collections.defaultdict(list),
    lambda v, loss: v[len(v) % 3].append(loss),
    lambda v: 0.5 + sum(map(sum, v.values())) / 10,
)
counter = changed(
    collections.Counter,
    lambda v, loss: v.update([int(40 * loss) % 5]),
    lambda v: 0.4 + v.most_common(1)[0][1] / 9 if v else 0.4,
)
byte_array = changed(
    lambda: bytearray(b"a"),
    lambda v, loss: v.append(int(99 * loss) % 256),
    lambda v: 0.5 + hash_of(v),
)
array_of_the_stdlib = changed(
    lambda: array.array("d", [1.0]), lambda v, loss: v.append(loss), lambda v: sum(v[-3:]) / 3 + 0.3
)
numpy_array_rolled_in_place = changed(lambda: np.ones(4), roll, lambda v: float(v[:3].mean()))
tensor_changed_in_place = changed(
    lambda: torch.ones(3), lambda v, loss: v.mul_(0.8).add_(0.2 * loss), lambda v: v[1].item()
)
python_generator = changed(lambda: random.Random(5), no_change, lambda v: 0.5 + v.random())
numpy_generator = changed(lambda: np.random.default_rng(5), no_change, lambda v: 0.5 + v.random())
numpy_random_state = changed(
    lambda: np.random.RandomState(5), no_change, lambda v: 0.5 + v.random_sample()
)
torch_generator = changed(
    lambda: torch.Generator().manual_seed(5),
    no_change,
    lambda v: 0.5 + torch.rand((), generator=v).item(),
)


def value_that_changes_once(directory, *, record, **options):
    """A factor is set in the fifth step and never again: later saves find it as it was restored."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    factor, num_steps = 1.0, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        num_steps += 1
        if num_steps == 5:
            factor = loss.item()
        record(loss, model)


def object_that_is_replaced_once(directory, *, record, **options):
    """A list is replaced by another one in the fifth step; the old one has a second name."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    losses = first_losses = []
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        factor = 0.3 + sum(losses[-2:]) / 2 + len(first_losses) / 10
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        losses.append(loss.item())
        if len(losses) == 5 and losses is first_losses:
            losses = []
        record(loss, model)


def value_that_returns_to_its_start(directory, *, record, **options):
    """A factor is changed in the eighth step and has its first value again from the eleventh on."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    factor, num_steps = 1.0, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        num_steps += 1
        factor = 0.3 if 8 <= num_steps <= 10 else 1.0
        record(loss, model)


def list_of_the_first_rank(directory, *, record, **options):
    """Only rank 0 keeps a list; on the other ranks the variable is a number."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    kept: Any = [] if os.environ.get("RANK", "0") == "0" else 0.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        factor = 0.4 + (sum(kept[-3:]) / 3 if isinstance(kept, list) else kept)
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        if isinstance(kept, list):
            kept.append(loss.item())
        else:
            kept = 0.7 * kept + 0.3 * loss.item()
        record(loss, model)


def list_appended_in_the_loop(directory, *, record, **options):
    """The loop itself appends to a list, whose last values scale the loss."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    losses = []
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = (0.5 + sum(losses[-3:]) / 3) * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        losses.append(loss.item())
        record(loss, model)


def hidden_state_detached(directory, *, record, **options):
    """The hidden state of a recurrent cell is carried from batch to batch."""
    model, optimizer, loader = make()
    cell = nn.RNNCell(4, 4)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    hidden = torch.zeros(4, 4)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        hidden = cell(inputs, hidden).detach()
        loss = loss_of(model, (inputs + hidden, targets))
        step(ckpt, optimizer, loss)
        record(loss, model)


def hidden_state_with_its_graph(directory, *, record, **options):
    """The hidden state still has its graph at the safe point; the next step detaches it."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    hidden = torch.zeros(4, 1)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        hidden = model(inputs + hidden.detach())
        loss = nn.functional.mse_loss(hidden, targets[:, :1])
        step(ckpt, optimizer, loss)
        record(loss, model)


def none_until_it_is_an_object(directory, *, record, **options):
    """A variable is None until the fifth step makes an object of the script."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    average, num_steps = None, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        factor = 1.0 if average is None else average.total
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        num_steps += 1
        if average is not None:
            average.total = 0.8 * average.total + 0.3 * loss.item()
        elif num_steps == 5:
            average = Average(loss.item())
        record(loss, model)


class Average:
    def __init__(self, total: float) -> None:
        self.total = total


def variable_that_is_deleted(directory, *, record, **options):
    """A variable is deleted in the second step; later steps look whether it is there."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    warm_up = 0.2
    losses = []
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        try:
            factor = warm_up
        except UnboundLocalError:
            factor = 1.0
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        losses.append(loss.item())
        if len(losses) == 2:
            del warm_up
        record(loss, model)


def temporaries_that_are_deleted(directory, *, record, **options):
    """The temporaries of a step are deleted at its end, so they are unbound at the safe point."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale = 1.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = scale * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)
        scale = 0.8 * scale + 0.3 * loss.item()
        del loss, batch


def names_swapped_in_each_step(directory, *, record, **options):
    """Two lists swap their names in each step."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    one, other = [1.0], [0.3]
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = one[-1] * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        one.append(0.7 * one[-1] + 0.2 * loss.item())
        one, other = other, one
        record(loss, model)


def readings_of_clocks(directory, *, record, **options):
    """Readings of clocks are carried next to a value that decides."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale, started, before = 1.0, datetime.datetime.now(), time.perf_counter()
    slowest = 0.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = scale * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        scale = 0.8 * scale + 0.3 * loss.item()
        now = time.perf_counter()
        slowest, before = max(slowest, now - before), now
        if slowest > 100 or datetime.datetime.now() - started > datetime.timedelta(hours=1):
            raise RuntimeError("a difference of clocks of two processes")
        record(loss, model)


if __name__ == "__main__":
    run_as_script(globals())


def setting_of_the_process(directory, *, record, **options):
    """Training changes the precision of decimal numbers, which scales the loss."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = float(decimal.Decimal(1) / 3) * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        decimal.getcontext().prec = max(decimal.getcontext().prec - 4, 1)
        record(loss, model)
