"""Compiles what DeepSpeed compiles at its first start on a CPU, before a test is timed or killed.

torch 2.13 utils/file_baton.py FileBaton: a process that is killed while it compiles leaves a file
``lock``, for which every later process waits without end.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOCK_NAME = "resumekit-deepspeed-extension.lock"


@cache
def compile_once(builder: str = "ShareMemCommBuilder") -> None:
    """Compiles an extension where that was not done before; takes a minute the first time.

    Args:
        builder: of the extension; by default of the one that every start loads.
    """
    with open(Path(tempfile.gettempdir(), _LOCK_NAME), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one worker of pytest-xdist at a time
        subprocess.run([sys.executable, __file__, builder], check=True, stdout=subprocess.DEVNULL)


def remove_stale(lock: Path) -> bool:
    """Removes a lock that no process has open; whether it was one."""
    handles = Path("/proc").glob("[0-9]*/fd/*")
    if not lock.exists() or any(_is_open(handle, lock) for handle in handles):
        return False
    lock.unlink(missing_ok=True)
    return True


def _is_open(handle: Path, lock: Path) -> bool:
    with suppress(OSError):  # the process has ended
        return os.readlink(handle) == str(lock)
    return False


def main(name: str) -> None:
    """Compiles, in this process."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    builder = get_accelerator().create_op_builder(name)
    if builder is not None and builder.is_compatible():
        folder = _get_build_directory(builder.name, False)
        remove_stale(Path(folder).resolve() / "lock")
        builder.load()


if __name__ == "__main__":
    main(sys.argv[1])
