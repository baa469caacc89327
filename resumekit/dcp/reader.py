"""Reads checkpoints of resumekit for ``torch.distributed.checkpoint.load``."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from resumekit.dcp.keys import StoredValue, values_in
from resumekit.errors import ResumekitError, StateMismatchError
from resumekit.log import logger, warn
from resumekit.serialization.leaves import retyped
from resumekit.serialization.reading import StoredTensor, read_boxes
from resumekit.serialization.sharding import Box, Layout
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import StepReader
from resumekit.storage.store import Store

_NUM_NAMED = 3

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
        self._values: dict[str, StoredValue] = {}
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
            for value in values_in(step, self._prefixes):
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
        components: dict[str, list[StoredValue]] = {}
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
            warn("RK-833", "%s: not loaded: %s%s", name, ", ".join(left[:_NUM_NAMED]), more)
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
            return self._newest(directory)
        chosen: list[Any] = [None]
        if dist.get_rank(self._group) == 0:
            try:
                chosen = [self._newest(directory).name]
            except ResumekitError as error:
                chosen = [error]
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(chosen, src=first, group=self._group)
        if isinstance(chosen[0], ResumekitError):
            raise chosen[0]
        return Store(directory).open_step(chosen[0])

    def _newest(self, directory: Path) -> StepReader:
        step, rejected = Store(directory).open_newest()
        for reason in rejected:
            warn("RK-833", "passed over: %s", reason)
        return step

    def _value(self, item: ReadItem) -> StoredValue:
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
