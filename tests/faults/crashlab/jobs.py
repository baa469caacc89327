"""A training job on a disk in memory: it saves through the real store, crashes, and recovers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crashlab.disk import Disk
from crashlab.recording import Recording, RecordingFileSystem
from resumekit.errors import CheckpointError, CorruptCheckpointError, ResumekitError
from resumekit.storage import (
    FileEntry,
    FileSystem,
    Manifest,
    NoLock,
    RetentionPolicy,
    Staging,
    StepName,
    Store,
)

RUN = Path("/data/runs/a")
CREATED = "2026-01-31T12:00:00+00:00"
MODEL_BYTES = 6000  # more than a page, so that it can be torn at one

Wrap = Callable[[FileSystem], FileSystem]


def content_of(name: StepName, rank: int) -> dict[str, bytes]:
    """What one rank writes into a checkpoint: different for every name, rank and file."""
    sizes = {f"state/rank-{rank:05d}.json": 150, f"state/rank-{rank:05d}.safetensors": 300}
    if rank == 0:
        sizes["model/rank-00000.safetensors"] = MODEL_BYTES
    return {path: _bytes(f"{name} {path}", size) for path, size in sizes.items()}


def full_content(name: StepName, world_size: int) -> dict[str, bytes]:
    """What a whole checkpoint holds beside its manifest."""
    content: dict[str, bytes] = {}
    for rank in range(world_size):
        content |= content_of(name, rank)
    return content


def _bytes(seed: str, size: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(size)


@dataclass
class Promise:
    """What the job may count on once a number of operations has been recorded.

    Args:
        num_operations: the promise holds from here on.
        newest: the newest checkpoint whose save has returned.
        kept: every checkpoint that must still be usable, by name, with its content.
    """

    num_operations: int
    newest: StepName | None
    kept: dict[StepName, dict[str, bytes]]


@dataclass
class Job:
    """The ranks of one launch.

    Args:
        recording: the disk they share.
        world_size: how many ranks.
        policy: the retention policy.
        wrap: what stands between the store and the disk; a mutant's place.
        store_class: the store in use; a mutant's other place.
        barriers: whether ranks wait for each other before the commit.
    """

    recording: Recording
    world_size: int = 1
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    wrap: Wrap = lambda inner: inner
    store_class: type[Store] = Store
    barriers: bool = True
    promises: list[Promise] = field(default_factory=list)
    attempted: dict[StepName, dict[str, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stores = [
            self.store_class(
                RUN,
                file_system=self.wrap(RecordingFileSystem(self.recording, rank)),
                lock=NoLock(),
            )
            for rank in range(self.world_size)
        ]
        self._metrics: dict[StepName, float] = {}

    def start(self) -> None:
        """Takes the directory over."""
        owner = self.stores[0].acquire()
        self.recording.barrier()
        for store in self.stores[1:]:
            store.join(owner.run_id, owner.attempt, wait_seconds=0.0)

    def save(self, step: int, *, metric: float | None = None) -> StepName:
        """One whole save, as the Checkpointer makes it."""
        name, stagings = self.stage(step)
        return self.commit(name, stagings[0], self.write(name, stagings), metric=metric)

    def stage(self, step: int) -> tuple[StepName, list[Staging]]:
        """Makes the staging directory and lets all ranks see it."""
        first = self.stores[0]
        name = first.next_name(step)
        self.attempted[name] = full_content(name, self.world_size)
        staging = first.stage(
            name,
            num_bytes=sum(map(len, self.attempted[name].values())),
            num_files=len(self.attempted[name]),
            directories=["model", "optimizer", "state"],
        )
        self.recording.barrier()
        return name, [staging, *(store.attach(staging.name) for store in self.stores[1:])]

    def write(self, name: StepName, stagings: list[Staging]) -> list[FileEntry]:
        """Every rank writes its files; they do so at the same time."""
        entries = []
        for rank, staging in enumerate(stagings):
            for path, content in content_of(name, rank).items():
                half = len(content) // 2
                with staging.create(path, writer=rank) as writer:
                    writer.write([memoryview(content)[:half]])
                    writer.write([memoryview(content)[half:]])
                    entries.append(writer.finish())
        if self.barriers:
            self.recording.barrier()
        return entries

    def commit(
        self, name: StepName, staging: Staging, entries: list[FileEntry], *, metric: float | None
    ) -> StepName:
        """Commits, and then lets old checkpoints go."""
        first = self.stores[0]
        first.commit(staging, self._manifest(name, entries, metric))
        if metric is not None:
            self._metrics[name] = metric
        self._promise(name, {**self._kept(), name: self.attempted[name]})
        self._promise(name, self._kept_by_policy())
        first.retain(self.policy)
        self.recording.barrier()
        return name

    def continues(self, earlier: Job) -> None:
        """Takes over what an earlier launch in the same directory was promised."""
        self.attempted = dict(earlier.attempted)
        self._metrics = dict(earlier._metrics)
        if earlier.promises:
            self.promises = [Promise(0, earlier.promises[-1].newest, earlier._kept())]

    def _kept(self) -> dict[StepName, dict[str, bytes]]:
        return self.promises[-1].kept if self.promises else {}

    def _promise(self, newest: StepName, kept: dict[StepName, dict[str, bytes]]) -> None:
        self.promises.append(Promise(len(self.recording.operations), newest, kept))

    def _kept_by_policy(self) -> dict[StepName, dict[str, bytes]]:
        """The policy worked out again, from its documentation."""
        kept = self._kept()
        latest = {name.step: name for name in sorted(kept)}
        newest_first = [latest[step] for step in sorted(latest, reverse=True)]
        chosen = set(newest_first[: self.policy.keep_latest])
        measured = [name for name in newest_first if name in self._metrics]
        measured.sort(key=lambda name: (self._metrics[name], name))
        chosen |= set(measured[: self.policy.keep_best])
        return {name: content for name, content in kept.items() if name in chosen}

    def _manifest(self, name: StepName, entries: list[FileEntry], metric: float | None) -> Manifest:
        record = {"name": "loss", "mode": "min", "value": metric.hex()} if metric else None
        return Manifest(
            run_id=self.stores[0].run_id,
            attempt=self.stores[0].attempt,
            step=name.step,
            revision=name.revision,
            created=CREATED,
            world_size=self.world_size,
            progress={"step": name.step},
            metric=record,
            components=(),
            files=tuple(entries),
        )


@dataclass
class Recovery:
    """What the same command finds when it is launched again.

    Args:
        job: the new launch, in possession of the directory.
        loaded: the checkpoint it continues from.
        content: every file of it.
        passed_over: newer ones, with the reason.
    """

    job: Job
    loaded: StepName | None
    content: dict[str, bytes]
    passed_over: dict[StepName, CheckpointError]


def recover(disk: Disk, *, world_size: int = 1, store_class: type[Store] = Store) -> Recovery:
    """Launches the job again on a disk: newest first, verify, quarantine damage, fall back.

    Raises:
        ResumekitError: the directory cannot be used at all.
    """
    job = Job(Recording.on(disk), world_size, store_class=store_class)
    job.start()
    passed_over: dict[StepName, CheckpointError] = {}
    for name in job.stores[0].step_names():
        try:
            return Recovery(job, name, read_all(job.stores[0], name), passed_over)
        except CheckpointError as error:
            passed_over[name] = error
            if isinstance(error, CorruptCheckpointError):
                job.stores[0].quarantine(name, error)
    return Recovery(job, None, {}, passed_over)


def read_all(store: Store, name: StepName) -> dict[str, bytes]:
    """Every file of a checkpoint, verified as it is read.

    Raises:
        CheckpointError: it cannot be used.
    """
    step = store.open_step(name)
    content = {}
    for entry in step.manifest.files:
        with step.file(entry.path) as reader:
            content[entry.path] = reader.read()
    return content


def usable(store: Store, names: Mapping[StepName, object]) -> dict[StepName, dict[str, bytes]]:
    """The content of those checkpoints that can be read whole."""
    found = {}
    for name in names:
        try:
            found[name] = read_all(store, name)
        except ResumekitError:
            continue
    return found
