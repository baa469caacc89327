"""The names of Accelerate that are not documented, or that the adapter replaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from resumekit.frameworks.accelerate import ENGINE, MODELS
from resumekit.requirements import PrivateName, faults

_ACCELERATOR = "accelerate 1.15 accelerator.py Accelerator"

# What is given to the sampler as the epoch.
ITERATION = PrivateName(
    "iteration",
    "accelerate 1.15 data_loader.py DataLoaderShard, DataLoaderDispatcher",
    is_written=True,
)

# Of a loader with use_stateful_dataloader: whether its first iterator, which Accelerate makes when
# it prepares the loader, has still to be used. A later one draws a random number.
IS_FIRST = PrivateName(
    "base_dataloader._initial_iter_for_state_dict",
    "torchdata 0.11 stateful_dataloader.py StatefulDataLoader",
    is_optional=True,
)

# Each name is defined where it is listed, so that none is left unchecked.
NAMES = (
    MODELS,
    # What was prepared and registered; nothing public gives it.
    OPTIMIZERS := PrivateName("_optimizers", _ACCELERATOR),
    SCHEDULERS := PrivateName("_schedulers", _ACCELERATOR),
    LOADERS := PrivateName("_dataloaders", _ACCELERATOR),
    REGISTERED := PrivateName("_custom_objects", _ACCELERATOR),
    # Replaced, because Accelerate calls its hook only before its own reading: it then unpickles
    # what was registered, fails on a file that was half written, and reads what FSDP and DeepSpeed
    # wrote before it calls the hooks.
    LOAD_STATE := PrivateName("load_state", _ACCELERATOR, ("input_dir",), is_written=True),
    ENGINE,
    PrivateName("step", f"{_ACCELERATOR}.accumulate", is_written=True),
    PrivateName("sync_gradients", _ACCELERATOR, is_written=True),
    PrivateName("gradient_accumulation_steps", _ACCELERATOR, is_written=True),
    PrivateName("project_configuration.iteration", f"{_ACCELERATOR}.save_state", is_written=True),
)


def accelerator_faults(accelerator: Any) -> Iterator[str]:
    """What of these names is not as in the tested version of Accelerate.

    Args:
        accelerator: the ``accelerate.Accelerator``, after ``prepare``.
    """
    yield from faults(accelerator, NAMES)
    for each in () if LOADERS.fault(accelerator) else LOADERS.of(accelerator):
        yield from faults(each, (ITERATION, IS_FIRST))
