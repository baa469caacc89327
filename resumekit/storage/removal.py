"""How checkpoints leave a run directory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from resumekit.storage.failures import saving
from resumekit.storage.io import FileSystem
from resumekit.storage.names import STAGING, StepName
from resumekit.storage.tree import remove_tree


def remove_steps(file_system: FileSystem, directory: Path, names: Sequence[StepName]) -> None:
    """Deletes step directories; at no instant is one of them there in part.

    Args:
        file_system: the seam.
        directory: the run directory.
        names: of the step directories.

    Raises:
        SaveError: names the path and the cause. What was renamed away is removed by the next save.
    """
    trash = []
    for name in names:
        trash.append(directory / STAGING / f"trash-{name}-{uuid.uuid4().hex[:12]}")
        with saving(directory / str(name)):
            file_system.rename(directory / str(name), trash[-1])
    with saving(directory):
        # Until the names are gone durably, a power cut could bring half a checkpoint back.
        file_system.fsync_dir(directory)
    for path in trash:
        with saving(path):
            remove_tree(file_system, path)
