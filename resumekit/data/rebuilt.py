"""Telling a loader that was built for this epoch from one that was there before it.

Where user code makes a new loader in every epoch, its workers are new ones, and its generators
stand where that code has put them. Within one process this shows: the next epoch comes with another
object. A process that resumes at the start of an epoch sees one object only, so it looks at what
exists when the epoch begins.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from resumekit.data.kinds import INNER

# What the garbage collector can find. It does not know torch's generators.
_KINDS = (DataLoader, random.Random, np.random.Generator, np.random.RandomState)


class Witness:
    """Remembers which loaders and generators exist at the start of an epoch."""

    def __init__(self) -> None:
        self._there = {id(each): _reference(each) for each in _living()}

    def saw(self, thing: Any) -> bool:
        """Whether it existed, as far as this can be known."""
        thing = getattr(thing, INNER, thing)  # what a framework wraps, it makes together with it
        if not isinstance(thing, _KINDS):
            return True
        reference = self._there.get(id(thing), _nobody)
        if reference() is thing:
            return True
        # The collector does not tell of what was frozen; that is older than any epoch.
        return not any(each is thing for each in _living())

    def made_anew(self, generators: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """The names of a new loader's generators that are new as well.

        Args:
            generators: its private generators.
            saved: the states of those of the loader before it.
        """
        return [
            name
            for name, generator in generators.items()
            if name in saved and not self._is_kept(generator, saved[name])
        ]

    def _is_kept(self, generator: Any, saved: Any) -> bool:
        if not isinstance(generator, torch.Generator):
            return self.saw(generator)
        if not isinstance(saved, torch.Tensor):
            return False
        # One that lives through all epochs has been seeded once.
        former = torch.Generator(generator.device)
        former.set_state(saved)
        return former.initial_seed() == generator.initial_seed()


def without_past(state: Mapping[str, Any]) -> dict[str, Any]:
    """A loader's place without what is known about its being built in every epoch."""
    return {key: value for key, value in state.items() if key not in ("rebuilt", "made_anew")}


def _living() -> list[Any]:
    # Not isinstance: it would ask each of a million objects, and some answer for another one.
    kinds = {kind for base in _KINDS for kind in _with_subclasses(base)}
    return [each for each in gc.get_objects() if type(each) in kinds]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # NumPy's generators have no weak references
        return partial(_itself, thing)


def _itself(thing: Any) -> Any:
    return thing


def _nobody() -> None:
    return None
