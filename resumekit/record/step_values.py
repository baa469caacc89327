"""What a record holds of a step: digests of ids and random states, learning rates, the loss.

Another record of the step has what is compared of the weights: samples of a few tensors at each
step, all in turn.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from resumekit.capture.global_rng import NumpyState, PythonState, read_devices
from resumekit.capture.rng import generator_state
from resumekit.record.journal import WEIGHTS, Record
from resumekit.serialization.digests import state_digest
from resumekit.serialization.sharding import local_part

_MASK = 2**64 - 1
# Odd multipliers with well mixed bits (splitmix64).
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# As arrays: numpy converts a scalar at each call.
_FIRST_WORD, _HALF_WORD = np.array(_FIRST, np.uint64), np.array(32, np.uint64)
_WORD = np.dtype(np.uint64)
# A loop over fewer ids costs less than the calls of numpy.
_MIN_FOR_NUMPY = 16


class SampleIds:
    """The ids of the samples of one step, added batch by batch.

    Attributes:
        ordered: digest of the ids in their order.
        unordered: sum of a hash of each id modulo 2**64.
        num_samples: how many there were.
        is_complete: whether every batch had ids that have a stable digest.
    """

    __slots__ = ("is_complete", "num_samples", "ordered", "unordered")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins a step."""
        self.ordered = self.unordered = self.num_samples = 0
        self.is_complete = True

    def add(self, ids: Any, num_samples: int) -> None:
        """Adds the ids of one batch; None where the loader has none."""
        packed = None if ids is None else _packed(ids)
        if packed is None:
            self.num_samples += num_samples
            self.is_complete = False
        else:
            self.add_packed(packed, num_samples)

    def add_packed(self, packed: bytes, num_samples: int) -> None:
        """Adds the ids of one batch, 64 bits each."""
        self.num_samples += num_samples
        self.ordered = xxhash.xxh3_64_intdigest(packed, self.ordered)
        self.unordered = (self.unordered + _sum_of_hashes(packed)) & _MASK


def _sum_of_hashes(packed: bytes) -> int:
    """The sum of a hash of each id; its last multiplication is the same for all of them."""
    num_ids = len(packed) // 8
    if num_ids < _MIN_FOR_NUMPY:
        total = 0
        for each in struct.unpack(f"{num_ids}Q", packed):
            word = each * _FIRST & _MASK
            total += word ^ (word >> 32)
        return total * _SECOND
    words = np.frombuffer(packed, _WORD) * _FIRST_WORD
    words ^= words >> _HALF_WORD
    return int(np.add.reduce(words)) * _SECOND


def _packed(ids: Any) -> bytes | None:
    """64 bits for each id; None for ids that have no digest that two processes agree on."""
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        ids = ids.tolist()
    if not isinstance(ids, (list, tuple)):
        ids = (ids,)
    try:
        return struct.pack(f"{len(ids)}q", *ids)
    except (struct.error, TypeError):  # arrays of several indices raise TypeError
        words = [_word(each) for each in ids]
    if None in words:
        return None
    return struct.pack(f"{len(words)}Q", *words)


def _word(one: Any) -> int | None:
    """64 bits of an id that is no small integer: a text, bytes, or a tuple of ids."""
    text = _stable_text(one)
    return None if text is None else xxhash.xxh3_64_intdigest(text.encode())


def _stable_text(one: Any) -> str | None:
    if isinstance(one, (str, bytes, int, float)):
        return repr(one)
    if isinstance(one, (list, tuple)):
        parts = [_stable_text(each) for each in one]
        return None if None in parts else f"({','.join(map(str, parts))})"
    return None  # the repr of an object may hold its address


class RandomStates:
    """Digests of the states of the generators that a run draws from; draws nothing.

    Args:
        generators: those that the user named.
    """

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self._python, self._numpy = PythonState(), NumpyState()
        self._generators = generators
        self._seen: tuple[Any, Any] = (None, None)
        self._host = 0

    def torch(self) -> int:
        """Of torch's CPU generator."""
        return xxhash.xxh3_64_intdigest(torch.default_generator.get_state().numpy().data)

    def host(self) -> int:
        """Of Python's and NumPy's global generators and of the named ones."""
        python, numpy = self._python.read(), self._numpy.read()
        if python is not self._seen[0] or numpy is not self._seen[1]:
            self._seen = (python, numpy)
            digest = xxhash.xxh3_64(python["words"])
            digest.update(repr((python["version"], python["gauss_next"])).encode())
            rest = {**numpy, "state": dict(numpy["state"])}
            key = rest["state"].pop("key", None)  # only the MT19937 has one
            if key is not None:
                digest.update(key.tobytes())
            digest.update(repr(rest).encode())
            self._host = digest.intdigest()
        host = self._host
        for name, generator in self._generators.items():
            text = f"{name} {state_digest(generator_state(generator))}"
            host = xxhash.xxh3_64_intdigest(text.encode(), host)
        return host

    def devices(self) -> int | None:
        """Of every device, the current one first; None while no accelerator is in use."""
        found = read_devices()
        if found is None:
            return None
        digest = xxhash.xxh3_64()
        for state in found.current_first():
            digest.update(state.numpy().data)
        return digest.intdigest()


