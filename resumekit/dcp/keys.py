"""The keys that programs of ``torch.distributed.checkpoint`` find in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from resumekit.capture.nested_state import merge_stored
from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import CorruptCheckpointError, StateMismatchError
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.reading import StoredSource, StoredTensor, open_state
from resumekit.serialization.sharding import Box
from resumekit.serialization.tensors import StoredSubclass
from resumekit.state import Slot, check_schema
from resumekit.storage.manifest import StepReader

_Path = tuple[Any, ...]  # of strings and integers


@dataclass(frozen=True)
class StoredValue:
    """What the checkpoint has under a key.

    Args:
        component: the key of its component.
        path: in a nested state dict.
        content: a StoredTensor, a tensor with its values, or anything else.
        inside: of anything else, the stored tensors in it, by the id of what stands for each.
        alias_of: the key with the same content, if this is another name for it.
    """

    component: str
    path: _Path
    content: Any
    inside: Mapping[int, StoredTensor] = field(default_factory=dict)
    alias_of: str | None = None

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.content, StoredTensor | Tensor)

    @property
    def is_counted(self) -> bool:
        """Whether it is missing from a state dict that does not have it."""
        is_empty = self.is_tensor and 0 in self.content.shape
        return not (self.alias_of or is_empty or self.path[-1] in _MEMBERSHIP)

    def metadata(self, chunks: dict[int, list[ChunkStorageMetadata]]) -> STORAGE_TYPES:
        """As DCP describes it; ``chunks`` are those of the layouts that are known, by id."""
        if not self.is_tensor:
            return BytesStorageMetadata()
        stored = isinstance(self.content, StoredTensor)
        shape = torch.Size(self.content.shape)
        layout = self.content.logical.chunks if stored else self.content
        if id(layout) not in chunks:
            boxes = [chunk.box for chunk in layout] if stored else [Box.whole(shape)]
            chunks[id(layout)] = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in boxes
            ]
        dtype = self.content.element.dtype if stored else self.content.dtype
        return TensorStorageMetadata(TensorProperties(dtype), shape, chunks[id(layout)])


# Which parameters a group has, and not how they are trained.
_MEMBERSHIP = ("params", "param_names")

_MAX_FLAT_NAMES = 1 << 18  # of an optimizer; a short file could have any number

# The slots that other programs have too, and the field of a state that they have of it.
_SLOTS = {
    Slot.MODEL.value: None,
    Slot.OPTIMIZER.value: "opaque",
    Slot.LR_SCHEDULER.value: "state",
    Slot.EMA.value: None,
    Slot.EXTRAS.value: "values",
}


# The one component of a step that ``StorageWriter`` wrote, and its entry in the manifest's details.
DCP = "dcp"
FLATTENED = "flattened"

_MAX_INDEX = 1 << 20  # of a list in a nested state dict; torch's planner makes one of that length


def values_in(step: StepReader, prefixes: Mapping[str, str]) -> Iterator[StoredValue]:
    """What a checkpoint has for other programs: the state of which the job has one."""
    records = {
        record.key: record
        for record in step.manifest.components
        if record.is_of_job and record.key.partition("/")[0] in (*_SLOTS, DCP)
    }
    for key in prefixes.keys() - records.keys():
        raise StateMismatchError(
            f"prefixes[{key!r}]",
            found=f"no such component in {step.name}",
            expected=f"one of {', '.join(records)}",
        )
    for key, record in records.items():
        stored = open_state(StoredSource.of_record(step, record), partial(merge_stored, key))
        prefix = prefixes.get(key, "" if key == DCP else key.replace("/", "."))
        above = tuple(prefix.split(".")) if prefix else ()
        content, groups = _content(key, stored.state)
        found = []
        for path, leaf in _flattened(step, content) if key == DCP else _flat(content):
            value = StoredValue(key, (*above, *path), stored.tensors.get(id(leaf), leaf))
            if not value.is_tensor:
                ids = [id(each) for _, each in leaves_of(leaf) if id(each) in stored.tensors]
                value = replace(value, inside={each: stored.tensors[each] for each in ids})
            found.append(value)
        yield from found
        if groups:  # last: a parameter may be called as a group is
            yield from islice(_flat_names(found, above, groups), _MAX_FLAT_NAMES)


def _content(key: str, state: Any) -> tuple[Mapping[str, Any], list[Any]]:
    """A state as other programs have it, and the param groups of an optimizer."""
    if not isinstance(state, Mapping):
        return {}, []
    slot = key.partition("/")[0]
    if slot == Slot.OPTIMIZER.value and "param_groups" in state:
        check_schema(key, OptimizerState.schema, state)
        groups = [{**group, "param_names": group["params"]} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}, groups
    return state.get(_SLOTS.get(slot), state), []


def _flattened(step: StepReader, state: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """The values of a program of DCP, each with its path before the program's planner flattened."""
    details = step.manifest.details.get(DCP)
    paths = details.get(FLATTENED) if isinstance(details, Mapping) else None
    for key, value in state.items():
        path = paths.get(key, [key]) if isinstance(paths, Mapping) else [key]
        if not is_path_of(key, path):
            raise CorruptCheckpointError(
                f"{step.name}: {key[:200]}",
                found=f"the path {str(path)[:80]}",
                expected="names and numbers that make up the key",
            )
        yield tuple(path), value


def is_path_of(key: str, path: Any) -> bool:
    """Whether this is the path of a value in nested state that torch's planner calls ``key``."""
    return (
        isinstance(path, list | tuple)
        and all(type(p) is str or (type(p) is int and 0 <= p < _MAX_INDEX) for p in path)
        and ".".join(map(str, path)) == key
    )


def _flat_names(values: Sequence[StoredValue], above: _Path, groups: Any) -> Iterator[StoredValue]:
    """The values of param groups once more, as ``flatten_optimizer_state_dict`` names them."""
    for value in values:
        kind, number, *rest = value.path[len(above) :]
        if kind == "param_groups" and rest[0] != "params":
            for fqn in groups[number]["params"]:
                name = ".".join(map(str, (kind, fqn, *rest)))
                yield replace(value, path=(*above, name), alias_of=value.key)


def _flat(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """The leaves of a state as DCP flattens it.

    Source: torch 2.13 distributed/checkpoint/_traverse.py, traverse_state_dict.
    """
    if isinstance(value, StoredSubclass):  # its parts: the class is not known here
        value = value.parts
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, (*path, str(key)))
    elif isinstance(value, list) and _is_traversed(value):
        for index, each in enumerate(value):
            yield from _flat(each, (*path, index))
    elif path:
        yield path, value


def _is_traversed(value: list[Any]) -> bool:
    return any(
        isinstance(each, Mapping | Tensor | StoredSubclass)
        or (isinstance(each, list) and _is_traversed(each))
        for each in value
    )
