"""Shapes whose state no attribute shows: of objects with state in C, and wrapped modules."""

from __future__ import annotations

import codecs
import io
import multiprocessing
import queue
import re
import threading
from itertools import count

import datasets
import numpy as np
import pandas
import torch
from shapes_of_values import changed
from sklearn.linear_model import SGDRegressor
from tiny_training import EPOCHS, loss_of, make, step
from torch import nn
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


class Frame:
    """Sums of losses in a table."""

    def __init__(self):
        self.table = pandas.DataFrame(1.0, index=["loss"], columns=["total", "count"])

    def add(self, loss):
        """Adds one loss."""
        self.table.loc["loss", "total"] += loss
        self.table.loc["loss", "count"] += 1


def add_to_series(value, loss):
    value[0] = 0.7 * value[0] + loss


def add_to_record(value, loss):
    value.last += 0.3 * (loss - value.last)


def add_to_masked(value, loss):
    value[:] = np.ma.masked_greater(value * 0.8 + loss, 2.5)


def fit(value, loss):
    value.partial_fit([[loss, 1.0]], [loss])


data_frame = changed(
    Frame,
    lambda v, loss: v.add(loss),
    lambda v: v.table.loc["loss", "total"] / v.table.loc["loss", "count"],
)


class Table:
    """A table that grows: by rows of texts and numbers, and by columns."""

    def __init__(self):
        self.rows = pandas.DataFrame({"phase": ["start"], "loss": [0.5]}, index=["first"])
        self.losses = pandas.Series([0.5])

    def add(self, loss):
        """Adds one loss everywhere."""
        name = f"{loss:.3f}"
        self.rows.loc[name] = ["low" if loss < 1 else name, loss]
        self.losses = pandas.concat([self.losses, pandas.Series([loss])], ignore_index=True)

    def add_column(self, loss):
        """Adds one loss as a column."""
        self.rows[f"{loss:.3f}"] = loss

    def factor(self):
        """What depends on each part of the table."""
        texts = "".join([*self.rows.index, *self.rows["phase"], *self.rows.columns])
        return 0.3 + (self.losses.sum() + self.rows.iloc[:, 1:].sum().sum() + len(texts) / 7) % 1


table_with_more_rows = changed(Table, lambda v, loss: v.add(loss), lambda v: v.factor())
table_with_more_columns = changed(Table, lambda v, loss: v.add_column(loss), lambda v: v.factor())
series = changed(lambda: pandas.Series([0.5]), add_to_series, lambda v: 0.3 + v[0] % 1)


def add_to_shared(value, loss):
    with value.get_lock():
        value.value += loss


def add_to_numbers(value, loss):
    value[1] = 0.5 * value[1] + loss


shared_number = changed(
    lambda: multiprocessing.Value("d", 0.5), add_to_shared, lambda v: 0.3 + v.value % 1
)
shared_numbers = changed(
    lambda: multiprocessing.Array("d", 2), add_to_numbers, lambda v: 0.3 + v[1] % 1
)
numbers_of_c = changed(
    lambda: multiprocessing.RawArray("d", 2), add_to_numbers, lambda v: 0.3 + v[1] % 1
)


class Reader(threading.Thread):
    """Reads factors ahead of the training, in a thread of its own."""

    def __init__(self):
        super().__init__(daemon=True)
        self.factors = queue.Queue(maxsize=2)
        self.start()

    def run(self):
        """Until the program ends."""
        for number in count(1):
            self.factors.put(0.3 + 1 / number)


def fill(factors):
    """What another thread does."""
    for number in count(1):
        factors.put(0.3 + 1 / number)


def factors_of_a_thread():
    """A queue that a thread fills."""
    factors = queue.Queue(maxsize=2)
    threading.Thread(target=fill, args=(factors,), daemon=True).start()
    return factors


def nothing(value, loss):
    """The other thread does it."""


queue_of_a_thread = changed(factors_of_a_thread, nothing, lambda v: v.get())
thread_that_reads_ahead = changed(Reader, nothing, lambda v: v.factors.get())
text_in_memory = changed(
    io.StringIO, lambda v, loss: v.write(str(loss)[:3]), lambda v: 0.3 + len(v.getvalue()) % 7 / 7
)
bytes_in_memory = changed(
    io.BytesIO,
    lambda v, loss: v.write(b"%d" % (9 * loss)),
    lambda v: 0.3 + sum(v.getvalue()) % 9 / 9,
)
record_array = changed(
    lambda: np.rec.array([(0.5,)], dtype=[("last", "f8")]), add_to_record, lambda v: 0.3 + v.last[0]
)
masked_array = changed(
    lambda: np.ma.array([0.5, 1.0]), add_to_masked, lambda v: 0.3 + float(v.filled(0.1).mean()) % 1
)
tensor_of_a_class = changed(
    lambda: torch.full((2,), 0.5).as_subclass(Marked),
    lambda v, loss: v.mul_(0.7).add_(loss),
    lambda v: 0.3 + v[0].item() % 1,
)
pattern_of_digits = changed(
    lambda: {"digits": re.compile("[0-4]")},
    lambda v, loss: v.update(digits=re.compile(f"[{loss:.4f}]")),
    lambda v: 0.3 + len(v["digits"].findall("0123456789")) / 10,
)
fitted_estimator = changed(
    lambda: SGDRegressor(random_state=0), fit, lambda v: 0.5 + getattr(v, "t_", 1.0) % 5 / 5
)


def factors(seed):
    """A dataset of Hugging Face."""
    values = np.random.default_rng(seed).uniform(0.3, 1.3, 9).tolist()
    return datasets.Dataset.from_dict({"factor": values})


def dataset_shuffled_again(directory, *, record, **options):
    """Each epoch trains with the dataset of the epoch before, shuffled."""
    model, optimizer, loader = make()
    data = factors(0)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        data = data.shuffle(seed=epoch)
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch) * data[0]["factor"]
            step(ckpt, optimizer, loss)
            record(loss, model)


def average_in_a_wrapper(directory, *, record, **options):
    """The variable of an average has to be the wrapper again, which has the module in it."""
    model, optimizer, loader = make()
    average = nn.DataParallel(make().model)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        train_in_wrapper(ckpt, model, average, optimizer, loader, record)


def train_in_wrapper(ckpt, model, average, optimizer, loader, record):
    """One epoch; the average is an argument, which the function may still write."""
    for batch in ckpt.batches(loader):
        loss = loss_of(model, batch) * (0.5 + average.module[0].bias[0].item() % 1)
        step(ckpt, optimizer, loss)
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(new.data, alpha=0.1)
        record(loss, model)


def former_weights(directory, *, record, **options):
    """A variable is the memory of a parameter at the start, and a copy of its own from then on."""
    model, optimizer, loader = make()
    former = model[0].bias.data
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (0.5 + former.abs().sum().item() % 1)
        former = model[0].bias.detach().clone()
        step(ckpt, optimizer, loss)
        record(loss, model)


def generator_around_the_loop(directory, *, record, **options):
    """The batches are pieces of a text; the decoder of a library keeps half a letter of each."""
    model, optimizer, loader = make()
    inputs = next(iter(loader))
    text = "".join(map(chr, range(0x3B1, 0x3B1 + 21))).encode()  # each letter has two bytes
    pieces = DataLoader([text[i : i + 3] for i in range(0, len(text), 3)], batch_size=None)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for letters in codecs.iterdecode(ckpt.batches(pieces, epochs=EPOCHS), "utf-8"):
        loss = ord(letters[0]) / 1000 * loss_of(model, inputs)
        step(ckpt, optimizer, loss)
        record(loss, model)
