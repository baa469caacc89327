"""Copies of the state in the memory of the node, between two saves; see docs/how-to/places.md.

A copy is a checkpoint like any other, in a store apart: it is written by every rank, its files
have digests, and it counts once its directory has its final name. The one before is removed then,
so that memory is needed for two. Copies never end a training: without room they are off.
"""

from __future__ import annotations

from collections.abc import Iterable

from resumekit.cadence import Cadence
from resumekit.distributed import World
from resumekit.errors import InsufficientSpaceError, ResumekitError, SaveError
from resumekit.log import warn
from resumekit.places.memory import ROOT, SPARE, create_memory, remove_memory
from resumekit.places.place import Place
from resumekit.progress_display import human_bytes
from resumekit.run.saving.snapshot import available_memory
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem, save_errors
from resumekit.storage.io.shared_memory import SharedMemoryFileSystem
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

_MAX_COST_SHARE = 0.05


class MemoryCopies:
    """The copies of one launch.

    Args:
        world: the ranks.
        place: its cadence.
        store: the run directory, acquired or joined.
        num_ranks_here: the ranks on this node.

    Attributes:
        is_off: whether no further copy is made; the same on all ranks.
    """

    retention = RetentionPolicy(keep_latest=1, keep_best=0)

    def __init__(self, world: World, place: Place, store: Store, num_ranks_here: int) -> None:
        self._world, self._run_store = world, store
        self._has_all_ranks = num_ranks_here == world.world_size
        self._is_measured = place.save_every is None
        self._cadence = Cadence(interval_seconds=0.0) if self._is_measured else place.cadence
        self._store: Store | None = None
        self._files: SharedMemoryFileSystem | None = None
        self._step: int | None = None  # of the newest copy
        self._size = 0  # of the largest copy
        self.is_off = False

    def is_due(self, step: int, *, clock: bool) -> bool:
        """Whether a copy is due at a step boundary, on all ranks.

        Args:
            step: optimizer steps so far.
            clock: what the ranks have agreed on about ``is_due_by_clock``.
        """
        if self.is_off:
            return False
        return clock if self._cadence.needs_agreement else self._cadence.is_due(step)

    def is_due_by_clock(self) -> bool:
        """Whether this rank's clock says so; rank 0's counts."""
        asks_clock = self._cadence.needs_agreement and self._world.is_first
        return asks_clock and not self.is_off and self._cadence.is_due(0)

    def open(self) -> Store:
        """The store for a copy, which rank 0 creates and the others join. Collective.

        Raises:
            ResumekitError: there is no such memory, or a rank does not see it.
        """
        if self._store is not None:
            return self._store
        world, run = self._world, self._run_store
        if not self._has_all_ranks:
            raise SaveError("the ranks", found="they are on several nodes")
        path = world.on_first(lambda: create_memory(run.run_id, run.directory))
        self._files = SharedMemoryFileSystem(path / SPARE)
        store, ids = Store(path, file_system=self._files), (run.run_id, run.attempt)
        world.on_first(lambda: store.acquire(run_id=ids[0], attempt=ids[1]))
        world.everywhere(lambda: None if world.is_first else store.join(*ids))
        self._store = store
        return store

    def check_room(self, num_bytes: Iterable[int]) -> None:
        """Checks that there is memory for a copy, and for the one after it. Rank 0 only.

        Args:
            num_bytes: of each rank's files.

        Raises:
            InsufficientSpaceError: there is not.
        """
        size = sum(num_bytes)
        growth, self._size = 2 * max(size - self._size, 0), max(size, self._size)
        if not growth:
            return
        rooms, available = {str(ROOT): LocalFileSystem().free(ROOT).num_bytes}, available_memory()
        if available is not None:
            rooms["memory"] = available - available // 10  # which stays free for the training
        for where, room in rooms.items():
            if room < growth:
                free = f"{human_bytes(room)} are free"
                raise InsufficientSpaceError(where, found=free, expected=human_bytes(growth))

    def remove_unused(self) -> None:
        """Removes the files that this copy has not used again. Rank 0 only."""
        assert self._files is not None
        with save_errors(ROOT):
            self._files.remove_spare()

    def end(self, step: int, seconds: float) -> None:
        """The copy of this step is made, in so many seconds."""
        self._step = step
        if self._is_measured:
            self._cadence.interval_seconds = seconds / _MAX_COST_SHARE
        self._cadence.restart()

    def turn_off(self, error: ResumekitError) -> None:
        """Makes no further copies, and gives the memory back."""
        if self._world.is_first:
            warn("RK-851", "no copies in memory, training continues: %s", error)
        self.is_off = True
        self.close(None)

    def close(self, latest: str | None) -> None:
        """Removes the copies, unless the newest one is newer than the newest checkpoint.

        Args:
            latest: the name of that checkpoint; None without one.
        """
        store, self._store = self._store, None
        self._files = None  # whose pages are mapped
        if store is None or not self._world.is_first:
            return
        store.release()
        newest = -1 if latest is None else StepName.from_text(latest).step
        if self.is_off or newest >= (self._step or 0):
            remove_memory(store.run_id)
