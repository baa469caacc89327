"""A model of a checkpoint as one file for other tools: whole tensors by name, in one type.

Works for every checkpoint, however its model was sharded: needs no process group, no framework and
none of the run's code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.model import IN_FP32, TRAINED_IN
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.run.resuming.finder import read_sharded_component
from resumekit.serialization.index import arrange, header
from resumekit.serialization.leaves import Leaf, element_type
from resumekit.state import Slot
from resumekit.storage.manifest import ComponentRecord, StepReader

_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _LOW_PRECISION | {torch.float32, torch.float64}

AS_TRAINED = "as-trained"
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = (*_TYPES, AS_TRAINED)

_TypeOf = Callable[[str], torch.dtype | None]


def export_model(
    step: StepReader, path: Path, *, key: str | None = None, dtype: str = "fp32"
) -> tuple[str, ...]:
    """Writes the model of a checkpoint as one safetensors file; it is there whole or not at all.

    A tensor with several names is written under each of them.

    Args:
        step: the checkpoint.
        path: the file to write; it must not be there.
        key: of the component, where the checkpoint has several models.
        dtype: ``"fp32"``: fp16 and bf16 become fp32, which loses nothing, and other types stay.
            ``"bf16"`` or ``"fp16"``: floating-point tensors are rounded to it. ``"as-trained"``:
            each has the type that it had in the module, also where fp32 weights were saved for it.

    Returns:
        The names of the tensors written.

    Raises:
        CheckpointError: damage, or an I/O error while reading.
        ConfigurationError: the file is there, or cannot be written; there is no such type, or a
            value is too large for it.
        StateMismatchError: there is no such model, or each rank has one of its own.
    """
    if dtype not in DTYPES:
        raise ConfigurationError("dtype", found=repr(dtype), expected=f"one of {', '.join(DTYPES)}")
    if path.exists():
        raise ConfigurationError(
            str(path), found="it exists", expected="a new file", remedy="Remove it first"
        )
    record = _record(step, key)
    wanted = _types(step, record, dtype)
    state, _ = read_sharded_component(step, record, None, in_stages=False)
    leaves: dict[str, Leaf] = {}
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor):
            whole = _cast(name, value, wanted(name))
            kind = element_type(whole.dtype)
            if kind is not None:
                leaves[name] = Leaf(whole, kind, tuple(whole.shape))
    try:
        _write(path, leaves)
    except OSError as error:
        raise ConfigurationError(str(path), found=str(error), expected="a writable path") from None
    return tuple(leaves)


def _types(step: StepReader, record: ComponentRecord, dtype: str) -> _TypeOf:
    """The type that a tensor of a name is to have; None for its own."""
    if dtype != AS_TRAINED:
        return lambda name: _TYPES[dtype]
    described: Any = step.manifest.fingerprint.get(record.key)
    described = described if isinstance(described, Mapping) else {}
    lower = _TYPES.get(str(described.get(TRAINED_IN)))
    in_fp32 = frozenset(map(str, described.get(IN_FP32, ())))
    return lambda name: None if name in in_fp32 else lower


def _cast(name: str, value: Tensor, wanted: torch.dtype | None) -> Tensor:
    rounds = wanted in _LOW_PRECISION and value.dtype in _FLOATS
    widens = wanted is torch.float32 and value.dtype in _LOW_PRECISION
    if wanted is None or not (rounds or widens):
        return value
    cast = value.to(wanted)
    if bool((cast.isinf() & ~value.isinf()).any()):
        raise ConfigurationError(
            name,
            found=f"values too large for {wanted}",
            expected="a type that holds them",
            remedy="Export it as bf16 or fp32",
        )
    return cast


def _record(step: StepReader, key: str | None) -> ComponentRecord:
    records = {record.key: record for record in step.manifest.models}
    wanted = Slot.MODEL.value if key is None else key
    names = ", ".join(sorted(records)) or "no model"
    if wanted not in records:
        raise StateMismatchError(
            str(step.name),
            found=f"no {wanted} to export (it has {names})",
            expected="the key of a model",
            remedy="Pass --component with one of them" if records else None,
        )
    record = records[wanted]
    if not record.is_of_job:
        raise StateMismatchError(
            f"{step.name}: {wanted}",
            found=f"saved {record.pattern}: each has a state of its own",
            expected="one state for the job",
        )
    return record


def _write(path: Path, leaves: Mapping[str, Leaf]) -> None:
    records = arrange(leaves)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("xb") as file:
            file.write(header(records, {}))
            for record in records:
                for piece in leaves[record.name].buffers():
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
