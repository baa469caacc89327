"""The state of one random generator, of whatever library, in plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from resumekit.capture.unchanged import PYTHON_WORDS, python_state

AnyGenerator: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)
GENERATOR_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: AnyGenerator) -> Any:
    """The state of one generator, in plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return {
            **generator.bit_generator.state,
            "seed_sequence": _seed_sequence(generator.bit_generator),
        }
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return python_state(generator)


def set_generator_state(generator: AnyGenerator, state: Any) -> str:
    """Puts one generator where it was; gives what did not come back exactly, or ``""``."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = {k: v for k, v in state.items() if k != "seed_sequence"}
        return _restore_seed_sequence(generator.bit_generator, state["seed_sequence"])
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        set_python_state(generator, state)
    return ""


def set_python_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Puts a ``random.Random``, or the module ``random``, where it was."""
    words = PYTHON_WORDS.unpack(state["words"])
    generator.setstate((state["version"], words, state["gauss_next"]))


def _seed_sequence(bit_generator: Any) -> dict[str, Any] | None:
    """What decides the children that ``Generator.spawn`` gives; NumPy's own state leaves it out."""
    sequence = getattr(bit_generator, "seed_seq", None)
    if not isinstance(sequence, np.random.SeedSequence):
        return None
    entropy = sequence.entropy
    return {
        "entropy": entropy if isinstance(entropy, int) else np.asarray(entropy).tolist(),
        "spawn_key": tuple(sequence.spawn_key),
        "num_children": sequence.n_children_spawned,
    }


def _restore_seed_sequence(bit_generator: Any, saved: dict[str, Any] | None) -> str:
    live = _seed_sequence(bit_generator)
    if saved is None or live == saved:
        return ""
    if live is None or {**live, "num_children": saved["num_children"]} != saved:
        return "its seed sequence is another one, so spawn() gives other children"
    if live["num_children"] > saved["num_children"]:
        return "more children were spawned here already, so spawn() gives other ones"
    bit_generator.seed_seq.spawn(saved["num_children"] - live["num_children"])
    return ""
