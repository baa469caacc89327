"""Digests of tensors and plain values: equal exactly when the bits are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of dtype, shape and bytes; of a sharded tensor, of the shard of this rank."""
    local = local_part(tensor).detach()
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