def learning_rates_digest(rates: Sequence[float]) -> int:
    """One digest for the learning rates of all param groups."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"{len(rates)}d", *rates))


def plain_rates(groups: Iterable[Mapping[str, Any]]) -> list[float] | None:
    """The learning rates; None if one of them can only be read by waiting for a device."""
    rates = []
    for group in groups:
        rate = group.get("lr", 0.0)
        if isinstance(rate, torch.Tensor):
            if rate.device.type != "cpu" or rate.numel() != 1:
                return None
            rate = rate.item()
        rates.append(rate)
    return rates


# Values that no record holds yet; beyond that the oldest ones are given up.
MAX_WAITING = 256


_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


def plain_loss(loss: Any) -> float | None:
    """The loss as a number; None where a device has still to compute it or it is no number."""
    if type(loss) is torch.Tensor:  # a DTensor's item() is a collective
        if not loss.is_cpu or loss.numel() != 1 or loss.dtype.is_complex:
            return None
        # torch 2.13 python_variable_methods.cpp: item() and is_complex() release the interpreter
        # lock, for which a loader's thread may be waiting; tolist() does not.
        is_plain = loss.ndim == 0 and loss.dtype in _FLOATS
        value: Any = loss.tolist() if is_plain else loss.item()
        return float(value)
    try:
        return None if isinstance(loss, torch.Tensor) else float(loss)
    except (TypeError, ValueError, OverflowError):
        return None


class LateCopies:
    """Values on CUDA devices, copied to host memory without blocking.

    The copy is queued in the stream of the step, so a tensor that changes later, such as a running
    sum, is read as it was.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, torch.Tensor, Any]] = deque(maxlen=MAX_WAITING)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, step: int, value: Any) -> None:
        """Takes a value of a step, if it is a tensor on a CUDA device."""
        if type(value) is not torch.Tensor or value.device.type != "cuda":
            return
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value.detach(), non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch 2.13
        event.record(torch.cuda.current_stream(value.device))
        self._waiting.append((step, host, event))

    def arrived(self) -> list[tuple[int, torch.Tensor]]:
        """The steps and values that have arrived since the last call, in their order."""
        found = []
        while self._waiting and self._waiting[0][2].query():
            step, host, _ = self._waiting.popleft()
            found.append((step, host))
        return found

    def waits_for(self, step: int) -> bool:
        """Whether a value of a step up to this one has not arrived."""
        return bool(self._waiting) and self._waiting[0][0] <= step

    def wait(self) -> None:
        """Waits until all have arrived."""
        if self._waiting:
            self._waiting[-1][2].synchronize()


# ---------------------------------------------------------------- samples of the weights

# Tensors of a step, and elements of each. From a device each of them is a copy of its own.
_ON_HOST, _ON_DEVICE = 2, 1
_NUM_ELEMENTS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class WeightSamples:
    """Digests of samples of the parameters that optimizers train.

    At each step they are of two tensors in host memory, or of one on a device: within as many steps
    as there are tensors, all have had their turn. In its next turn a tensor gives its next
    elements. Of a sharded parameter they are this rank's. A device is never waited for.

    Args:
        optimizers: whose parameters these are, at any time.
    """

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self._optimizers = optimizers
        self.late = LateCopies()

    def take(self, step: int) -> list[Record]:
        """The record of the weights as they are now; none where a device has still to deliver it.

        Args:
            step: the optimizer step; it decides whose turn it is.
        """
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        total = sum(map(len, groups))
        if not total:
            return []
        is_on_host, samples = _tensor(groups, 0).is_cpu, []
        num_tensors = min(total, _ON_HOST if is_on_host else _ON_DEVICE)
        for turn in range(step * num_tensors, (step + 1) * num_tensors):
            tensor = _tensor(groups, turn % total)
            is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
            if not is_plain or tensor.is_cpu is not is_on_host:
                continue
            if is_on_host:
                samples.append(_sample(tensor, turn // total))
            else:
                elements = tensor.detach().flatten()
                window = _window(len(elements), turn // total)
                self.late.add(step, elements[window.start : window.stop])
        return _records(step, samples)

    def arrived(self) -> list[Record]:
        """The records of the samples that devices have delivered since the last call."""
        found = (_records(step, [_sample(host)]) for step, host in self.late.arrived())
        return [each for records in found for each in records]


def _tensor(groups: Iterable[Sequence[Any]], index: int) -> Any:
    for group in groups:
        if index < len(group):
            tensor = group[index]
            return tensor if type(tensor) in _PLAIN else local_part(tensor)
        index -= len(group)
    raise IndexError(index)


def _sample(tensor: torch.Tensor, turn: int = 0) -> tuple[bytes, int]:
    """Elements of a tensor in host memory, in the order of the memory, and their number.

    They are read without an operation of torch: each lets other threads run, as those of a
    loader with workers, and a switch costs more than all else here.
    """
    if not (tensor.is_contiguous() or _span(tensor) == tensor.numel()):
        tensor = tensor.detach().contiguous()
    storage, size = tensor.untyped_storage(), tensor.itemsize
    window = _window(tensor.numel(), turn)
    start, num_bytes = (tensor.storage_offset() + window.start) * size, len(window) * size
    if start + num_bytes > storage.nbytes():  # freed, as in sharded modules
        return b"", 0
    return ctypes.string_at(storage.data_ptr() + int(start), num_bytes), len(window)


def _span(tensor: torch.Tensor) -> int:
    """From a tensor's first element to its last one, in elements."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _window(num_elements: int, turn: int) -> range:
    """Some of all elements, the next ones in each turn."""
    num_windows = max(1, -(-num_elements // _NUM_ELEMENTS))
    start = turn % num_windows * _NUM_ELEMENTS
    return range(start, min(start + _NUM_ELEMENTS, num_elements))


def _records(step: int, samples: Sequence[tuple[bytes, int]]) -> list[Record]:
    count = sum(each for _, each in samples)
    ids = xxhash.xxh3_64_intdigest(b"".join(each for each, _ in samples))
    return [Record(step, ids=ids, num_samples=count, kind=WEIGHTS)] if count else []
