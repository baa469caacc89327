"""Taking the run directory: rank 0 owns it, and all ranks see the same one."""

from __future__ import annotations

from pathlib import Path

from resumekit.distributed import World
from resumekit.run.saving.background import drain
from resumekit.storage import Store


def open_store(directory: Path, world: World) -> Store:
    """The run directory, owned by rank 0. Collective.

    Raises:
        DirectoryError: it cannot be used, or another live job owns it; or a rank sees another one.
    """
    store = Store(directory)
    drain()  # an abandoned run of this process owns its directory until its save is done

    def acquire() -> tuple[str, str]:
        store.acquire()
        return store.run_id, store.attempt

    run_id, attempt = world.on_first(acquire)
    world.everywhere(lambda: None if world.is_first else store.join(run_id, attempt))
    return store
