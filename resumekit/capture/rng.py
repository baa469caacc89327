"""The state of every random generator that a process draws from."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from resumekit.capture.mismatch import Mismatch, describe, refuse, require_fields
from resumekit.errors import DeclarationError

AnyGenerator: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)

# random.Random: version 3, 624 words and a position, then half of a pair of normal numbers or None.
_PYTHON_WORDS = struct.Struct("<625I")
_REMEDY = "Hand over the same generators under the same names as when the checkpoint was written"


class RngState:
    """The random state of this process: Python, NumPy, torch on the CPU, every CUDA device, yours.

    Args:
        generators: private generators by name, for instance a loader's.
        key: the component's key, for errors.

    Raises:
        DeclarationError: a generator's state cannot be taken out.
    """

    def __init__(
        self, generators: Mapping[str, AnyGenerator] | None = None, *, key: str = "rng"
    ) -> None:
        self.generators = dict(generators or {})
        self.key = key
        for name, generator in self.generators.items():
            if not isinstance(generator, _KINDS) or isinstance(generator, random.SystemRandom):
                raise DeclarationError(
                    f"{key}: {name}",
                    found=f"a {type(generator).__name__}, which has no state to save",
                    expected="a torch.Generator, numpy Generator or RandomState, or random.Random",
                )

    def state_dict(self) -> dict[str, Any]:
        """The state of all of them, in plain values; draws nothing."""
        return {
            "python": _python_state(random),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.default_generator.get_state(),
            "cuda": [generator.get_state() for generator in _cuda_generators()],
            "generators": {
                name: generator_state(generator) for name, generator in self.generators.items()
            },
        }

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a named generator is missing, unexpected or of another kind, or a
                state was written by a version whose generator has another state.
        """
        fields = {"python": dict, "numpy": dict, "torch": torch.Tensor, "cuda": list}
        require_fields(self.key, state, {**fields, "generators": dict})
        live = self.state_dict()
        saved_names, live_names = list(state["generators"]), list(self.generators)
        mismatches = [
            Mismatch(name, "the checkpoint has no such generator", "one, as here")
            for name in live_names
            if name not in saved_names
        ]
        mismatches += [
            Mismatch(name, "a generator in the checkpoint", f"one of {live_names}")
            for name in saved_names
            if name not in live_names
        ]
        pairs = {name: (state[name], live[name]) for name in ("python", "numpy", "torch")}
        for name in live_names:
            if name in saved_names:
                pairs[name] = (state["generators"][name], live["generators"][name])
        for name, (then, now) in pairs.items():
            kind_then, kind_now = _kind(then), _kind(now)
            if kind_then != kind_now:
                mismatches.append(Mismatch(name, kind_then, f"{kind_now}, as here"))
        refuse(self.key, mismatches, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Puts every generator where it was.

        Returns:
            What did not come back exactly: CUDA devices that are on one side only, and children of
            a NumPy seed sequence that cannot be counted on.
        """
        remarks: list[str] = []
        _set_python_state(random, state["python"])
        np.random.set_state(state["numpy"])
        torch.default_generator.set_state(state["torch"])
        remarks += _restore_cuda(state["cuda"])
        for name, saved in state["generators"].items():
            remark = set_generator_state(self.generators[name], saved)
            remarks += [f"{name}: {remark}"] if remark else []
        return tuple(remarks)


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
    return _python_state(generator)


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
        _set_python_state(generator, state)
    return ""


_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _python_state(generator: Any) -> dict[str, Any]:
    version, words, gauss_next = generator.getstate()
    return {"version": version, "words": _PYTHON_WORDS.pack(*words), "gauss_next": gauss_next}


def _set_python_state(generator: Any, state: Mapping[str, Any]) -> None:
    words = _PYTHON_WORDS.unpack(state["words"])
    generator.setstate((state["version"], words, state["gauss_next"]))


def _kind(state: Any) -> str:
    """What must be equal for a state to fit a generator, in a few words."""
    if isinstance(state, torch.Tensor):
        return f"a torch generator's state of {describe(state)}"
    if not isinstance(state, dict):
        return describe(state)
    if "bit_generator" in state:
        return f"the state of a {state['bit_generator']}"
    return f"the state of a Python generator, version {state.get('version')}"


def _cuda_generators() -> tuple[torch.Generator, ...]:
    # Asking before CUDA is in use would create a context on every device.
    return torch.cuda.default_generators if _uses_cuda() else ()


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch 2.13


def _restore_cuda(saved: list[torch.Tensor]) -> list[str]:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, state in enumerate(saved[:num_devices]):
        torch.cuda.set_rng_state(state, index)  # queued by torch until CUDA is in use
    if saved and len(saved) != num_devices:
        return [
            f"the checkpoint has the random state of {len(saved)} CUDA devices, here are "
            f"{num_devices}: draws on a device differ where it has no counterpart"
        ]
    return []


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
