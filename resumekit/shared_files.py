"""Files that several checkpoints of a run share: links to one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from resumekit.storage.directories import StepName
from resumekit.storage.manifest import Manifest


def shared_bytes(directory: Path, manifests: Iterable[Manifest]) -> dict[StepName, int]:
    """Of each checkpoint, the bytes of files that an older one has too.

    Args:
        directory: the run directory; files that cannot be read there are not counted.
        manifests: of the checkpoints.
    """
    seen: set[tuple[int, int]] = set()
    shared: dict[StepName, int] = {}
    for manifest in sorted(manifests, key=lambda each: each.name):
        shared[manifest.name] = 0
        for entry in manifest.files:
            with suppress(OSError):  # the run may remove it at any time
                status = (directory / str(manifest.name) / entry.path).stat()
                file = status.st_dev, status.st_ino
                shared[manifest.name] += entry.size if file in seen else 0
                seen.add(file)
    return shared


def freed_bytes(directory: Path, manifests: Iterable[Manifest]) -> dict[StepName, int]:
    """Of each checkpoint, the bytes that its removal frees: of files without a further link.

    Args:
        directory: the run directory; files that cannot be read there are not counted.
        manifests: of the checkpoints, in the order in which they are removed.
    """
    links = Counter[tuple[int, int]]()
    freed: dict[StepName, int] = {}
    for manifest in manifests:
        freed[manifest.name] = 0
        for entry in manifest.files:
            with suppress(OSError):
                status = (directory / str(manifest.name) / entry.path).stat()
                file = status.st_dev, status.st_ino
                links[file] += 1
                freed[manifest.name] += entry.size if links[file] == status.st_nlink else 0
    return freed
