"""The save of a run that is in flight: the collective acts that begin it and end it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from resumekit.distributed import World, from_rank
from resumekit.log import logger
from resumekit.progress_display import human_bytes
from resumekit.run.saving.background import Work, add_work
from resumekit.run.saving.background_save import BackgroundSave
from resumekit.run.saving.job import Payloads, SaveJob
from resumekit.run.saving.processes import Processes
from resumekit.run.saving.snapshot import Snapshot
from resumekit.storage import Manifest, num_threads

_NUM_MEASURED = 3


class CopySize(NamedTuple):
    """The memory that one rank's copy of its state takes.

    Args:
        node: of the rank.
        num_bytes: of the copy.
        growth: how many of these are not allocated yet.
    """

    node: str
    num_bytes: int
    growth: int


class SaveInFlight:
    """The save of one run that is in the background, if there is one; at most one is.

    Args:
        world: the ranks.
        must_fit: save in the background only where the copy fits into the memory.

    Attributes:
        num_skipped: the saves that were skipped because one was in flight.
        snapshot: the memory that the saves use.
    """

    def __init__(self, world: World, *, must_fit: bool) -> None:
        self._world = world
        self._must_fit = must_fit
        self._save: BackgroundSave | None = None
        self._deletion: Work | None = None
        self._processes: Processes | None = None  # known from the first save on
        self.snapshot = Snapshot()
        self._sizes: list[int] | None = None  # of the copies of all ranks, once accepted or not
        self._accepts = False
        self._num_threads = 1  # that copy, once the ranks of the node are known
        self._number = 0
        self.num_skipped = 0
        self._seconds: deque[float] = deque(maxlen=_NUM_MEASURED)

    @property
    def step(self) -> int | None:
        """Of the save in flight; None without one. The same on all ranks."""
        return None if self._save is None else self._save.name.step

    @property
    def manifest(self) -> Manifest | None:
        """Of the save in flight, but for the files; None without one. The same on all ranks."""
        return None if self._save is None else self._save.manifest

    @property
    def micro_step(self) -> int | None:
        """That the save in flight is of; None without one. The same on all ranks."""
        return None if self._save is None else self._save.micro_step

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread still works on it. Other ranks may know otherwise."""
        return self._save is not None and not self._save.work.is_done

    @property
    def has_failed(self) -> bool:
        """Whether it has failed on this rank. Other ranks may know otherwise."""
        return self._save is not None and self._save.has_failed

    @property
    def last_seconds(self) -> float:
        """How long the last one was written; 0 before there was one."""
        return self._seconds[-1] if self._seconds else 0.0

    @property
    def longest_seconds(self) -> float:
        """How long the slowest of the last saves was written."""
        return max(self._seconds, default=0.0)

    def details(self) -> dict[str, int]:
        """What a manifest says of the saves that were skipped."""
        return {"skipped_saves": self.num_skipped} if self.num_skipped else {}

    def next_number(self) -> int:
        """The number of the next save, the same on all ranks."""
        self._number += 1
        return self._number

    def size_of_copy(self, payloads: Payloads) -> CopySize:
        """The memory that a copy of all that this rank writes takes."""
        num_bytes = self.snapshot.needed_bytes(payloads)
        return CopySize(self._world.node, num_bytes, self.snapshot.growth(num_bytes))

    def accepts(self, copies: Sequence[CopySize]) -> bool:
        """Whether the ranks copy their state. Collective; logs the size once.

        Args:
            copies: of each rank.
        """
        sizes = [copy.num_bytes for copy in copies]
        if sizes == self._sizes:
            return self._accepts
        own_copy = copies[self._world.ranks.index(self._world.rank)]
        here = [copy for copy in copies if copy.node == own_copy.node]
        self._num_threads = num_threads(len(here))
        others = sum(copy.growth for copy in here) - own_copy.growth
        accepted = not self._must_fit or all(
            self._world.gather(self.snapshot.fits(own_copy.num_bytes, others))
        )
        if self._world.is_first and (self._sizes is None or accepted != self._accepts):
            of_node = f", {human_bytes(sum(copy.num_bytes for copy in here))} on its node"
            several = of_node if len(here) > 1 else ""
            size = f"{human_bytes(own_copy.num_bytes)} on rank 0{several}"
            logger.info(
                "async saves keep a copy of the state in host memory: %s"
                if accepted
                else "saves are synchronous, a copy of the state does not fit into memory: %s",
                size,
            )
        self._sizes, self._accepts = sizes, accepted
        return accepted

    def copy(self, payloads: Payloads) -> None:
        """Copies all that this rank writes: training may change it once this returns."""
        assert self._save is None, "the copy of the save in flight is being written"
        self.snapshot.take(payloads, num_threads=self._num_threads)

    def start(self, job: SaveJob) -> None:
        """Hands the save to the background thread. Collective the first time."""
        assert self._save is None, "at most one save is in flight"
        if self._processes is None:
            self._processes = Processes.of(self._world)
        self._save = BackgroundSave(job, self._processes)
        add_work(self._save.work)

    def empty_trash(self, job: SaveJob) -> None:
        """Removes the files of old checkpoints in the background. Rank 0 only."""
        self._deletion = Work("the removal of old checkpoints", job.empty_trash)
        add_work(self._deletion)

    def wait_for_deletion(self) -> None:
        """Waits until the store may be changed again."""
        deletion, self._deletion = self._deletion, None
        if deletion is not None:
            deletion.wait()

    def finish(self) -> BackgroundSave | None:
        """Waits for the save in flight on all ranks. Collective.

        Returns:
            That save, durable now; None where none was in flight.

        Raises:
            ResumekitError: on every rank, what failed; it names the rank.
            RankLostError: a rank has died, or does not answer.
        """
        save = self._save
        if save is None:
            return None
        errors = self._world.gather(save.wait_until_written())
        for rank, error in zip(self._world.ranks, errors, strict=True):
            if error is not None:
                save.give_up(error if self._world.world_size == 1 else from_rank(rank, error))
                break
        failure = self._world.broadcast(save.work.wait() if self._world.is_first else None)
        save.work.wait()
        save.work.is_reported = True
        self._seconds.append(save.work.seconds)
        self._save = None
        if failure is not None:
            raise failure if self._world.is_first else from_rank(self._world.ranks[0], failure)
        return save

    def wait_for_own(self) -> None:
        """Waits until this rank has done its part, on rank 0 all; raises nothing."""
        self.wait_for_deletion()
        if self._save is not None and not self._save.work.is_abandoned:
            self._save.work.wait()

    def wait_alone(self) -> None:
        """Waits until the save in flight is committed, or has failed; raises nothing.

        Not collective: another rank than the first waits until the staging directory is gone.
        """
        self.wait_for_own()
        if self._save is not None and not self._world.is_first:
            self._save.wait_for_first()
