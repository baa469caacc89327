"""The state of every random generator that a process draws from."""

from __future__ import annotations

import hashlib
import random
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias, TypedDict

import numpy as np
import torch

from resumekit.capture.global_rng import (
    PYTHON_WORDS,
    SEED_AND_OFFSET,
    DeviceStates,
    NumpyState,
    PythonState,
    python_state,
    read_devices,
    restore_devices,
    unreadable_accelerator,
)
from resumekit.capture.nested_state import Mismatch, describe, refuse
from resumekit.errors import DeclarationError, StateMismatchError
from resumekit.state import Checked, Fidelity, Misfit, Resplit, Rule, WorldChange, misfits

_REMEDY = "Hand over the same generators under the same names as when the checkpoint was written"

AnyGenerator: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)
GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

_SEED_BYTES = 8
_NUM_WORDS = 624  # of a Mersenne Twister

# The states of an accelerator's devices are a list under its type, in this entry with the index of
# the current device: "cuda:1". Older checkpoints, and those without an accelerator, have none.
_CURRENT = "current_device"
_DEVICE = re.compile(r"(\w+):(\d+)", re.ASCII)


class _SeedSequence(TypedDict):
    """What ``Generator.spawn`` continues from."""

    entropy: int | list[int]
    spawn_key: tuple[int, ...]
    num_children: Annotated[int, Rule("at most 10,000,000", lambda each: 0 <= each <= 10**7)]


def is_generator_state(state: Any) -> bool:
    """Whether a new generator of the kind that the state is of takes it as it is."""
    try:
        made = _generator_of(state)
        if made is None:
            return bool(state.dtype is torch.uint8 and state.dim() == 1)
        set_generator_state(made, state)
        return _digest(_of_itself(generator_state(made))) == _digest(_of_itself(state))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    except struct.error:
        return False


def _generator_of(state: Any, seed: int = 0) -> AnyGenerator | None:
    """A new generator of the kind of a state; None for one of a device, which may not be here."""
    if isinstance(state, torch.Tensor):
        made = torch.Generator().manual_seed(seed)
        return made if state.numel() == made.get_state().numel() else None
    if "words" in state:
        if not isinstance(state["gauss_next"], float | None):
            raise ValueError("Python takes anything")
        return random.Random(seed)
    if not 0 <= state["state"].get("pos", 0) <= _NUM_WORDS:
        raise ValueError("NumPy takes any number")
    bits = getattr(np.random, state["bit_generator"])(seed)
    if "has_gauss" in state:
        if state["has_gauss"] not in (0, 1):
            raise ValueError("NumPy takes any number")
        return np.random.RandomState(bits)
    if next(misfits(_SeedSequence | None, state["seed_sequence"], ""), None) is not None:
        raise ValueError("not the state of a seed sequence")
    return np.random.Generator(bits)


def _of_itself(state: Any) -> Any:
    """A state without the seed sequence, which a generator keeps."""
    if isinstance(state, torch.Tensor):
        return state
    return {name: each for name, each in state.items() if name != "seed_sequence"}


_IS_STATE = Rule("the state of a random generator", is_generator_state)
GeneratorState: TypeAlias = Annotated[Any, _IS_STATE]
_TorchState: TypeAlias = Annotated[torch.Tensor, _IS_STATE]


class _OptionalRng(TypedDict, total=False):
    current_device: str
    at_epoch: RngStates  # of an epoch of ``epochs()``


class _Rng(_OptionalRng):
    python: Annotated[dict[str, Any], _IS_STATE, Rule("of Python", lambda it: "words" in it)]
    numpy: Annotated[dict[str, Any], _IS_STATE, Rule("of NumPy", lambda it: "has_gauss" in it)]
    torch: Annotated[_TorchState, Rule("of torch on the CPU", lambda it: bool(_generator_of(it)))]
    cuda: list[_TorchState]
    generators: dict[str, GeneratorState]


class _WithDevices:
    """The list of an accelerator's states has the name that ``current_device`` begins with."""

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        kind = str(value.get(_CURRENT, "cuda")).partition(":")[0]
        others = {name: each for name, each in value.items() if name != kind}
        yield from misfits(_Rng, {"cuda": [], **others}, path)
        yield from misfits(list[_TorchState], value.get(kind), f"{path}.{kind}".lstrip("."))


# The states of ``RngState``.
RngStates: TypeAlias = Annotated[dict[str, Any], _WithDevices()]


