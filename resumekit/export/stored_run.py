"""The states of a checkpoint as the ``state_dict`` of each object gave them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from resumekit.capture.global_rng import PYTHON_WORDS
from resumekit.capture.nested_state import merge_stored
from resumekit.capture.objects import ScalerState
from resumekit.capture.optimizer import OptimizerState, by_position
from resumekit.capture.scheduler import SchedulerState
from resumekit.capture.slots import OPTIMIZER_PARAMETERS
from resumekit.errors import StateMismatchError
from resumekit.export.formats import mapped
from resumekit.export.weights import MODEL, Tensors, Weights
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.reading import (
    StoredSource,
    StoredState,
    StoredTensor,
    open_state,
    read_payload,
)
from resumekit.serialization.tensors import StoredSubclass
from resumekit.state import Slot, check_schema
from resumekit.storage.manifest import ComponentRecord, StepReader


@dataclass(frozen=True)
class ExportOptions:
    """What was given for a format; None for what was not.

    Args:
        max_shard_bytes: of the tensors of one file of weights.
        ranks: how many continue.
        stage: of ZeRO.
    """

    max_shard_bytes: int | None = None
    ranks: int | None = None
    stage: int | None = None


class StoredRun:
    """The components of a checkpoint, and what of them an export has written.

    Args:
        step: the checkpoint.

    Attributes:
        notes: what a user has to know of the export, one line each.

    Raises:
        StateMismatchError: it has weights alone.
    """

    def __init__(self, step: StepReader) -> None:
        self.step = step
        self.notes: list[str] = []
        self._records = {record.key: record for record in step.manifest.components}
        if Slot.RNG.value not in self._records:
            raise StateMismatchError(
                str(step.name),
                found="no state but that of models",
                expected="a checkpoint that a run can resume from",
                remedy="Export it as safetensors",
            )
        self._written = {Slot.PROGRESS.value}  # each format has the counts in a form of its own

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def keys_of(self, slot: Slot) -> list[str]:
        """The components of a slot, in the order in which the framework has the objects."""
        found = (key for key in self._records if key.partition("/")[0] == slot.value)
        return [key for key in found if not key.endswith(f"/{OPTIMIZER_PARAMETERS}")]

    @property
    def models(self) -> list[str]:
        """The components of models; they count as written."""
        found = [record.key for record in self.step.manifest.models if record.is_of_job]
        keys = [key for key in found if key.rpartition("/")[0] not in found]  # no buckets of DDP
        self.mark(*keys)
        return keys or [Slot.MODEL.value]

    @property
    def progress(self) -> Mapping[str, int]:
        """The counts of the run."""
        return self.step.manifest.progress

    def mark(self, *keys: str) -> None:
        """These components need no file, or another one has what they have."""
        self._written.update(keys)

    def state(self, key: str, rank: int | None = None) -> Any:
        """A small state as it is stored, of one of the ranks that have one; None without it."""
        record = self._records.get(key)
        if record is None:
            return None
        self._written.add(key)
        writer = record.writers[0] if rank is None else rank
        return read_payload(self.step, record.directory, writer, [key])[key]

    def weights(self, key: str | None, dtype: str | None = None) -> Weights:
        """A model, in the type that it is stored in or in this one.

        Raises:
            StateMismatchError: there is no such model, or it has tensors made of others.
        """
        weights = Weights(self.step, MODEL, key, dtype)
        if weights.parts:
            raise StateMismatchError(
                f"{self.step.name}: {weights.record.key}",
                found=f"{weights.parts[0]}, a part of a tensor made of others",
                expected="weights that other programs can have",
                remedy="Export it as safetensors",
            )
        lines = (f"{weights.record.key}: {n}: no tensor, left out" for n in weights.others)
        self.notes += [line for line in lines if line not in self.notes]
        return weights

    def only_model(self, dtype: str | None = None) -> Weights:
        """The model of a run that has one."""
        keys = self.models
        return self.weights(keys[0] if len(keys) == 1 else None, dtype)

    def only(self, slot: Slot) -> str | None:
        """The component of a slot, where the format has one file.

        Raises:
            StateMismatchError: there are several.
        """
        keys = self.keys_of(slot)
        if len(keys) > 1:
            raise StateMismatchError(
                str(self.step.name), found=", ".join(keys), expected=f"one {slot.value}"
            )
        return keys[0] if keys else None

    @contextmanager
    def objects(
        self, path: Path, keys: Iterable[str], *, by_name: bool = False
    ) -> Iterator[dict[str, Any]]:
        """What ``state_dict`` gave, by component; tensors are mapped from a file of this name.

        Of what each rank has of its own, the first one's. With ``by_name`` optimizers have the
        names of their parameters in place of positions.

        Raises:
            CheckpointError: damage, or an I/O error.
            StateMismatchError: a state that has another form in a checkpoint than in memory.
        """
        stored = {key: _open(self.step, self._records[key]) for key in keys}
        given = {key: _as_given(key, each.state, by_name) for key, each in stored.items()}
        tensors: dict[int, StoredTensor] = {}
        for key, each in stored.items():
            tensors |= {
                id(leaf): each.tensors[id(leaf)]
                for _, leaf in leaves_of(given[key])
                if id(leaf) in each.tensors
            }
        self._written.update(stored)
        with mapped(path, Tensors({str(each): found for each, found in tensors.items()})) as memory:
            yield {
                key: copy.deepcopy(each, {identity: memory[str(identity)] for identity in tensors})
                for key, each in given.items()
            }

    def rng(self, rank: int) -> dict[str, Any]:
        """The RNG state of a rank as Python, NumPy and torch give it, and its devices'."""
        state = self.state(Slot.RNG.value, rank)
        python, numpy = state["python"], state["numpy"]
        kind, _, current = state.get("current_device", "cuda:0").partition(":")
        return {
            "python": (
                python["version"],
                PYTHON_WORDS.unpack(python["words"]),
                python["gauss_next"],
            ),
            "numpy": (
                numpy["bit_generator"],
                numpy["state"]["key"],
                numpy["state"]["pos"],
                numpy["has_gauss"],
                numpy["gauss"],
            ),
            "torch": state["torch"],
            "devices": {kind: state[kind]} if state[kind] else {},
            "current": int(current),
        }

    def left_out(self) -> Iterator[str]:
        """The components with content that were not written."""
        for key, record in self._records.items():
            if key not in self._written and not _is_empty(_open(self.step, record).state):
                yield key


