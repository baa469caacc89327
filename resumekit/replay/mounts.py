"""Runs a command in which writes below some directories go elsewhere: ``python mounts.py``.

The first argument is JSON: ``directories`` that the command sees through an overlay, ``layers``,
an empty directory that takes what it writes, and ``kept``, a directory that it sees as it is. The
command follows; without one only the exit status shows whether this is possible here.

Needs the standard library only, and is run as a file of its own: a process with several threads
cannot enter a user namespace.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

NOT_POSSIBLE = 125  # the exit status, with a line on stderr

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def isolate(directories: list[str], layers: str, kept: str) -> None:
    """Mounts an overlay over each directory, for this process and its children only.

    Args:
        directories: none of them inside another one.
        layers: what is written; on a file system in memory where the one it is on cannot be used.
        kept: a directory.

    Raises:
        OSError: the kernel refuses it.
    """
    for directory in directories:
        _require_one_file_system(directory)
    in_user_namespace = _enter_namespaces()
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
    kept_handle = os.open(kept, os.O_PATH | os.O_DIRECTORY)
    working = os.getcwd()
    for number, directory in enumerate(directories):
        layer = os.path.join(layers, str(number))
        os.mkdir(layer)
        try:
            _overlay(directory, layer, userxattr=in_user_namespace)
        except OSError:  # an overlay, NFS and others cannot take the upper layer of another one
            _mount("tmpfs", layer, "tmpfs", 0, None)
            _overlay(directory, layer, userxattr=in_user_namespace)
    if any(_is_inside(kept, directory) for directory in directories):
        _mount(f"/proc/self/fd/{kept_handle}", kept, None, _MS_BIND, None)
    os.close(kept_handle)
    os.chdir(working)  # the directory that was entered is the one below the overlay


def _require_one_file_system(directory: str) -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [_decoded(line.split()[4]) for line in lines]
    inside = [point for point in points if point != directory and _is_inside(point, directory)]
    if inside:
        raise OSError(f"{inside[0]} is mounted below {directory}")


def _decoded(point: str) -> str:
    """A path of the list, in which some bytes are octal numbers."""
    return re.sub(r"\\(\d{3})", lambda each: chr(int(each[1], 8)), point)


def _is_inside(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _enter_namespaces() -> bool:
    """A mount namespace of its own; True if that needed a user namespace."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and _libc.unshare(_CLONE_NEWNS) == 0:
        return False
    status = _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
    if status and ctypes.get_errno() == errno.ENOSPC:  # unshare(2)
        raise OSError("no user namespace: the limit user.max_user_namespaces is reached")
    _check(status, "no user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def _overlay(directory: str, layer: str, *, userxattr: bool) -> None:
    upper, work = os.path.join(layer, "files"), os.path.join(layer, "work")
    os.makedirs(upper, exist_ok=True)
    os.makedirs(work, exist_ok=True)
    status = os.stat(directory)
    os.chmod(upper, status.st_mode & 0o7777)
    paths = zip(("lowerdir", "upperdir", "workdir"), (directory, upper, work), strict=True)
    options = [f"{name}={_escaped(path)}" for name, path in paths]
    _mount("overlay", directory, "overlay", 0, ",".join([*options, *["userxattr"] * userxattr]))


def _escaped(path: str) -> str:
    for letter in "\\,:":
        path = path.replace(letter, "\\" + letter)
    return path


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    status = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(status, f"{kind or 'mount'} on {target}")


def _check(status: int, what: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main(arguments: list[str]) -> int:
    """Isolates this process, and replaces it by the command."""
    settings: dict[str, Any] = json.loads(arguments[0])
    try:
        isolate(**settings)
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
        return NOT_POSSIBLE
    if arguments[1:]:
        os.execvp(arguments[1], arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
