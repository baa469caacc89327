"""Whether an object's content has changed, by one number."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import xxhash

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def content_digest(value: Any, *, limit_bytes: int) -> int | None:
    """A digest of the content of an object that depends on the order of its elements.

    Args:
        value: any object; plain objects are read by ``__dict__``.
        limit_bytes: the most that is read.

    Returns:
        The digest; None where there is more, or a part of it cannot be read.
    """
    hasher = xxhash.xxh3_64()
    left = [limit_bytes]
    return hasher.intdigest() if _add(value, hasher, left, set()) else None


def _add(value: Any, hasher: Any, left: list[int], seen: set[int]) -> bool:
    if isinstance(value, _PLAIN):
        return _feed(
            f"{type(value).__name__}:{value!r}".encode(errors="surrogatepass"), hasher, left
        )
    if id(value) in seen:
        return True
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return False
        if value.nbytes > left[0] or value.is_meta:
            return False
        flat = value.detach().cpu().contiguous().reshape(-1)
        return _feed(flat.view(torch.uint8).numpy().tobytes(), hasher, left)
    if isinstance(value, np.ndarray):
        return value.dtype != object and _feed(value.tobytes(), hasher, left)
    seen.add(id(value))
    if isinstance(value, (list, tuple, deque)):
        items: list[Any] = list(value)
    elif isinstance(value, dict):
        items = [part for pair in value.items() for part in pair]
    elif isinstance(value, torch.nn.Module):
        items = [value.state_dict(), value.training]
    elif hasattr(value, "__dict__") and not callable(value):
        items = [part for pair in vars(value).items() for part in pair]
    else:
        return False
    hasher.update(f"{type(value).__qualname__}:{len(items)}".encode())
    return all(_add(each, hasher, left, seen) for each in items)


def _feed(data: bytes, hasher: Any, left: list[int]) -> bool:
    left[0] -= len(data)
    hasher.update(data)
    return left[0] >= 0
