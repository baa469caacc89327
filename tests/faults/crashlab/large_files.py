"""A file above 64 MB in each checkpoint of a job, whose writes bypass the page cache."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.pipeline import HostBuffer

PATH = "optimizer/rank-00000.safetensors"
NUM_BYTES = (65 << 20) + 1234  # its end is no whole page, and goes through the page cache


@dataclass(frozen=True)
class LargeFile:
    """The file, which rank 0 writes.

    Args:
        is_image: whether it is written from its own aligned memory, as a background save does;
            otherwise through the ring of buffers.
    """

    is_image: bool

    def content(self, name: StepName) -> dict[str, bytes]:
        """What the file holds in this checkpoint."""
        return {PATH: _content(name)}

    def write(self, name: StepName, staging: Staging, rank: int) -> list[FileEntry]:
        """Writes it."""
        if rank:
            return []
        with staging.create(PATH, writer=rank) as writer:
            if self.is_image:
                buffer = HostBuffer(NUM_BYTES)
                buffer.view[:] = _content(name)
                writer.write_image(buffer.view)
            else:
                writer.write([memoryview(_content(name))])
            return [writer.finish()]

    def committed(self, name: StepName, entries: Iterable[FileEntry]) -> None:
        """The checkpoint is durable; nothing is linked to it."""


@lru_cache(maxsize=2)
def _content(name: StepName) -> bytes:
    return random.Random(str(name)).randbytes(NUM_BYTES)
