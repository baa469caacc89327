"""What was in the batches of an epoch, as one digest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

# Of anything larger the first and the last part are taken: another order shows in any of them.
_WHOLE_BYTES = 64 * 1024
_MAX_DEPTH = 16


class Contents:
    """A running digest of batches of any make.

    Tensors on the CPU, arrays, numbers and text count with their values; tensors elsewhere with
    their shapes, because to read them would wait for the device; other objects with their class.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, batch: Any) -> None:
        """Takes in one batch."""
        self._add(batch, 0)

    def hexdigest(self) -> str:
        """The digest of all batches so far."""
        return self._digest.hexdigest()

    def _add(self, value: Any, depth: int) -> None:
        self._text(type(value).__qualname__)
        if depth > _MAX_DEPTH:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, (bool, int, float, str, type(None), np.generic)):
            self._text(repr(value))
        elif isinstance(value, (bytes, bytearray)):
            self._bytes(np.frombuffer(value, dtype=np.uint8))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._text(repr(key))
                self._add(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            self._text(str(len(value)))
            for item in value:
                self._add(item, depth + 1)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._text(f"{tensor.dtype}{tuple(tensor.shape)}")
        plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
        if tensor.device.type == "cpu" and plain and tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            self._bytes(flat.view(torch.uint8).numpy())

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._text(f"{array.dtype}{array.shape}")
        if array.dtype.hasobject:
            for item in array.flat:
                self._add(item, _MAX_DEPTH)
        elif array.size:
            self._bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _text(self, text: str) -> None:
        self._digest.update(text.encode() + b"\0")

    def _bytes(self, data: np.ndarray[Any, Any]) -> None:
        if len(data) > _WHOLE_BYTES:
            half = _WHOLE_BYTES // 2
            self._digest.update(data[:half].data)
            data = data[-half:]
        self._digest.update(data.data)
