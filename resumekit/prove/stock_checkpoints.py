"""The checkpoints that a script writes by its own means, found by their usual names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

LATEST_PLACEHOLDER = "{latest}"

# Trainer, Accelerate and most scripts; Lightning; DeepSpeed; Accelerate by step; torch.save, of
# which torch's own examples and tutorials name the files .pth.tar and .tar.
PATTERNS = (
    *("checkpoint-*", "checkpoint_*", "*.ckpt", "global_step*", "step_*", "step-*"),
    *("epoch_*", "epoch-*", "*.pt", "*.pth", "*.tar"),
)


def stock_checkpoints(roots: Sequence[Path], *, since_ns: int) -> list[Path]:
    """Files and directories named like checkpoints, oldest first.

    What is inside a directory that is named like one belongs to it.

    Args:
        roots: where to look.
        since_ns: what was written before (Unix time) is not the run's.
    """
    found = [(_written(path), _number(path), path) for root in roots for path in _named(root)]
    return [path for written, _, path in sorted(found) if written >= since_ns]


def with_latest(command: Sequence[str], latest: Path) -> list[str]:
    """The command, the placeholder replaced."""
    return [word.replace(LATEST_PLACEHOLDER, str(latest)) for word in command]


def _named(root: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(root):
        for name in [*folders, *files]:
            if any(fnmatch(name, pattern) for pattern in PATTERNS) and "tmp" not in name:
                yield Path(parent, name)
        folders[:] = [name for name in folders if not any(fnmatch(name, p) for p in PATTERNS)]


def _written(path: Path) -> int:
    """When a file was written, or the newest file in a directory; 0 if it is gone by now."""
    times = [0]
    for each in [path, *(path.rglob("*") if path.is_dir() else ())]:
        try:
            times.append(each.stat().st_mtime_ns)
        except OSError:
            continue  # the script keeps only its newest checkpoints
    return max(times)


def _number(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name)
    return int(numbers[-1]) if numbers else 0
