"""A training job on a disk in memory: it saves through the real store, crashes, and recovers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from crashlab.frozen_tensors import FrozenTensors
from crashlab.interruptions import CopiesOnRename
from crashlab.large_files import LargeFile
from crashlab.recording import RUN, Recording, RecordingFileSystem
from resumekit.errors import CheckpointError, CorruptCheckpointError, SaveError
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import FileSystem
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.ownership import NoLock
from resumekit.storage.parts import Parts
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

CREATED = "2026-01-31T12:00:00+00:00"
MODEL_BYTES = 6000  # more than a page, so that it can be torn at one

Wrap = Callable[[FileSystem], FileSystem]
Content = dict[str, bytes]  # of files, by their path in the step directory


def content_of(name: StepName, rank: int) -> Content:
    """What one rank writes into a checkpoint: different for every name, rank and file."""
    sizes = {f"state/rank-{rank:05d}.json": 150, f"state/rank-{rank:05d}.safetensors": 300}
    if rank == 0:
        sizes["model/rank-00000.safetensors"] = MODEL_BYTES
    return {path: _bytes(f"{name} {path}", size) for path, size in sizes.items()}


def full_content(name: StepName, world_size: int) -> Content:
    """What a whole checkpoint holds beside its manifest."""
    content: Content = {}
    for rank in range(world_size):
        content |= content_of(name, rank)
    return content


def _bytes(seed: str, size: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(size)


@dataclass(frozen=True)
class Promise:
    """What the job may count on once it has made a number of calls.

    Args:
        num_calls: the promise holds from here on.
        run_id: the id under which every later launch continues; None before the first one.
        newest: the newest checkpoint whose save has returned.
        kept: the checkpoints that must be usable, with their content.
        damaged: checkpoints that are not usable, and must not vanish either.
        aside: those of them that were put into quarantine.
    """

    num_calls: int = 0
    run_id: str | None = None
    newest: StepName | None = None
    kept: Mapping[StepName, Content] = field(default_factory=dict)
    damaged: frozenset[StepName] = frozenset()
    aside: frozenset[StepName] = frozenset()

    @property
    def identity(self) -> object:
        """Equal for promises that ask for the same."""
        return self.run_id is None, self.newest, frozenset(self.kept), self.damaged, self.aside

    def after_damage(self, *names: StepName) -> Promise:
        """What still holds once something else has damaged these checkpoints."""
        kept = {name: content for name, content in self.kept.items() if name not in names}
        damaged = self.damaged | set(names)
        return replace(self, newest=max(kept, default=None), kept=kept, damaged=damaged)


@dataclass(frozen=True)
class Loaded:
    """What a launch continues from.

    Args:
        name: of the checkpoint; None for a fresh start.
        content: every file of it.
        passed_over: newer ones, with the reason.
    """

    name: StepName | None
    content: Content
    passed_over: dict[StepName, CheckpointError]


@dataclass
class Job:
    """The ranks of one launch.

    Args:
        recording: the disk they share.
        world_size: how many ranks.
        policy: the retention policy.
        wrap: what stands between the store and the disk; the mutant, if it is a file system.
        store_class: the store in use; the mutant, if it is a store.
        parts_class: what rank 0 takes parts from; the mutant, if it is that.
        barriers: whether ranks wait for each other before the commit.
        frozen: the frozen tensors of the model, or a large file, if there are any.
        is_in_place: whether the disk renames a directory one file after the other.
    """

    recording: Recording
    world_size: int = 1
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    wrap: Wrap = lambda inner: inner
    store_class: type[Store] = Store
    parts_class: type[Parts] = Parts
    barriers: bool = True
    frozen: FrozenTensors | LargeFile | None = None
    is_in_place: bool = False
    promises: list[Promise] = field(default_factory=lambda: [Promise()])
    attempted: dict[StepName, Content] = field(default_factory=dict)
    num_background_saves: int = 0

    def __post_init__(self) -> None:
        disks: list[FileSystem] = [
            RecordingFileSystem(self.recording, rank) for rank in range(self.world_size)
        ]
        if self.is_in_place:
            disks = [CopiesOnRename(disk) for disk in disks]
        self.stores = [
            self.store_class(RUN, file_system=self.wrap(disk), lock=NoLock()) for disk in disks
        ]
        self._metrics: dict[StepName, float] = {}
        self._pinned: set[StepName] = set()
        self._unpromised: set[StepName] = set()  # complete, but a power cut may remove them

    def start(self) -> None:
        """Takes the directory over."""
        owner = self.stores[0].acquire()
        self.recording.barrier()
        for store in self.stores[1:]:
            store.join(owner.run_id, owner.attempt, wait_seconds=0.0)
        self._promise(run_id=owner.run_id)

    def save(self, step: int, *, metric: float | None = None) -> StepName:
        """One whole save, as the Checkpointer makes it."""
        name, stagings = self.stage(step)
        return self.commit(name, stagings[0], self.write(name, stagings), metric=metric)

    def pin(self, name: StepName) -> None:
        """Opens a checkpoint for reading: it must stay until ``unpin``."""
        self._pinned.add(name)
        self.stores[0].pin(name)

    def unpin(self, name: StepName) -> None:
        """Closes it."""
        self._pinned.discard(name)
        self.stores[0].unpin(name)

    def stage(self, step: int, *, with_parts: bool = False) -> tuple[StepName, list[Staging]]:
        """Makes the staging directory and lets all ranks see it."""
        first = self.stores[0]
        name = first.next_name(step)
        self.attempted[name] = full_content(name, self.world_size)
        if self.frozen is not None:
            self.attempted[name] |= self.frozen.content(name)
        staging = first.stage(
            name,
            num_bytes=sum(map(len, self.attempted[name].values())),
            num_files=len(self.attempted[name]),
            directories=["model", "optimizer", "state"],
            with_parts=with_parts,
        )
        self.recording.barrier()
        return name, [staging, *(store.attach(staging.name) for store in self.stores[1:])]

    def write(self, name: StepName, stagings: list[Staging]) -> list[FileEntry]:
        """Every rank writes its files; they do so at the same time."""
        entries = []
        for rank, staging in enumerate(stagings):
            entries += self.write_files(name, staging, rank, content_of(name, rank))
        if self.barriers:
            self.recording.barrier()
        return entries

    def write_files(
        self, name: StepName, staging: Staging, rank: int, content: Content
    ) -> list[FileEntry]:
        """Writes these files of one rank, each in two calls, and its frozen tensors."""
        with staging.writing():
            entries = [] if self.frozen is None else self.frozen.write(name, staging, rank)
            for path, data in content.items():
                half = len(data) // 2
                with staging.create(path, writer=rank) as writer:
                    writer.write([memoryview(data)[:half]])
                    writer.write([memoryview(data)[half:]])
                    entries.append(writer.finish())
        return entries

    def commit(
        self,
        name: StepName,
        staging: Staging,
        entries: list[FileEntry],
        *,
        metric: float | None = None,
        empties: bool = True,
    ) -> StepName:
        """Commits, and then lets old checkpoints go; their bytes too, unless the trash stays."""
        first = self.stores[0]
        try:
            first.commit(staging, self._manifest(name, entries, metric))
        except SaveError:
            if name in first.step_names():  # only the last sync has failed
                self._unpromised.add(name)
            raise
        if self.frozen is not None:
            self.frozen.committed(name, entries)
        if metric is not None:
            self._metrics[name] = metric
        self._promise(newest=name, kept={**self.promises[-1].kept, name: self.attempted[name]})
        self._promise(kept=self._kept_by_policy())
        first.retain(self.policy)
        if empties:
            first.empty_trash()
        self.recording.barrier()
        return name

    def prune(self) -> None:
        """Makes room on a full disk, as often as it can."""
        promise = self.promises[-1]
        assert promise.newest is not None
        measured = [name for name in promise.kept if name in self._metrics]
        measured.sort(key=lambda name: (self._metrics[name], name))
        needed = {promise.newest, *measured[:1], *self._pinned}
        self._promise(kept={name: promise.kept[name] for name in needed & promise.kept.keys()})
        while self.stores[0].prune(self.policy, latest=promise.newest) is not None:
            pass
        self.recording.barrier()

    def forget_calls(self) -> None:
        """What was done so far is durable, and is not crashed."""
        self.recording.restart()
        self.promises = [replace(self.promises[-1], num_calls=0)]

    def load_newest(self) -> Loaded:
        """Newest first: verifies, puts damage aside, falls back."""
        passed_over: dict[StepName, CheckpointError] = {}
        for name in self.stores[0].step_names():
            try:
                content = read_all(self.stores[0], name)
            except CheckpointError as error:
                passed_over[name] = error
                if isinstance(error, CorruptCheckpointError):
                    self.stores[0].quarantine(name, error)
                    self._promise(aside=self.promises[-1].aside | {name})
            else:
                self._promise(newest=name, kept={**self.promises[-1].kept, name: content})
                return Loaded(name, content, passed_over)
        return Loaded(None, {}, passed_over)

    def continues(self, earlier: Job, promise: Promise | None = None) -> None:
        """Takes over what an earlier launch in the same directory was promised.

        Args:
            earlier: the launch before this one.
            promise: what holds from the start; by default what holds at the earlier one's end.
        """
        self.attempted = dict(earlier.attempted)
        self._metrics = dict(earlier._metrics)
        self.promises = [replace(promise or earlier.promises[-1], num_calls=0)]

    def _promise(self, **changes: Any) -> None:
        num_calls = len(self.recording.operations)
        self.promises.append(replace(self.promises[-1], num_calls=num_calls, **changes))

    def _kept_by_policy(self) -> dict[StepName, Content]:
        """The policy worked out again, from its documentation."""
        kept = self.promises[-1].kept
        latest = {name.step: name for name in sorted({*kept, *self._unpromised})}
        newest_first = [latest[step] for step in sorted(latest, reverse=True)]
        chosen = set(newest_first[: self.policy.keep_latest])
        if self.policy.keep_every is not None:
            chosen |= {name for name in newest_first if name.step % self.policy.keep_every == 0}
        measured = [name for name in newest_first if name in self._metrics]
        measured.sort(key=lambda name: (self._metrics[name], name))
        chosen |= set(measured[: self.policy.keep_best]) | self._pinned
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
            components=(ComponentRecord("model", "replicated", "exact", "", "model", (0,)),),
            files=tuple(entries),
        )


def read_all(store: Store, name: StepName) -> Content:
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
