"""A run directory to save into, without torch and without faults."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from resumekit.errors import SaveError
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import FileSystem
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.ownership import PosixLock
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

MakeManifest = Callable[..., Manifest]
Save = Callable[..., StepName]
OpenStore = Callable[..., Store]


def _manifest(
    *,
    run_id: str = "a" * 32,
    attempt: str = "b" * 32,
    name: StepName = StepName(500),  # noqa: B008  (a frozen value)
    files: Sequence[FileEntry] = (),
    **changes: object,
) -> Manifest:
    record = ComponentRecord("rng", "per_rank", "exact", "", "state", (0,))
    fields: dict[str, object] = {
        "run_id": run_id,
        "attempt": attempt,
        "step": name.step,
        "revision": name.revision,
        "created": "2026-01-31T12:00:00+00:00",
        "world_size": 1,
        "progress": {"step": name.step, "epoch": 1},
        "components": (record,),
        "files": tuple(files),
        **changes,
    }
    return Manifest(**fields)  # type: ignore[arg-type]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A directory where a sync costs nothing, if there is one: thousands are made."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_manifest() -> MakeManifest:
    """A manifest that is right, with these fields changed."""
    return _manifest


@pytest.fixture
def save() -> Save:
    """One whole save of a small, recognisable state."""

    def save(
        store: Store,
        step: int,
        *,
        metric: float | None = None,
        policy: RetentionPolicy | None = None,
        content: bytes | None = None,
    ) -> StepName:
        name = store.next_name(step)
        staging = store.stage(name, num_bytes=64, num_files=2, directories=["model", "state"])
        entries = []
        try:
            for path in ("model/rank-00000.safetensors", "state/rank-00000.json"):
                with staging.create(path, writer=0) as writer:
                    writer.write([memoryview(content or f"{path} of {name}".encode())])
                    entries.append(writer.finish())
        except SaveError:
            store.abandon(staging)
            raise
        reported = None
        if metric is not None:
            reported = {"name": "loss", "mode": "min", "value": metric.hex()}
        manifest = _manifest(
            run_id=store.run_id, attempt=store.attempt, name=name, files=entries, metric=reported
        )
        store.commit(staging, manifest)
        if policy is not None:
            store.retain(policy)
            store.empty_trash()
        return name

    return save


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


@pytest.fixture
def open_store(run_directory: Path) -> OpenStore:
    """A store of the run directory that does not wait for other owners."""

    def open_store(
        directory: Path = run_directory, *, file_system: FileSystem | None = None
    ) -> Store:
        return Store(directory, file_system=file_system, lock=PosixLock(wait_seconds=0.0))

    return open_store


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    """An acquired store."""
    store = open_store()
    store.acquire()
    return store
