"""Digests of what a step uses: tensors, batches, and where each random generator is.

The digest of a generator's state says whether two runs have the same one. Its position says by how
many draws they differ: the words of a Mersenne Twister stay the same for 624 draws.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from resumekit.record.trace import device_states


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of dtype, shape and bytes; of a sharded tensor, of the shard of this rank.

    A tensor made of others, such as an 8-bit moment, counts by its parts.
    """
    local: Any = local_part(tensor)
    if hasattr(local, "__tensor_flatten__"):  # torch 2.13 utils/_python_dispatch.py
        names, _ = local.__tensor_flatten__()
        parts = (tensor_digest(getattr(local, name)) for name in names)
        return combined([type(local).__qualname__, *parts])
    local = local.detach()
    digest = xxhash.xxh3_64(f"{local.dtype} {tuple(local.shape)}".encode())
    if local.numel() and not local.is_meta:
        digest.update(byte_view(local).numpy().data)
    return digest.hexdigest()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in CPU memory, in one dimension."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: the shard, or all of it."""
    # DeepSpeed 0.19 zero/partition_parameters.py: a parameter of ZeRO 3 is empty between its uses,
    # and `ds_tensor` is the partition of this rank.
    shard = getattr(tensor, "ds_tensor", None)
    if shard is not None:
        return shard  # type: ignore[no-any-return]
    to_local = getattr(tensor, "to_local", None)  # DTensor
    return tensor if to_local is None else to_local()


def value_digest(value: Any) -> str:
    """The digest of nested tensors, arrays and plain values; other objects count by their type."""
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    return xxhash.xxh3_64_hexdigest("\0".join(_texts(value)).encode())


def combined(digests: Iterable[str]) -> str:
    """One digest of several, in their order."""
    return xxhash.xxh3_64_hexdigest(" ".join(digests).encode())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        yield tensor_digest(value)
    elif isinstance(value, float):
        yield value.hex()
    elif value is None or isinstance(value, (bool, int, str)):
        yield repr(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield f"key {name}"
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        yield f"sequence {len(value)}"
        for each in value:
            yield from _texts(each)
    elif hasattr(value, "tobytes"):  # an array of NumPy
        yield f"array {value.dtype} {value.shape} {xxhash.xxh3_64_hexdigest(value.tobytes())}"
    else:
        yield f"object {type(value).__name__}"


# ---------------------------------------------------------------- batches

# More samples than this are not digested one by one.
_MAX_SAMPLES = 4096
_MASK = (1 << 64) - 1


@dataclass
class BatchRecord:
    """The tensors that models were called with since the last step.

    Args:
        digests: of each tensor.
        counts: the samples of each, by its first dimension.
        sets: a digest of the rows of each that does not depend on their order.
    """

    digests: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)

    def add(self, inputs: Any) -> None:
        """Adds the tensors that no trained weight has gone into.

        Args:
            inputs: of a model, nested.
        """
        for tensor in _tensors(inputs):
            self.digests.append(tensor_digest(tensor))
            self.counts.append(len(tensor) if tensor.ndim else 1)
            self.sets.append(_set_digest(local_part(tensor).detach()))


def _set_digest(tensor: torch.Tensor) -> str:
    if not tensor.ndim:
        return tensor_digest(tensor)
    is_plain = not (tensor.is_meta or hasattr(tensor, "__tensor_flatten__"))
    if not is_plain or len(tensor) > _MAX_SAMPLES or not tensor.numel():
        return ""
    rows = byte_view(tensor).reshape(len(tensor), -1).numpy()
    total = sum(xxhash.xxh3_64_intdigest(row.data) for row in rows)
    return f"{total & _MASK:016x}"


def _tensors(inputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        if not inputs.requires_grad:
            yield inputs
    elif isinstance(inputs, dict):
        for value in inputs.values():
            yield from _tensors(value)
    elif isinstance(inputs, (list, tuple)):
        for value in inputs:
            yield from _tensors(value)


# ---------------------------------------------------------------- random generators

# torch 2.13 aten/src/ATen/CPUGeneratorImpl.cpp CPUGeneratorImplStateLegacy: seed, left, seeded,
# next, then the words.
_CPU_HEADER = struct.Struct("<QiiQ")
_NUM_WORDS = 624
_SEED_AND_OFFSET = struct.Struct("<QQ")


def rng_positions() -> dict[str, tuple[str, int]]:
    """A digest of each generator's words, and the index of the next one, by its name.

    Names are those of ``rng_digests``. Of CUDA's and XPU's generators it is the seed and the
    offset. A generator of another kind is left out.
    """
    _, words, _ = random.getstate()
    block = struct.pack(f"{_NUM_WORDS}I", *words[:-1])
    positions = {"python": (xxhash.xxh3_64_hexdigest(block), words[-1])}
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        positions["numpy"] = (xxhash.xxh3_64_hexdigest(inner["key"].tobytes()), int(inner["pos"]))
    cpu = torch.get_rng_state().numpy().tobytes()
    _, _, _, following = _CPU_HEADER.unpack_from(cpu)
    words_of_cpu = cpu[_CPU_HEADER.size : _CPU_HEADER.size + 8 * _NUM_WORDS]
    positions["torch"] = (xxhash.xxh3_64_hexdigest(words_of_cpu), following)
    for name, of_device in device_states().items():
        # CUDAGeneratorImpl.cpp, XPUGeneratorImpl.cpp: the seed and the offset, 8 bytes each.
        if len(of_device) == _SEED_AND_OFFSET.size:
            seed, offset = _SEED_AND_OFFSET.unpack(of_device)
            positions[name] = (str(seed), offset)
    return positions
