"""Compares checkpoints by their files alone, without the code that wrote them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from background_workloads import CHANGED, committed, save_once

from resumekit.testing import Cell, Kit

# Of a manifest: what two runs of one training differ in.
_OF_A_RUN = ("run_id", "attempt", "created", "digest")
_MODES = ("synchronous", "background", "not copied")
_METADATA = "__metadata__"
_IN_A_STATE = re.compile(r"/rank-\d+\.json: states\.")


def require_independent_copy(kit: Kit, cell: Cell, *, step: int) -> None:
    """Fails unless a save in the background is that of its step, whatever changes afterwards.

    Args:
        kit: that runs it.
        cell: the training function, its options and ranks.
        step: of its first save.
    """
    steps = {mode: _saved_once(kit, cell, step, mode) for mode in _MODES}
    wrong = differences(steps["synchronous"], steps["background"])
    assert not wrong, f"{cell}: {wrong}"
    # Without the copies the same comparison finds every tensor and every value.
    found = differences(steps["synchronous"], steps["not copied"])
    copied = tensors_of(steps["synchronous"]) | plain_values_of(steps["synchronous"])
    missed = copied.difference(found)
    assert not missed, f"{cell}: {missed}"


def _saved_once(kit: Kit, cell: Cell, step: int, mode: str) -> Path:
    """The checkpoint of the first save, made in one of the ways of ``save_once``."""
    given = {"function": cell.target, "options": dict(cell.options), "mode": mode, "step": step}
    run = kit.run_again(kit.new_run(Cell(save_once, given, cell.world_size)))
    assert not run.failure, run.failure
    training = run.directory / "training"
    for path in training.glob(CHANGED.format(rank="*")):
        same = [key for key, names in json.loads(path.read_text()).items() if not names]
        assert not same, f"{cell}, {path.name}: nothing of {same} was overwritten"
    (found,) = committed(training)
    return found


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two step directories: files, tensors and values, by name."""
    values, others = dict(_values(first)), dict(_values(second))
    names = [*values, *(name for name in others if name not in values)]
    return [name for name in names if values.get(name) != others.get(name)]


def tensors_of(step: Path) -> set[str]:
    """The names of all tensors, as ``differences`` gives them."""
    paths = step.rglob("*.safetensors")
    return {name for path in paths for name, _ in _tensors_of(path, step) if _METADATA not in name}


def plain_values_of(step: Path) -> set[str]:
    """The names of all values in states that are not sharded, as ``differences`` gives them.

    Without what the codec adds, and without empty containers.
    """
    return {
        name
        for name, value in _values(step)
        if _IN_A_STATE.search(name) and "$" not in name and value not in ([], {})
    }


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