class RngState(Checked):
    """The RNG state of this process: Python, NumPy, torch on the CPU and each accelerator device.

    Args:
        generators: more generators by name, for instance a loader's.
        key: the component's key, for errors.

    Raises:
        DeclarationError: a generator's state cannot be read.
    """

    schema = RngStates

    def __init__(
        self, generators: Mapping[str, AnyGenerator] | None = None, *, key: str = "rng"
    ) -> None:
        self.generators = dict(generators or {})
        self.key = key
        self._python, self._numpy = PythonState(), NumpyState()
        for name, generator in self.generators.items():
            kinds = GENERATOR_TYPES
            if not isinstance(generator, kinds) or isinstance(generator, random.SystemRandom):
                raise DeclarationError(
                    f"{key}: {name}",
                    found=f"a {type(generator).__name__}, which has no state to save",
                    expected="a torch.Generator, numpy Generator or RandomState, or random.Random",
                )

    def state_dict(self) -> dict[str, Any]:
        """The states in plain values, which must not be changed."""
        return {
            "python": self._python.read(),
            "numpy": self._numpy.read(),
            "torch": torch.default_generator.get_state(),
            "cuda": [],
            **_device_entries(),
            "generators": {
                name: generator_state(generator) for name, generator in self.generators.items()
            },
        }

    def check_state_dict(self, state: Any) -> None:
        """Refuses other named generators, and states of another type or version."""
        live = self.state_dict()
        then, now = state["generators"], live["generators"]
        mismatches = [
            Mismatch(name, "the checkpoint has no such generator", "one, as in this run")
            for name in now
            if name not in then
        ]
        mismatches += [
            Mismatch(name, "a generator in the checkpoint", f"one of {list(now)}")
            for name in then
            if name not in now
        ]
        pairs = [(name, state[name], live[name]) for name in ("python", "numpy", "torch")]
        pairs += [(name, then[name], now[name]) for name in now if name in then]
        saved, here = _saved_devices(state), _saved_devices(live)
        if saved.kind == here.kind:
            devices = zip(saved.states, here.states, strict=False)
            pairs += [(f"{saved.kind}:{index}", *pair) for index, pair in enumerate(devices)]
        mismatches += [
            Mismatch(name, _kind(saved), f"{_kind(live_state)}, as in this run")
            for name, saved, live_state in pairs
            if _kind(saved) != _kind(live_state)
        ]
        refuse(self.key, mismatches, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores every generator.

        Returns:
            Messages about devices on one side only, and about NumPy seed sequences whose
            ``spawn()`` gives other children.
        """
        set_python_state(random, state["python"])
        np.random.set_state(state["numpy"])
        torch.default_generator.set_state(state["torch"])
        messages = restore_devices(_saved_devices(state))
        for name, saved in state["generators"].items():
            message = set_generator_state(self.generators[name], saved)
            messages += [f"{name}: {message}"] if message else []
        return tuple(messages)

    @property
    def fidelity(self) -> tuple[Fidelity, str] | None:
        """Lost where an accelerator in use has generators that nothing can read."""
        kind = unreadable_accelerator()
        if not kind:
            return None
        return Fidelity.LOST, (
            f"the generators of {kind} devices are not saved: torch.{kind} has no get_rng_state "
            "and set_rng_state; draw on the CPU instead"
        )

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """This rank's state in a job with another number of ranks; a new rank's is derived."""
        if not change.is_new:
            return dict(states[change.rank]), ()
        flat = {rank: _flat(state) for rank, state in states.items()}
        found, derived = states_of_new_rank(flat, change.rank)
        message = f"{self.key}: rank {change.rank} is new, "
        if derived:
            message += f"its {', '.join(derived)} derived from the random state of rank 0"
        else:
            message += "it takes the random state that the former ranks had in common"
        return _unflat(found, states[0]), (message,)


def _device_entries() -> dict[str, Any]:
    devices = read_devices()
    if devices is None:
        return {}
    return {devices.kind: devices.states, _CURRENT: f"{devices.kind}:{devices.current}"}


def _saved_devices(state: Mapping[str, Any]) -> DeviceStates:
    """The states of devices; raises StateMismatchError where the current device has none."""
    name = state.get(_CURRENT)
    if name is None:
        return DeviceStates("cuda", None, state["cuda"])
    match = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    states = state.get(match[1]) if match else None
    if match is None or not isinstance(states, list) or int(match[2]) >= len(states):
        raise StateMismatchError(
            f"rng: {_CURRENT}", found=repr(name), expected="a device with a state in the checkpoint"
        )
    return DeviceStates(match[1], int(match[2]), states)


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Every generator's state by name; those of devices as a list, the current one first."""
    common = {name: each for name, each in state.items() if name not in ("generators", _CURRENT)}
    devices = _saved_devices(state)
    common[devices.kind] = devices.current_first()
    common = {name: each for name, each in common.items() if type(each) is not list or each}
    return {**common, **{f"generator {name}": one for name, one in state["generators"].items()}}


def _unflat(flat: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    private = {name: flat[f"generator {name}"] for name in like["generators"]}
    common = {name: flat.get(name, like[name]) for name in like if name != "generators"}
    if _CURRENT in common:
        common[_CURRENT] = f"{_saved_devices(like).kind}:0"  # as _flat orders them
    return {**common, "generators": private}


def _kind(state: Any) -> str:
    """Describes what must be equal for a state to fit a generator."""
    if isinstance(state, torch.Tensor):
        return f"a torch generator's state of {describe(state)}"
    if not isinstance(state, dict):
        return describe(state)
    if "bit_generator" in state:
        return f"the state of a {state['bit_generator']}"
    return f"the state of a Python generator, version {state.get('version')}"


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


def new_generator(kind: str, state: Any) -> AnyGenerator | None:
    """A random generator of one of the known classes, by name; None for any other name.

    Args:
        kind: the full name of the class.
        state: that it gets next: of a numpy Generator it names the bit generator.
    """
    if kind == f"{np.random.Generator.__module__}.Generator":
        name = state.get("bit_generator") if isinstance(state, Mapping) else None
        return np.random.Generator(getattr(np.random, name)()) if name in _BIT_GENERATORS else None
    others = (torch.Generator, np.random.RandomState, random.Random)
    made = (each for each in others if f"{each.__module__}.{each.__qualname__}" == kind)
    return next((each() for each in made), None)


def set_generator_state(generator: AnyGenerator, state: Any) -> str:
    """Restores the state of one generator; returns a message about what is inexact, or ``""``.

    Raises:
        StateMismatchError: it is the state of another kind of generator.
    """
    kind, expected = _kind(state), _kind(generator_state(generator))
    if kind != expected:
        raise StateMismatchError("rng", found=kind, expected=expected, remedy=_REMEDY)
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
    """Restores the state of a ``random.Random`` or of the module ``random``."""
    words = PYTHON_WORDS.unpack(state["words"])
    generator.setstate((state["version"], words, state["gauss_next"]))


def _seed_sequence(bit_generator: Any) -> dict[str, Any] | None:
    """The state behind ``Generator.spawn``, which NumPy's own state does not contain."""
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


def states_of_new_rank(
    states: Mapping[int, Mapping[str, Any]], rank: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The RNG states of a rank that did not exist when the checkpoint was written.

    A derived state is deterministic and differs from that of every other rank, so ranks do not draw
    the same numbers. Where all former ranks have equal states, as in a script that seeds all
    ranks alike, the new rank gets that state.

    Args:
        states: of some former ranks, including rank 0: generators' states by name.
        rank: the new rank.

    Returns:
        The states by name, and the names of the derived ones.
    """
    first = states[0]
    alike = {
        name: len(states) > 1 and len({_digest(each.get(name)) for each in states.values()}) == 1
        for name, state in first.items()
    }
    derived = {
        name: state if alike[name] else _derived(state, f"{name} of rank {rank}")
        for name, state in first.items()
    }
    return derived, tuple(name for name, is_alike in alike.items() if not is_alike)


def _derived(state: Any, name: str) -> Any:
    """A state of the same type of generator, seeded by a digest of this state and the name."""
    if isinstance(state, list):  # one for each device
        return [_derived(each, f"{name}, device {index}") for index, each in enumerate(state)]
    seed = int.from_bytes(_digest(state, name), "little")
    if isinstance(state, torch.Tensor) and state.numel() == SEED_AND_OFFSET.size:
        seed_bytes = bytearray(seed.to_bytes(_SEED_BYTES, "little"))
        return torch.cat([torch.frombuffer(seed_bytes, dtype=torch.uint8), state[_SEED_BYTES:]])
    generator = _generator_of(state, seed)
    if generator is None:  # of MPS
        return state
    seeded = generator_state(generator)
    if isinstance(generator, np.random.Generator):
        seeded["seed_sequence"] = None  # spawn() continues the live generator's sequence
    return seeded


def _feed(digest: Any, value: Any) -> None:
    """Updates a digest with every bit of a state."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(f"{key}:".encode())
            _feed(digest, each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _feed(digest, each)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        digest.update(np.asarray(value).tobytes())
    else:
        digest.update(value if isinstance(value, bytes) else repr(value).encode())


def _digest(state: Any, name: str = "") -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=_SEED_BYTES)
    _feed(digest, state)
    return digest.digest()
