"""Functions that end in one way each, and leave marks of what ran when they did."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from pathlib import Path


def end(directory: str, *, how: str) -> None:
    """Ends.

    Args:
        directory: where the marks are left.
        how: ``returns``, ``raises`` or ``exits`` (with status 3).
    """
    atexit.register(Path(directory, "exit handler").touch)
    threading.Thread(target=_mark_late, args=(Path(directory, "thread"),)).start()
    sys.stdout.write("not a whole line")
    if how == "raises":
        raise RuntimeError("on purpose")
    if how == "exits":
        sys.exit(3)


def _mark_late(path: Path) -> None:
    time.sleep(0.2)
    path.touch()
