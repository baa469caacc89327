"""The tensors of a model in a checkpoint, by the names that its code has, read a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.model import IN_FP32, TRAINED_IN
from resumekit.capture.nested_state import merge_stored
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.index import TensorRecord, arrange
from resumekit.serialization.leaves import Leaf, element_type, retyped
from resumekit.serialization.reading import StoredSource, StoredTensor, open_state, read_boxes
from resumekit.serialization.sharding import Box
from resumekit.serialization.tensors import StatePath, is_subclass
from resumekit.state import Slot
from resumekit.storage.manifest import ComponentRecord, StepReader

_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _LOW_PRECISION | {torch.float32, torch.float64}

AS_TRAINED = "as-trained"
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = (*_TYPES, AS_TRAINED)

MODEL, TRAIN, EMA = Slot.MODEL.value, "train", Slot.EMA.value
KINDS = (MODEL, TRAIN, EMA)

_TypeOf = Callable[[str], torch.dtype | None]


@dataclass(frozen=True, eq=False)
class _ScheduleFree:
    """The weights with which a schedule-free optimizer evaluates, while it trains others.

    Args:
        trained: the weights of the model.
        base: those of the sequence ``z`` of the optimizer.
        weight: of ``base``.

    Source: schedulefree 1.4 adamw_schedulefree.py, ``eval``.
    """

    trained: StoredTensor
    base: StoredTensor
    weight: float


_Whole = StoredTensor | Tensor  # the latter: one that shares memory with another one
_Stored = _Whole | _ScheduleFree

_BATCH_BYTES = 16 << 20  # of small tensors that are read together


class Tensors:
    """Tensors of a checkpoint, each in the type that it is exported in.

    Args:
        tensors: by name.
        types: by name; others keep the type that they are stored in.

    Attributes:
        sizes: the bytes of each tensor by its name, in their order.
    """

    def __init__(
        self,
        tensors: Mapping[str, _Stored],
        types: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self._tensors = tensors
        self._types = {name: types.get(name, _dtype(each)) for name, each in tensors.items()}
        self._leaves = {name: self._leaf(name) for name in tensors}
        self.sizes = {name: leaf.num_bytes for name, leaf in self._leaves.items()}

    @property
    def tied(self) -> dict[str, str]:
        """The further names of tensors with several, each with the first name."""
        first: dict[int, str] = {}
        names = {n: first.setdefault(id(tensor), n) for n, tensor in self._tensors.items()}
        return {name: other for name, other in names.items() if name != other}

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """Some of them: by new names, those of the tensors."""
        types = {new: self._types[old] for new, old in names.items()}
        return Tensors({new: self._tensors[old] for new, old in names.items()}, types)

    @property
    def untied(self) -> list[str]:
        """The names, of several ones of a tensor the first."""
        tied = self.tied
        return [name for name in self._tensors if name not in tied]

    def _leaf(self, name: str) -> Leaf:
        element = element_type(self._types[name])
        assert element is not None  # of a tensor that was stored, or one of _TYPES
        return Leaf(b"", element, tuple(_trained(self._tensors[name]).shape))

    def arranged(self, names: Sequence[str]) -> tuple[TensorRecord, ...]:
        """Where each tensor is in a file with these."""
        return arrange({name: self._leaves[name] for name in names})

    def read(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The tensors of these names in their order, verified; few of them are in memory at once.

        Raises:
            CheckpointError: damage, or an I/O error.
            ConfigurationError: a value is too large for the type.
        """
        for batch in batches_of(names, self.sizes, _BATCH_BYTES):
            yield from self._read(batch)

    def _read(self, names: Sequence[str]) -> Iterator[Tensor]:
        tensors = [self._tensors[name] for name in names]
        bases = [each.base for each in tensors if isinstance(each, _ScheduleFree)]
        wanted = [
            each for each in (*map(_trained, tensors), *bases) if not isinstance(each, Tensor)
        ]
        stored = {each: Box.whole(each.shape) for each in wanted}
        read = dict(zip(stored, read_boxes([*stored.items()]), strict=True))

        def value(stored: _Whole) -> Tensor:
            if isinstance(stored, Tensor):
                return stored
            memory = read[stored]
            return retyped(memory, stored.element.dtype, 0, stored.shape, memory.stride())

        for name, tensor in zip(names, tensors, strict=True):
            found = value(_trained(tensor))
            if isinstance(tensor, _ScheduleFree):
                found = found.lerp(value(tensor.base), tensor.weight)
            yield _cast(name, found, self._types[name])


class Weights(Tensors):
    """The weights of a model in a checkpoint.

    Args:
        step: the checkpoint.
        kind: ``"model"``, ``"train"`` or ``"ema"``; see ``export_model``.
        key: of the component, where the checkpoint has several of the kind.
        dtype: see ``export_model``; None: as they are stored.

    Attributes:
        step: the checkpoint.
        record: the component.
        parts: the names of the parts of quantized tensors.
        others: the values of the state that are no tensors, by name.

    Raises:
        CheckpointError: damage, or an I/O error.
        StateMismatchError: there is no such model, or each rank has one of its own.
    """

    def __init__(
        self, step: StepReader, kind: str, key: str | None = None, dtype: str | None = None
    ) -> None:
        self.step, self.record = step, _record(step, kind, key)
        wanted = _types(step, self.record, dtype)
        plain, parts, self.others = _stored(step, self.record)
        if kind == EMA:
            model = _record(step, MODEL, self.record.key.replace(EMA, MODEL, 1))
            plain = _as_model(self.record.key, plain, [*_stored(step, model)[0]])
        elif kind == MODEL:
            plain |= _evaluated(step, self.record.key, plain)
        types = {name: _type_of(_dtype(each), wanted(name)) for name, each in plain.items()}
        self.parts = [*parts]
        super().__init__(plain | parts, types)


