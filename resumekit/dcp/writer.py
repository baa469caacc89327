"""Writes steps of a run directory for ``torch.distributed.checkpoint.save``.

What torch calls on which rank, and what happens then:

1. all ranks plan; the first one takes the directory over and makes the staging directory,
2. each rank writes a data file with its parts and with what its objects have of tensors; an error
   of a rank goes to the first one as its result,
3. the first rank writes the common index, commits, deletes old steps and releases the directory;
   or it removes the staging directory and raises the error.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import staging as torch_staging
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from resumekit.dcp.keys import DCP, FLATTENED, is_path_of
from resumekit.distributed import as_error, from_rank
from resumekit.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    LoopError,
    RankDisagreementError,
    ResumekitError,
    SaveError,
    UnsupportedValueError,
)
from resumekit.log import warn
from resumekit.serialization.encoding import Encoder
from resumekit.serialization.index import Index, index_name
from resumekit.serialization.leaves import ElementType, Leaf
from resumekit.serialization.sharding import Box, Layout, Logical, part_name
from resumekit.serialization.tensors import FoundTensor, StatePath, UniqueNames
from resumekit.serialization.writing import Payload
from resumekit.state import Fidelity, SharingPattern
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store


class StorageWriter(torch_staging.BlockingAsyncStager, storage.StorageWriter):
    """Writes checkpoints of a run directory for ``torch.distributed.checkpoint.save``.

    A step is committed by one rename when all ranks have written and synced their files; until then
    nothing of it counts, and an existing step is never replaced. A value that is no tensor is
    stored as JSON, never as a pickle: one of an unknown class fails the save on all ranks.

    During a save this process owns the run directory, as a ``Checkpointer`` does during a run.

    Args:
        path: the run directory; created if it is missing.
        step: of the next save. By default the number at the end of ``checkpoint_id``.
        keep_latest: the number of newest checkpoints to keep; None keeps all.
        keep_every: checkpoints of multiples of it are kept for ever; None for none.
        process_group: that of ``dcp.async_save``, which needs one of its own where there are
            several ranks.

    Raises:
        ConfigurationError: a number out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep_latest: int | None = 2,
        keep_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if step is not None and (type(step) is not int or step < 0):
            raise ConfigurationError("step", found=repr(step), expected="an integer of at least 0")
        self._retention = RetentionPolicy(keep_latest=keep_latest, keep_every=keep_every)
        self._store = Store(Path(path))
        self._given_step = step
        self._group = process_group
        self._named = threading.local()  # by the thread that saves
        self._save: tuple[Staging, threading.Thread] | None = None  # on the first rank

    def __reduce__(self) -> tuple[Any, ...]:
        # To the process of AsyncCheckpointerType.PROCESS, whose default group is for saves alone.
        kept: dict[str, Any] = {
            "keep_latest": self._retention.keep_latest,
            "keep_every": self._retention.keep_every,
        }
        return partial(type(self), self._store.directory, step=self._given_step, **kept), ()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it ends in a number."""
        return _number_at_the_end(os.fspath(checkpoint_id)) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Writes the step of this number next, if one is given."""
        self._require_group_of_thread()
        self._named.checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy of the state in host memory, for ``dcp.async_save``.

        Raises:
            ConfigurationError: the save would use the default process group.
        """
        self._require_group()
        if not hasattr(torch_staging, "DefaultStager"):  # an older torch
            return super().stage(state_dict)
        options = torch_staging.StagingOptions(False, False, False, False)  # as async_save's own
        stager = torch_staging.DefaultStager(options)
        try:
            return stager.stage(state_dict)
        finally:
            stager.close()

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Raises ConfigurationError for what this storage cannot do."""
        self._require_group_of_thread()
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(
                "use_collectives=False",
                found="no rank would know when all files of a step are complete",
                remedy="Leave use_collectives out",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Notes the step that this rank saves."""
        if not getattr(plan, "usable", True):
            raise ConfigurationError(
                "enable_plan_caching=True",
                found="the planner repeats the plan of another step",
                remedy="Make the planner without enable_plan_caching",
            )
        return replace(plan, storage_data=self._step())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Takes the directory over, and makes a staging directory. First rank only.

        Raises:
            DirectoryError: another job uses the directory, or it cannot be used.
            LoopError: the last ``async_save`` is not over.
            RankDisagreementError: the ranks save different steps.
            SaveError: the step exists, or there is no room.
        """
        noted = [plan.storage_data for plan in plans]
        # A planner that makes new plans loses what was noted.
        steps = [self._step() if step is None else step for step in noted]
        if len(set(steps)) > 1:
            raise RankDisagreementError(
                "checkpoint_id", found=f"the ranks save the steps {steps[:8]}", expected="one step"
            )
        self._end_save()  # one that failed in torch or in the planner
        store, name = self._store, StepName(steps[0])
        store.acquire()
        try:
            if name.step in {each.step for each in store.step_names()}:
                raise SaveError(
                    str(store.directory / str(name)),
                    found="is there already",
                    expected="a new step",
                    remedy="Save under another number; no checkpoint is replaced",
                )
            staging = store.stage(
                name,
                num_bytes=sum(_num_bytes(item) for plan in plans for item in plan.items),
                num_files=2 * len(plans) + 1,
                directories=[DCP],
            )
        except BaseException:
            store.release()
            raise
        self._save = staging, threading.current_thread()
        return [replace(plan, storage_data=(staging.name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes what this rank has; its result is what it wrote, or the error that it had."""
        staging_name, rank = plan.storage_data
        written: _Written | ResumekitError
        try:
            content = _Content.of_plan(plan, planner)
            written = content.write(self._store.attach(staging_name), rank)
        except Exception as error:  # noqa: BLE001 - the first rank has to know, to clean up
            written = from_rank(rank, as_error(rank, error))
        done: Future[list[WriteResult]] = Future()
        num_bytes = sum(file.size for file in getattr(written, "files", ()))
        done.set_result([WriteResult(MetadataIndex(""), num_bytes, written)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the step, and deletes old ones. First rank only.

        Raises:
            ResumekitError: the first error that a rank had; nothing is committed.
            UnsupportedValueError: the ranks do not hold all of a tensor.
            SaveError: the commit failed.
        """
        assert self._save is not None
        store, (staging, _) = self._store, self._save
        try:
            written = [each.storage_data for (each,) in results]
            for each in written:
                if isinstance(each, ResumekitError):
                    raise each
            small_files = {index_name(0, is_in_stages=False): _index_of(written)}
            with staging.writing():
                files = Payload(DCP, 0, small_files=small_files).write(staging)
            files += [file for each in written for file in each.files]
            store.commit(staging, _manifest(store, staging, files, metadata, len(written)))
        except BaseException:
            self._end_save()
            raise
        self._save = None
        try:
            store.retain(self._retention)
            store.empty_trash()
        except SaveError as error:
            warn("RK-842", "old checkpoints could not be removed: %s", error)
        finally:
            store.release()

    def _end_save(self) -> None:
        """Removes what a save that has failed has written, and releases the directory."""
        if self._save is None:
            return
        staging, thread = self._save
        is_background = thread not in (threading.main_thread(), threading.current_thread())
        if is_background and thread.is_alive():
            raise LoopError(
                str(self._store.directory),
                found=f"{staging.step} is still being saved in the background",
                remedy="Wait for the future of async_save before the next save",
            )
        self._save = None
        self._store.abandon(staging)
        self._store.release()

    def _step(self) -> int:
        given, name = self._given_step, getattr(self._named, "checkpoint_id", None)
        number = given if name is None else _number_at_the_end(name)
        if number is None or given not in (None, number):
            raise ConfigurationError(
                "checkpoint_id" if given is None or name is not None else "step",
                found=f"{name!r} with step={given}",
                expected="a name that ends in the number of the step",
                remedy='Pass checkpoint_id=f"step-{step}", or StorageWriter(path, step=step)',
            )
        return number

    def _require_group_of_thread(self) -> None:
        # async_save with another stager; its process has nothing but the main thread.
        if threading.current_thread() is not threading.main_thread():
            self._require_group()

    def _require_group(self) -> None:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        if self._group in (None, dist.group.WORLD):
            raise ConfigurationError(
                "async_save",
                found="the default process group, which training uses at the same time",
                expected="a process group of its own",
                remedy='Pass process_group=dist.new_group(backend="gloo") to async_save and to '
                "StorageWriter",
            )


def _number_at_the_end(name: str) -> int | None:
    found = re.search(r"(?<![0-9])([0-9]{1,18})/?$", name)
    return int(found[1]) if found else None


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


# ---------------------------------------------------------------- what one rank writes

_Kind = tuple[ElementType, tuple[int, ...]]  # the type and the whole shape of a tensor


@dataclass(frozen=True)
class _Written:
    """What one rank has written; sent to the first one.

    Args:
        files: its files.
        parts: of each tensor its kind, and the boxes that this rank wrote, in order.
        objects: the tree of each value that is no tensor.
        tensors: what these refer to, by name.
        ties: see ``Index``.
    """

    files: tuple[FileEntry, ...]
    parts: Mapping[str, tuple[_Kind, list[Box]]]
    objects: Mapping[str, Any]
    tensors: Mapping[str, _Kind]
    ties: Mapping[str, str]


@dataclass(frozen=True)
class _Content:
    """What one rank is to write.

    Args:
        leaves: of its data file.
        written: but for the files.
    """

    leaves: Mapping[str, Leaf]
    written: _Written

    @classmethod
    def of_plan(cls, plan: SavePlan, planner: SavePlanner) -> _Content:
        """Asks a planner for what a plan lists.

        Raises:
            UnsupportedValueError: a value cannot be stored; names its key.
        """
        if not isinstance(planner, DefaultSavePlanner):
            raise ConfigurationError(
                "planner",
                found=type(planner).__qualname__,
                expected="a DefaultSavePlanner, which has lookup_object",
            )
        objects: dict[str, Any] = {}
        found: dict[str, tuple[_Kind, dict[Box, Leaf]]] = {}
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            if UniqueNames("__metadata__").take(key) != key or key.startswith("$"):
                raise UnsupportedValueError(key, found="a key that the format cannot store")
            if data is None:
                objects[key] = planner.lookup_object(item.index)
                continue
            leaf = _leaf(key, planner.resolve_data(item), tuple(data.chunk.sizes))
            _, parts = found.setdefault(key, ((leaf.element, tuple(data.size)), {}))
            if 0 not in leaf.shape:
                parts[Box(tuple(data.chunk.offsets), leaf.shape)] = leaf
        encoder = Encoder()
        trees = encoder.encode(objects, where=DCP)
        stored = encoder.finish()
        leaves = dict(stored.leaves)
        boxes = {key: (kind, sorted(parts, key=_offsets)) for key, (kind, parts) in found.items()}
        for key, (_, ordered) in boxes.items():
            for number, box in enumerate(ordered):
                name, leaf = part_name(key, number), found[key][1][box]
                if leaves.setdefault(name, leaf) is not leaf:
                    raise UnsupportedValueError(name, found="the name of two tensors")
        kinds = {name: (leaf.element, leaf.shape) for name, leaf in stored.leaves.items()}
        return cls(leaves, _Written((), boxes, trees, kinds, stored.ties))

    def write(self, staging: Staging, rank: int) -> _Written:
        """Writes the data file and its index, durable once this returns."""
        with staging.writing():
            files = Payload(DCP, rank, self.leaves, ties=self.written.ties).write(staging)
        return replace(self.written, files=tuple(files))


def _leaf(key: str, tensor: Any, shape: tuple[int, ...]) -> Leaf:
    leaf = FoundTensor(tensor.detach(), StatePath(key), key).leaf()
    if leaf.shape != shape:
        raise UnsupportedValueError(
            key, found=f"a tensor of shape {leaf.shape}", expected=f"{shape}, as the plan says"
        )
    return leaf


def _offsets(box: Box) -> tuple[int, ...]:
    return box.offsets


# ---------------------------------------------------------------- what the first rank adds


def _index_of(written: Sequence[_Written]) -> bytes:
    """The common index of what the ranks have written.

    Raises:
        RankDisagreementError: a tensor has two types or shapes.
        UnsupportedValueError: a reader would refuse it: it is too large, or the parts of a tensor
            overlap, or some are missing.
    """
    tree: dict[str, Any] = {}
    tensors: dict[str, Logical] = {}
    kinds: dict[str, _Kind] = {}
    rows: dict[str, list[tuple[int, Box]]] = {}
    for rank, each in enumerate(written):
        for key, (kind, boxes) in each.parts.items():
            if kinds.setdefault(key, kind) != kind:
                raise RankDisagreementError(
                    f"rank {rank}: {key}",
                    found=f"a tensor of {kind[0].name} {kind[1]}",
                    expected=f"{kinds[key][0].name} {kinds[key][1]}, as other ranks have",
                )
            rows.setdefault(key, []).extend((rank, box) for box in boxes)
        tree |= each.objects
        for name, (element, shape) in each.tensors.items():
            if name in tensors:
                raise UnsupportedValueError(name, found="the name of two tensors")
            tensors[name] = Logical.of_one_writer(element, shape, rank)
    for key, (element, shape) in kinds.items():
        if key in tensors:
            raise UnsupportedValueError(key, found="the name of two tensors")
        tree[key] = {"$tensor": key}
        chunks = Layout.of_chunks(sorted(rows[key], key=lambda row: row[1].offsets))
        tensors[key] = Logical(element, shape, chunks)
    ties = {name: other for each in written for name, other in each.ties.items()}
    data = Index({DCP: tree}, ties=ties, tensors=tensors, is_common=True).to_bytes()
    try:
        Index.from_bytes(data, where=DCP, is_common=True)
    except CorruptCheckpointError as error:
        raise UnsupportedValueError(
            DCP,
            found=error.found,
            expected=error.expected,
            remedy="Save on all ranks that hold a part, without no_dist=True",
        ) from error
    return data


def _manifest(
    store: Store, staging: Staging, files: Sequence[FileEntry], metadata: Metadata, num_ranks: int
) -> Manifest:
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    flattened = {key: list(path) for key, path in paths.items() if is_path_of(key, path)}
    record = ComponentRecord(
        key=DCP,
        pattern=SharingPattern.SHARDED.value,
        fidelity=Fidelity.EXACT.value,
        reason="",
        directory=DCP,
        writers=tuple(range(num_ranks)),
    )
    return Manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        step=staging.step.step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=num_ranks,
        progress={"step": staging.step.step},
        components=(record,),
        files=tuple(files),
        details={DCP: {FLATTENED: flattened}},
    )
