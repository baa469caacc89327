"""Shapes for the judge itself: what becomes of each does not depend on what the library finds."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch
from tiny_training import EPOCHS, loss_of, make, step
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import InexactError


def train(directory, *, record, reports_at=None, names="gauge", resumed_by="", **options):
    """Keeps a factor in a pipe, which no library can see; reports by itself, or not at all.

    Args:
        reports_at: the step before which it reports; None for never.
        names: what its report names.
        resumed_by: what a launch that is not the first does: an error of the library or of Python.
    """
    model, optimizer, loader = make()
    is_resumed = Path(directory).exists()
    if resumed_by and is_resumed:
        raise InexactError("a", found="b") if resumed_by == "library" else RuntimeError("lost")
    reader, writer = os.pipe()
    os.write(writer, b"%10.6f" % 1.0)
    strict = options.pop("strict", False)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for number, batch in enumerate(batches, start=batches.initial + 1):
        if number == reports_at:
            if strict:
                raise InexactError(names, found="lost")
            logging.getLogger("resumekit").warning("%s: lost", names)
        factor = float(os.read(reader, 10))
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        os.write(writer, b"%10.6f" % (0.7 * factor + 0.3 * loss.item()))
        record(loss, model)


state_that_no_library_sees = train
state_reported_in_time = functools.partial(train, reports_at=4)
state_reported_too_late = functools.partial(train, reports_at=5)
another_state_reported = functools.partial(train, reports_at=1, names="gauges")
resume_refused = functools.partial(train, resumed_by="library")
resume_that_fails = functools.partial(train, resumed_by="python")


def one_wrong_bit_in_a_repeated_step(directory, *, record, **options):
    """A resumed launch changes the last bit of one weight, for its first record only."""
    model, optimizer, loader = make()
    first = next(model.parameters())
    is_resumed = Path(directory).exists()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        right = first.detach().clone()
        if is_resumed and '"step"' not in Path(record.path).read_text(encoding="utf-8"):
            first.data.view(torch.int32)[0, 0] ^= 1
        try:
            record(loss, model)
        finally:
            first.data.copy_(right)


def training_that_ends_early(directory, *, record, **options):
    """A resumed launch leaves the loop two steps before the end."""
    model, optimizer, loader = make()
    is_resumed = Path(directory).exists()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)
        if is_resumed and ckpt.progress.step == 19:
            break


def save_that_changes_the_training(directory, *, record, **options):
    """Each save after the first step draws a number, as a faulty library would."""
    model, optimizer, loader = make()
    weight = nn.Parameter(torch.ones(()))

    class Drawing(list):
        def state_dict(self):
            torch.rand(())
            return {}

        def load_state_dict(self, state):
            pass

    extras = {"drawing": Drawing()}
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, extras=extras, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = weight * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)
