"""Compares two checkpoints by their files alone, without the code that wrote them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of a manifest: what two runs of one training differ in.
_OF_A_RUN = ("run_id", "attempt", "created", "digest")
_METADATA = "__metadata__"


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two step directories: files, tensors and values, by name."""
    values, others = dict(_values(first)), dict(_values(second))
    names = [*values, *(name for name in others if name not in values)]
    return [name for name in names if values.get(name) != others.get(name)]


def tensors_of(step: Path) -> set[str]:
    """The names of all tensors, as ``differences`` gives them."""
    paths = step.rglob("*.safetensors")
    return {name for path in paths for name, _ in _tensors_of(path, step) if _METADATA not in name}


def _values(step: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(step.rglob("*")):
        name = str(path.relative_to(step))
        if path.suffix == ".safetensors":
            yield from _tensors_of(path, step)
        elif path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8"))
            yield from _leaves(name, value)
        elif path.is_file():
            yield name, path.read_bytes()


def _tensors_of(path: Path, step: Path) -> Iterator[tuple[str, Any]]:
    return ((f"{path.relative_to(step)}: {name}", value) for name, value in _tensors(path))


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The header's entry and the bytes of each tensor, see the safetensors format."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if name == _METADATA:
            yield name, entry
        else:
            begin, end = entry["data_offsets"]
            yield name, (entry["dtype"], entry["shape"], data[8 + length :][begin:end])


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            if not (name == "manifest.json" and key in _OF_A_RUN):
                yield from _leaves(
                    f"{name}: {key}" if name.endswith("json") else f"{name}.{key}", each
                )
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(f"{name}[{index}]", each)
    else:
        yield name, value
