"""Host memory through which a load reads what it copies into live tensors."""

from __future__ import annotations

from resumekit.distributed import World
from resumekit.errors import SaveError
from resumekit.log import logger
from resumekit.progress_display import human_bytes
from resumekit.run.saving import Snapshot
from resumekit.serialization import LoadMemory


class LoadBuffer:
    """The memory of this run's saves; without async saves it is given back after the load.

    Args:
        world: the ranks. Collective.
        snapshot: the memory of the saves; none is in flight.
        is_kept: whether saves will use it.
    """

    def __init__(self, world: World, snapshot: Snapshot, *, is_kept: bool) -> None:
        self._num_here = world.gather(world.node).count(world.node)
        self._snapshot = snapshot
        self._is_kept = is_kept
        self._memory: LoadMemory | None = None

    def memory(self, num_bytes: int) -> LoadMemory | None:
        """Memory for tensors of a checkpoint; None where there is not so much of it.

        Args:
            num_bytes: of all its tensors together. Other ranks on this node may need as many.
        """
        self._memory = None
        if num_bytes == 0:
            return None
        if not self._snapshot.fits(num_bytes, (self._num_here - 1) * num_bytes):
            size = human_bytes(num_bytes)
            logger.debug("no memory for %s of tensors: they are read twice, by blocks", size)
            return None
        try:
            self._memory = LoadMemory(self._snapshot.lend(num_bytes))
        except SaveError:
            logger.debug("the system grants no %s of memory", human_bytes(num_bytes))
        return self._memory

    def give_back(self) -> None:
        """The load is over, and its state is not used any more."""
        memory, self._memory = self._memory, None
        is_free = memory is None or memory.is_free()
        if not (self._is_kept and is_free):
            self._snapshot.release()
