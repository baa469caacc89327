"""Trains and saves, and writes down every call that reaches the seam: ``python ... RUN LOG``.

The calls are seen by a profiler, so the code that runs is the code that users run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from resumekit.storage.io import direct, pipeline
from resumekit.storage.io.file_system import LocalFileSystem

sys.path.insert(0, str(Path(__file__).parents[1]))

_CALLS = {
    getattr(LocalFileSystem, name).__code__: name
    for name in ("mkdir", "create", "write", "fsync", "fsync_dir", "rename", "unlink", "rmdir")
}


class SeamLog:
    """The calls of the write side, one line each: the call and its paths."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._paths: dict[int, Path] = {}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        name = _CALLS.get(frame.f_code)
        if name is None or event != "return":
            return
        seen = frame.f_locals
        if name == "create":
            self._paths[result] = seen["path"]
        if "handle" in seen:
            paths = [self._paths[seen["handle"]]]
        elif "path" in seen:
            paths = [seen["path"]]
        else:
            paths = [seen["source"], seen["target"]]
        self.lines.append(" ".join([name, *map(str, paths)]))


def main(run: Path, log: Path) -> None:
    """Two launches in one process: a fresh one, and one that resumes, retains and quarantines."""
    from crashlab.training import NEWEST, Live

    # Small files as large ones: through the thread that writes, and by direct I/O.
    pipeline.CHUNK_BYTES = direct.MIN_DIRECT_BYTES = 4096
    seam = SeamLog()
    watch: Callable[..., None] = seam
    threading.setprofile(watch)
    sys.setprofile(watch)
    Live.launch(run, keep_latest=2).train(until=5)
    (run / NEWEST / "manifest.json").rename(run.parent / "taken")
    Live.launch(run, keep_latest=1).train(until=7)
    sys.setprofile(None)
    log.write_text("\n".join(seam.lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