def _open(step: StepReader, record: ComponentRecord) -> StoredState:
    return open_state(StoredSource.of_record(step, record), partial(merge_stored, record.key))


def _optimizer(state: Mapping[str, Any]) -> Any:
    """In the layout of ``torch.optim.Optimizer.state_dict``: parameters by position."""
    if "opaque" in state:
        return state["opaque"]
    return by_position(state, [group["params"] for group in state["param_groups"]])


def _object(state: Mapping[str, Any]) -> Any:
    """Of an averaged model, a module or a user's object."""
    if "weights" not in state:
        return state.get("opaque", state)
    begin = "module." if state["counters"] else ""
    weights = {f"{begin}{name}": each for name, each in state["weights"].items()}
    return {**state["counters"], **weights}


# By slot: the type of the stored state, and the function that gives the object's own.
_GIVEN: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    Slot.OPTIMIZER.value: (OptimizerState.schema, _optimizer),
    Slot.LR_SCHEDULER.value: (SchedulerState.schema, itemgetter("state")),
    Slot.GRAD_SCALER.value: (ScalerState.schema, itemgetter("values")),
}


def _as_given(key: str, state: Any, by_name: bool) -> Any:
    schema, convert = _GIVEN.get(key.partition("/")[0], (dict[str, Any], _object))
    is_engines = isinstance(state, Mapping) and "files" in state
    if is_engines or _has_parts(state):
        raise StateMismatchError(
            key,
            found="partitions of DeepSpeed" if is_engines else "tensors made of others",
            expected="a state that other programs can have",
        )
    check_schema(key, schema, state)
    return state if by_name and convert is _optimizer else convert(state)


def _has_parts(state: Any) -> bool:
    """Whether a tensor in it is made of others: its class is known only by name."""
    if isinstance(state, Mapping):
        return any(map(_has_parts, state.values()))
    is_several = isinstance(state, Sequence) and not isinstance(state, (str, bytes))
    return isinstance(state, StoredSubclass) or (is_several and any(map(_has_parts, state)))


def _is_empty(state: Any) -> bool:
    """Whether a state has no content; of user state, whether training has changed nothing."""
    if isinstance(state, Mapping):
        values = [state["slots"]] if "holders" in state else state.values()
        return all(map(_is_empty, values))
    return isinstance(state, (list, tuple, str)) and not state
