"""A real store without the waiting, a way to forge checkpoints in it, and a strict comparison."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.serialization.leaves import buffers_of
from resumekit.serialization.planning import Assignment, LocalState, Proposal, assign
from resumekit.serialization.reading import read_payload
from resumekit.serialization.writing import Payload
from resumekit.storage.commit import Staging
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import Manifest, StepReader
from resumekit.storage.store import Store

Write = Callable[[Staging], list[FileEntry]]


class UnsyncedFileSystem(LocalFileSystem):
    """The local file system without its waiting for the disk: power cuts are tested elsewhere."""

    def fsync(self, handle: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


class Checkpoints:
    """Checkpoints of a run of their own, one step after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps = itertools.count(1)

    def commit(self, write: Write) -> StepReader:
        """The checkpoint with the files that ``write`` puts into staging."""
        step = next(self._steps)
        store = self._store
        staging = store.stage(
            store.next_name(step), num_bytes=0, num_files=2, directories=["state"]
        )
        files = write(staging)
        manifest = Manifest(
            run_id=store.run_id,
            attempt=store.attempt,
            step=step,
            created="2024-01-01T00:00:00+00:00",
            world_size=4,
            progress={},
            components=(),
            files=tuple(files),
        )
        store.commit(staging, manifest)
        return store.open_step(staging.step)

    def save(self, states: Mapping[str, Any]) -> StepReader:
        """The checkpoint with these states of rank 0."""
        return self.commit(Payload.of_states("state", 0, states).write)

    def forge(self, index: bytes, data: bytes | None = None) -> StepReader:
        """A checkpoint whose digests are right, whatever its files say."""

        def write(staging: Staging) -> list[FileEntry]:
            files = [_file(staging, "state/rank-00000.json", index)]
            if data is not None:
                files.append(_file(staging, "state/rank-00000.safetensors", data))
            return files

        return self.commit(write)

    def round_trip(self, value: Any) -> Any:
        """The value after a save and a load."""
        return read_payload(self.save({"value": value}), "state", 0)["value"]


def _file(staging: Staging, path: str, content: bytes) -> FileEntry:
    with staging.create(path, writer=0) as writer:
        writer.write([memoryview(content)])
        return writer.finish()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    store = Store(tmp_path / "run", file_system=UnsyncedFileSystem())
    store.acquire()
    yield Checkpoints(store)
    store.release()


def _same(found: Any, expected: Any) -> bool:
    """Whether two values are equal and of the same type, bit for bit, in the same order."""
    if isinstance(expected, tuple) and hasattr(expected, "_fields"):
        alike = type(found).__name__ == type(expected).__name__
        return alike and found._fields == expected._fields and _same(tuple(found), tuple(expected))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return (found.dtype, found.shape) == (expected.dtype, expected.shape) and (
            tensor_bytes(found) == tensor_bytes(expected)
        )
    if isinstance(expected, np.ndarray | np.generic):
        return (found.dtype, found.shape) == (expected.dtype, expected.shape) and (
            found.tobytes() == expected.tobytes()
        )
    if isinstance(expected, float):
        if math.isnan(expected):
            return math.isnan(found)
        return struct.pack("d", found) == struct.pack("d", expected)
    if isinstance(expected, complex):
        return _same(found.real, expected.real) and _same(found.imag, expected.imag)
    if isinstance(expected, dict):
        pairs = zip(found.items(), expected.items(), strict=False)
        return (
            len(found) == len(expected)
            and getattr(found, "default_factory", 0) == getattr(expected, "default_factory", 0)
            and all(_same(f, e) for f, e in pairs)
        )
    if isinstance(expected, list | tuple) or hasattr(expected, "maxlen"):
        return (
            len(found) == len(expected)
            and getattr(found, "maxlen", 0) == getattr(expected, "maxlen", 0)
            and all(map(_same, found, expected))
        )
    if isinstance(expected, set):
        return len(found) == len(expected) and all(
            any(_same(f, e) for f in found) for e in expected
        )
    return bool(found == expected)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return b"".join(buffers_of(tensor))


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    return _same


class Ranks:
    """Plays the ranks of a job, one at a time, in this process; nothing travels between them."""

    @staticmethod
    @contextmanager
    def rank(rank: int, num_ranks: int) -> Iterator[None]:
        """This process as one rank of a job."""
        # torch's own stand-in for a process group: its collectives do nothing.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group(
            "fake", rank=rank, world_size=num_ranks, store=FakeStore()
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()

    @staticmethod
    def assigned(local: Sequence[LocalState], proposals: Sequence[Proposal]) -> list[Assignment]:
        """What each rank is to write, as the first decides on the proposals."""
        plan = assign(local[0], proposals)
        return [
            Assignment.of(each, plan.choice, positions, None if rank else plan.tensors)
            for rank, (each, positions) in enumerate(zip(local, plan.positions, strict=True))
        ]

    @staticmethod
    def shard(whole: torch.Tensor, mesh: tuple[int, ...], *dimensions: int | None) -> Any:
        """The DTensor of this rank: for each mesh dimension, the dimension that it splits."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        placements = [Replicate() if each is None else Shard(each) for each in dimensions]
        device_mesh = init_device_mesh("cpu", mesh)
        return distribute_tensor(whole, device_mesh, placements, src_data_rank=None)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()
