"""The private random generators that a loader and its samplers carry, found by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# The attributes by which loaders and samplers of torch and DeepSpeed hold one another.
_NESTED = ("batch_sampler", "sampler", "data_sampler")

# What the names of generators begin with from which samples draw, and not their order.
DATASET_PREFIXES = ("dataset.", "collate_fn.")


def without_prefetch(state: dict[str, Any]) -> dict[str, Any]:
    """A place inside an epoch, without how far prefetching has drawn the epoch's order."""
    if not state["batch"]:
        return state
    states = state["generators"]
    of_samples = [name for name in states if name.startswith(DATASET_PREFIXES)]
    return {**state, "generators": {name: states[name] for name in of_samples}}


def samplers_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Every sampler that a loader draws from, outermost first, as ``(dotted name, object)``."""
    seen: set[int] = set()
    waiting = [("", loader)]
    while waiting:
        prefix, holder = waiting.pop(0)
        for attribute in _NESTED:
            held = getattr(holder, attribute, None)
            if held is None or id(held) in seen:
                continue
            seen.add(id(held))
            name = f"{prefix}{attribute}"
            yield name, held
            waiting.append((f"{name}.", held))


def private_generators(holder: Any, prefix: str = "") -> dict[str, Any]:
    """The generators among an object's own attributes, by dotted name."""
    attributes = getattr(holder, "__dict__", {})
    return {
        f"{prefix}{name}": value
        for name, value in attributes.items()
        if isinstance(value, GENERATOR_TYPES)
    }


def loader_generators(loader: Any) -> dict[str, Any]:
    """Every private generator that a loader draws from in this process, each once.

    The dataset's own are among them only when the loader has no workers: in workers they are copies
    that this process cannot see.
    """
    found = private_generators(loader)
    for name, sampler in samplers_of(loader):
        found.update(private_generators(sampler, f"{name}."))
    if getattr(loader, "num_workers", 0) == 0:
        found.update(private_generators(getattr(loader, "dataset", None), "dataset."))
        found.update(private_generators(getattr(loader, "collate_fn", None), "collate_fn."))
    unique: dict[int, str] = {}
    for name, generator in found.items():
        unique.setdefault(id(generator), name)
    return {name: found[name] for name in unique.values()}


def stateful_generators(loader: Any) -> dict[str, Any]:
    """Those of them whose state can be taken out, of a loader that no loop of ours draws from."""
    found = loader_generators(loader).items()
    return {name: each for name, each in found if not isinstance(each, random.SystemRandom)}
