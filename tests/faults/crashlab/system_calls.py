"""What a process really asked the kernel to change, read from ``strace -f -y``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Every system call with which Linux lets a process change a file, a name or what is durable.
TRACED = (
    "open,openat,openat2,creat,write,writev,pwrite64,pwritev,pwritev2,sendfile,splice,"
    "copy_file_range,fallocate,truncate,ftruncate,fsync,fdatasync,sync,syncfs,msync,mmap,"
    "rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,mknod,mknodat,chmod,fchmod,fchmodat,chown,fchown,lchown,fchownat,utime,utimes,"
    "utimensat,futimesat,setxattr,lsetxattr,fsetxattr,removexattr,fremovexattr,io_uring_setup"
)
_WRITES = frozenset({"write", "writev", "pwrite64", "pwritev", "pwritev2"})
_LINE = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)\) += +[-?\d]")
_UNFINISHED = re.compile(r"^(?P<pid>\d+) +(?P<start>\w+\(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)$")
_DESCRIPTOR = re.compile(r"^(?:\d+|AT_FDCWD)<(?P<path>[^>]*)>")
_QUOTED = re.compile(r'"(?P<path>(?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Change:
    """One change below a directory, in the words of the seam."""

    call: str
    paths: tuple[str, ...]  # relative to the directory

    def __str__(self) -> str:
        return f"{self.call} {' '.join(self.paths)}"


def strace() -> str | None:
    """The path of a strace that may trace here, or None."""
    path = shutil.which("strace")
    if path is None:
        return None
    probe = subprocess.run([path, "-f", "-qq", "-e", "trace=none", "true"], capture_output=True)
    return path if probe.returncode == 0 else None


def traced(
    command: Sequence[str], *, log: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end under strace."""
    found = strace()
    assert found is not None
    options = ["-f", "-y", "-qq", "-s", "0", "-e", f"trace={TRACED}", "-e", "signal=none"]
    return subprocess.run(
        [found, *options, "-o", str(log), *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def python(*arguments: str) -> list[str]:
    """A command that runs this interpreter."""
    return [sys.executable, *arguments]


def changes(log: Path, below: Path, *, cwd: Path | None = None) -> list[Change]:
    """The changes below a directory that were asked for, in the order in which the calls ended.

    Args:
        log: what ``traced`` wrote.
        below: the directory.
        cwd: where the process ran, for relative paths; by default where this one runs.
    """
    found = []
    for line in _whole_lines(log.read_text(errors="replace").splitlines()):
        if matched := _LINE.match(line):
            paths = [str((cwd or Path.cwd()) / path) for path in _paths(matched["arguments"])]
            change = _change(matched["name"], matched["arguments"], paths, below)
            if change is not None:
                found.append(change)
    return found


def _whole_lines(lines: Iterable[str]) -> Iterable[str]:
    # A call during which another thread ran is reported in two lines.
    started: dict[str, str] = {}
    for line in lines:
        if unfinished := _UNFINISHED.match(line):
            started[unfinished["pid"]] = unfinished["start"]
        elif resumed := _RESUMED.match(line):
            yield f"{resumed['pid']} {started.pop(resumed['pid'], '')}{resumed['rest']}"
        else:
            yield line


def _change(name: str, arguments: str, paths: Iterable[str], below: Path) -> Change | None:
    if not _is_mutating(name, arguments):
        return None
    inside = tuple(found for path in paths if (found := _relative(path, below)))
    return Change(_seam_word(name, arguments), inside) if inside else None


def _is_mutating(name: str, arguments: str) -> bool:
    if name in ("open", "openat", "openat2"):
        return bool(re.search(r"\bO_(CREAT|WRONLY|RDWR|TRUNC|TMPFILE)\b", arguments))
    if name == "mmap":
        return "PROT_WRITE" in arguments and "MAP_SHARED" in arguments
    return True


def _seam_word(name: str, arguments: str) -> str:
    if name in _WRITES:
        return "write"
    if name in ("open", "openat", "openat2", "creat"):
        return "create" if "O_CREAT" in arguments and "O_EXCL" in arguments else "open for writing"
    if name == "unlinkat" and "AT_REMOVEDIR" in arguments:
        return "rmdir"
    base = re.sub(r"(at2?|64)$", "", name)
    return {"fdatasync": "fsync"}.get(base, base)


def _paths(arguments: str) -> list[str]:
    """The paths a call works on: quoted ones in their directory, or those of descriptors."""
    paths = []
    directory = ""
    for argument in re.split(r", (?![^<]*>)", arguments):
        if descriptor := _DESCRIPTOR.match(argument):
            directory = descriptor["path"]
            paths.append(directory)
        elif quoted := _QUOTED.match(argument):
            if directory and paths and paths[-1] == directory:
                paths.pop()
            paths.append(str(Path(directory) / quoted["path"]))
    return paths


def _relative(path: str, below: Path) -> str | None:
    path = path.removesuffix(" (deleted)").rstrip("/")
    if path == str(below):
        return "."
    return path[len(str(below)) + 1 :] if path.startswith(f"{below}/") else None
