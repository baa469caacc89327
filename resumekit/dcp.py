"""Checkpoints of resumekit for programs that use ``torch.distributed.checkpoint``.

::

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(...)}
    dcp.load(state, storage_reader=StorageReader("runs/a"))

Any step that any adapter wrote loads into any layout, with the planner of the caller.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from resumekit.capture.nested_state import merge_stored
from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NoUsableCheckpointError,
    ResumekitError,
    StateMismatchError,
)
from resumekit.log import logger
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.leaves import retyped
from resumekit.serialization.reading import StoredSource, StoredTensor, open_state, read_boxes
from resumekit.serialization.sharding import Box, Layout
from resumekit.state import Slot, check_schema
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import StepReader
from resumekit.storage.store import Store

__all__ = ["StorageReader"]

_NUM_NAMED = 3

_Path = tuple[Any, ...]  # of strings and integers
_Part = tuple[StoredTensor, Box]  # a box of a stored tensor
_Boxes = dict[tuple[str, MetadataIndex], Box]  # by key and local tensor, the box that it takes


class StorageReader(storage.StorageReader):
    """Reads a checkpoint of resumekit for ``torch.distributed.checkpoint.load``.

    The keys are those of ``get_state_dict`` and its like after the name of the component:
    ``model.<FQN>``, ``optimizer.state.<FQN>.exp_avg``, ``optimizer.param_groups.0.lr``. A named
    component, ``model/generator``, is nested: ``model.generator.<FQN>``.

    A load changes no tensor on any rank before every rank has read the blocks that it needs into
    host memory and verified them. No unpickler gets bytes of the storage: a value that is no tensor
    is decoded from JSON, and what a planner unpickles is the pickle that this process has made of
    it. Keys that a planner does not ask for are logged; only the planner knows of keys that the
    checkpoint lacks.

    Args:
        path: a step directory, or a run directory. The first rank of ``process_group`` chooses the
            newest checkpoint of a run directory that can be opened, for all ranks.
        prefixes: for a component, what its keys begin with instead of its name. ``{"model": ""}``
            is for the bare state dict of a model, ``{"model": "app.model"}`` for one that is in
            ``{"app": {"model": ...}}``.
        process_group: that of ``dcp.load``, by default the default one. Needed for run directories
            only.

    Attributes:
        step_directory: the checkpoint that the last load has read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefixes: Mapping[str, str] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.step_directory: Path | None = None
        self._path = Path(path)
        self._prefixes = dict(prefixes or {})
        self._group = process_group
        self._values: dict[str, _Value] = {}
        self._read: dict[_Part, Tensor] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a directory."""
        return Path(checkpoint_id).is_dir()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reads another directory from now on, if one is given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The keys of the checkpoint, with the types, shapes and parts of its tensors.

        Collective where the path is that of a run directory and there is a process group.

        Returns:
            The metadata. That of a checkpoint which cannot be read raises the error when it is
            used: torch 2.13 state_dict_loader.py, local_step, hides what is raised here.
        """
        self._values, self._read = {}, {}
        try:
            step = self._open()
            for value in _values_in(step, self._prefixes):
                other = self._values.setdefault(value.key, value)
                if other is not value and value.alias_of is None:
                    raise StateMismatchError(
                        f"{step.name}: {value.key}",
                        found=f"a key of both {other.component} and {value.component}",
                        expected="one value under one key",
                    )
        except ResumekitError as error:
            return _Unreadable(error)
        self.step_directory = step.path
        chunks: dict[int, list[ChunkStorageMetadata]] = {}  # most tensors share those of others
        return Metadata(
            {key: value.metadata(chunks) for key, value in self._values.items()},
            planner_data={key: value.path for key, value in self._values.items()},
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Raises the error of ``read_metadata``, if there was one."""
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Reads what this rank needs into host memory, and verifies it.

        Raises:
            CheckpointError: damage, or an I/O error.
            StateMismatchError: the plan has a key that the checkpoint lacks, or leaves elements of
                a tensor out.
        """
        self._fetch(plan)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Logs in one line which keys of the checkpoint no rank loads."""
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        asked = {self._values[key].alias_of or key for key in asked & self._values.keys()}
        components: dict[str, list[_Value]] = {}
        for value in self._values.values():
            if value.is_counted:
                components.setdefault(value.component, []).append(value)
        left: list[str] = []
        unused: list[str] = []
        for component, values in components.items():
            unasked = [value.key for value in values if value.key not in asked]
            if len(unasked) == len(values):
                unused.append(component)
            else:
                left += unasked
        name = self.step_directory and self.step_directory.name
        if left:
            more = f" and {len(left) - _NUM_NAMED} more" if len(left) > _NUM_NAMED else ""
            logger.warning("%s: not loaded: %s%s", name, ", ".join(left[:_NUM_NAMED]), more)
        if unused:
            logger.info("%s: components that are not loaded: %s", name, ", ".join(unused))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what has been read to where the planner says; nothing is read any more.

        Raises:
            StateMismatchError: a tensor of this rank has another dtype or shape than the stored
                one; none of them has changed.
        """
        boxes = self._fetch(plan)  # nothing, unless the planner has changed the plan
        tensors = []
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                source, target = self._source(item, boxes), planner.resolve_tensor(item).detach()
                if (source.dtype, source.shape) != (target.dtype, target.shape):
                    raise StateMismatchError(
                        item.dest_index.fqn,
                        found=f"{source.dtype} {tuple(source.shape)} in the checkpoint",
                        expected=f"{target.dtype} {tuple(target.shape)}",
                    )
                tensors.append((item, source, target))
        for item, source, target in tensors:
            target.copy_(source)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickled(item))
        self._read = {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> StepReader:
        """The checkpoint to read, the same on all ranks."""
        directory = self._path.resolve()
        name = StepName.parse(directory.name)
        if name is not None:
            return Store(directory.parent).open_step(name)
        if not (dist.is_available() and dist.is_initialized()):
            return _newest(directory)
        chosen: list[Any] = [None]
        if dist.get_rank(self._group) == 0:
            try:
                chosen = [_newest(directory).name]
            except ResumekitError as error:
                chosen = [error]
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(chosen, src=first, group=self._group)
        if isinstance(chosen[0], ResumekitError):
            raise chosen[0]
        return Store(directory).open_step(chosen[0])

    def _value(self, item: ReadItem) -> _Value:
        key = item.storage_index.fqn
        value = self._values.get(key)
        if value is None:
            raise StateMismatchError(key, found="not in the checkpoint")
        if value.is_tensor != (item.type is LoadItemType.TENSOR):
            kind = "a tensor" if value.is_tensor else "a value that is no tensor"
            raise StateMismatchError(key, found=f"{kind} in the checkpoint, but not in the plan")
        return value

    def _fetch(self, plan: LoadPlan) -> _Boxes:
        """Reads all that a plan needs and that has not been read, each file as few times as can be.

        Returns:
            What each local tensor takes of the stored one.
        """
        parts: dict[tuple[str, MetadataIndex], list[Box]] = {}
        wanted: list[_Part] = []
        for item in plan.items:
            value = self._value(item)
            if value.is_tensor:
                parts.setdefault((value.key, item.dest_index), []).append(_box(item))
            wanted += [(each, Box.whole(each.shape)) for each in value.inside.values()]
        boxes = {}
        for (key, index), found in parts.items():
            content = self._values[key].content
            boxes[key, index] = _tiled(key, found, content.shape)
            if isinstance(content, StoredTensor):
                wanted.append((content, boxes[key, index]))
        while True:  # one box of each tensor at a time
            batch = {part[0]: part for part in wanted if part not in self._read}
            if not batch:
                return boxes
            memories = read_boxes([*batch.values()])
            for part, memory in zip(batch.values(), memories, strict=True):
                dtype, shape = part[0].element.dtype, tuple(memory.shape)
                self._read[part] = retyped(memory, dtype, 0, shape, memory.stride())

    def _source(self, item: ReadItem, boxes: _Boxes) -> Tensor:
        """The elements of an item that has been read."""
        content, box = self._value(item).content, _box(item)
        if isinstance(content, Tensor):
            return content[box.slices]
        whole = boxes[item.storage_index.fqn, item.dest_index]
        return self._read[content, whole][box.relative_to(whole).slices]

    def _pickled(self, item: ReadItem) -> io.BytesIO:
        """A value that this library has decoded, as a planner expects it."""
        value = self._value(item)
        read = {
            meta: self._read[tensor, Box.whole(tensor.shape)]
            for meta, tensor in value.inside.items()
        }
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(value.content, read), buffer)  # with the tensors that were read
        buffer.seek(0)
        return buffer


