"""The training for fault injection on a file system whose type promises an atomic rename."""

from __future__ import annotations

from typing import Any

import faults_training

from resumekit.storage.io.file_system import LocalFileSystem


def launch(directory: str, **options: Any) -> None:
    """Trains as if the mount were no FUSE: the type of its file system is all that says so."""
    LocalFileSystem.has_atomic_rename = lambda self, path: True  # type: ignore[method-assign]
    faults_training.launch(directory, **options)
