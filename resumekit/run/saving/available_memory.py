"""How much memory this process may still take: by its control groups and by the machine.

The page cache counts as available: the kernel drops it when memory is needed.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # v1 writes the largest number of pages for no limit
_CGROUPS = "sys/fs/cgroup"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that all processes of this control group may still take; None where it is unknown.

    Args:
        root: of the file system; tests have one of their own.
    """
    rooms = [room for room in (_machine(root), *_cgroups(root)) if room is not None]
    return max(min(rooms), 0) if rooms else None


def _machine(root: Path) -> int | None:
    fields = _fields(root / "proc/meminfo")
    return fields["MemAvailable"] << 10 if "MemAvailable" in fields else None


def _cgroups(root: Path) -> Iterator[int | None]:
    """What the limit of each control group above this process leaves."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for directory in _with_parents(root / _CGROUPS, path):
                yield _room_v2(directory)
        elif "memory" in controllers.split(","):
            for directory in _with_parents(root / _CGROUPS / "memory", path):
                yield _room_v1(directory)


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the one outside of it: then only the mount itself exists.
    below = PurePosixPath(path.lstrip("/"))
    for each in (below, *below.parents):
        yield mount / each


def _room_v2(directory: Path) -> int | None:
    cache = ("active_file", "inactive_file", "slab_reclaimable")
    return _room(directory, "memory.max", "memory.current", cache)


def _room_v1(directory: Path) -> int | None:
    cache = ("total_active_file", "total_inactive_file")
    return _room(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", cache)


def _room(directory: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    most, used = _number(directory / limit), _number(directory / usage)
    if most is None or used is None or most >= _UNLIMITED:
        return None
    fields = _fields(directory / "memory.stat")
    return most - used + sum(fields.get(name, 0) for name in cache)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """The numbers of lines such as ``anon 4096`` and ``MemAvailable:  4 kB``, by name."""
    rows = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:  # another system, or a kernel that does not show it
        return ""