class _Unreadable(Metadata):
    """Raises the reason when anything asks for a key."""

    def __init__(self, error: ResumekitError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error if name == "state_dict_metadata" else AttributeError(name)


# ---------------------------------------------------------------- the boxes of a plan


def _box(item: ReadItem) -> Box:
    """What an item reads, in the coordinates of the whole tensor."""
    begins = zip(item.storage_index.offset or (), item.storage_offsets, strict=True)
    return Box(tuple(chunk + within for chunk, within in begins), tuple(item.lengths))


def _tiled(key: str, boxes: Sequence[Box], shape: Sequence[int]) -> Box:
    """The box that others tile.

    Raises:
        StateMismatchError: they leave a gap, overlap, or are not within the tensor.
    """
    begins = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    ends = map(max, zip(*([each.stop for each in box.slices] for box in boxes), strict=True))
    whole = Box(begins, tuple(e - b for b, e in zip(begins, ends, strict=True)))
    tiles = Layout.of_chunks([(0, box.relative_to(whole)) for box in boxes])
    if Box.whole(shape).intersection(whole) != whole or tiles.tiling_problem(whole.sizes):
        raise StateMismatchError(
            key,
            found=f"the plan reads {', '.join(map(str, boxes[:_NUM_NAMED]))}",
            expected=f"parts of {tuple(shape)} without a gap or an overlap, for each local tensor",
        )
    return whole


# ---------------------------------------------------------------- the keys of a checkpoint


@dataclass(frozen=True)
class _Value:
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


def _values_in(step: StepReader, prefixes: Mapping[str, str]) -> Iterator[_Value]:
    """What a checkpoint has for other programs: the state of which the job has one."""
    records = {
        record.key: record
        for record in step.manifest.components
        if record.is_of_job and record.key.partition("/")[0] in _SLOTS
    }
    for key in prefixes.keys() - records.keys():
        raise StateMismatchError(
            f"prefixes[{key!r}]",
            found=f"no such component in {step.name}",
            expected=f"one of {', '.join(records)}",
        )
    for key, record in records.items():
        stored = open_state(StoredSource.of_record(step, record), partial(merge_stored, key))
        prefix = prefixes.get(key, key.replace("/", "."))
        above = tuple(prefix.split(".")) if prefix else ()
        content, groups = _content(key, stored.state)
        found = []
        for path, leaf in _flat(content):
            value = _Value(key, (*above, *path), stored.tensors.get(id(leaf), leaf))
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
    return state.get(_SLOTS[slot], state), []


def _flat_names(values: Sequence[_Value], above: _Path, groups: Any) -> Iterator[_Value]:
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
        isinstance(each, Mapping | Tensor) or (isinstance(each, list) and _is_traversed(each))
        for each in value
    )


# ---------------------------------------------------------------- the checkpoint of a run


def _newest(directory: Path) -> StepReader:
    """The newest checkpoint that can be opened.

    Raises:
        CheckpointNotFoundError: there is none.
        DirectoryError: the directory cannot be read.
        NoUsableCheckpointError: there are some, and none can be opened.
    """
    store, rejected = Store(directory), list[str]()
    for name in store.step_names():
        try:
            step = store.open_step(name)
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            for reason in rejected:
                logger.warning("passed over: %s", reason)
            return step
    if rejected:
        raise NoUsableCheckpointError(str(directory), found="; ".join(rejected))
    raise CheckpointNotFoundError(str(directory), found="no checkpoint")