def batches_of(
    names: Iterable[str], sizes: Mapping[str, int], max_bytes: int
) -> Iterator[list[str]]:
    """Names in their order, in lists of at most so many bytes or of one name."""
    part: list[str] = []
    length = 0
    for name in names:
        if part and length + sizes[name] > max_bytes:
            yield part
            part, length = [], 0
        part.append(name)
        length += sizes[name]
    yield part


def _stored(
    step: StepReader, record: ComponentRecord
) -> tuple[dict[str, _Stored], dict[str, _Stored], dict[str, Any]]:
    """Plain tensors by name, parts of quantized ones, which stay as they are, and other values.

    Of two names of one tensor both have it.
    """
    stored = open_state(StoredSource.of_record(step, record), partial(merge_stored, record.key))
    state = stored.state if isinstance(stored.state, Mapping) else {}
    if record.key.partition("/")[0] == EMA:
        state = state.get("weights", state)
    plain: dict[str, _Stored] = {}
    parts: dict[str, _Stored] = {}
    others = {n: v for n, v in state.items() if not (isinstance(v, Tensor) or is_subclass(v))}
    for name, value in state.items():
        made_of = leaves_of(value, StatePath("").key(name)) if is_subclass(value) else ()
        for into, key, each in [(plain, name, value), *((parts, p.name, v) for p, v in made_of)]:
            if isinstance(each, Tensor) and element_type(each.dtype) is not None:
                into[key] = stored.tensors.get(id(each), each)
    return plain, parts, others


def _evaluated(
    step: StepReader, key: str, plain: Mapping[str, _Stored]
) -> dict[str, _ScheduleFree]:
    """The weights with which schedule-free optimizers evaluate, by the names of the model."""
    found: dict[int, _ScheduleFree] = {}
    for record in step.manifest.components:
        if record.key.partition("/")[0] != Slot.OPTIMIZER.value or not record.is_of_job:
            continue
        stored = open_state(StoredSource.of_record(step, record), partial(merge_stored, record.key))
        state = stored.state if isinstance(stored.state, Mapping) else {}
        for group in state.get("param_groups", ()):
            momentum = group.get("betas", [group.get("momentum")])[0]
            for name in group["params"] if group.get("train_mode") is True else ():
                trained = plain.get(name, plain.get(name.removeprefix(f"{key.partition('/')[2]}.")))
                base = stored.tensors.get(id(state["state"].get(name, {}).get("z")))
                if base is not None and isinstance(trained, StoredTensor):
                    found[id(trained)] = _ScheduleFree(trained, base, 1 - 1 / momentum)
    return {name: found[id(each)] for name, each in plain.items() if id(each) in found}


def _as_model(key: str, average: Mapping[str, _Stored], names: Sequence[str]) -> dict[str, _Stored]:
    """The averaged weights under the names of the model, which most averages have in ``module``."""
    begin = "module." if any(f"module.{name}" in average for name in names) else ""
    missing = [name for name in names if begin + name not in average]
    if missing:
        raise StateMismatchError(
            key,
            found=f"no average of {missing[0]}",
            expected="the names of the model, alone or after module.",
        )
    return {name: average[begin + name] for name in names}


def _types(step: StepReader, record: ComponentRecord, dtype: str | None) -> _TypeOf:
    """The type that a tensor of a name is to have; None for its own."""
    if dtype is None:
        return lambda name: None
    if dtype != AS_TRAINED:
        return lambda name: _TYPES[dtype]
    described: Any = step.manifest.fingerprint.get(record.key)
    described = described if isinstance(described, Mapping) else {}
    lower = _TYPES.get(str(described.get(TRAINED_IN)))
    in_fp32 = frozenset(map(str, described.get(IN_FP32, ())))
    return lambda name: None if name in in_fp32 else lower


def _trained(stored: _Stored) -> _Whole:
    return stored.trained if isinstance(stored, _ScheduleFree) else stored


def _dtype(stored: _Stored) -> torch.dtype:
    stored = _trained(stored)
    return stored.dtype if isinstance(stored, Tensor) else stored.element.dtype


def _type_of(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    rounds = wanted in _LOW_PRECISION and stored in _FLOATS
    widens = wanted is torch.float32 and stored in _LOW_PRECISION
    return wanted if wanted is not None and (rounds or widens) else stored


def _cast(name: str, value: Tensor, wanted: torch.dtype) -> Tensor:
    if value.dtype == wanted:
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


def _record(step: StepReader, kind: str, key: str | None) -> ComponentRecord:
    averages = (each for each in step.manifest.components if each.key.partition("/")[0] == EMA)
    found = [e for e in averages if e.is_of_job] if kind == EMA else step.manifest.models
    records = {record.key: record for record in found}
    wanted = (EMA if kind == EMA else MODEL) if key is None else key
    names = ", ".join(sorted(records)) or f"no {kind}"
    if wanted not in records:
        raise StateMismatchError(
            str(step.name),
            found=f"no {wanted} to export (it has {names})",
            expected=f"the key of one of kind {kind}",
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
