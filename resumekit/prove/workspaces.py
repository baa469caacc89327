"""Where each run of a command works: its words, its files, and the checkpoints that it writes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from resumekit.errors import ConfigurationError

DIRECTORY_PLACEHOLDER = "{dir}"

_OPTIONS_WITH_VALUE = ("-W", "-X")


def prepared(command: Sequence[str], *, world: int, directory: Path) -> list[str]:
    """Program and arguments of one launch.

    Args:
        command: as the user wrote it; ``{dir}`` in it stands for a directory of each run's own.
        world: ranks; more than one wraps ``python x.py`` into ``torch.distributed.run``.
        directory: what ``{dir}`` becomes.

    Raises:
        ConfigurationError: there is no command, or it cannot be wrapped.
    """
    if not command:
        raise ConfigurationError(
            "command",
            found="nothing to run",
            remedy="Put it behind --, as in: resumekit prove -- python train.py",
        )
    if world < 1:
        raise ConfigurationError("world", found=str(world), expected="at least 1")
    words = [word.replace(DIRECTORY_PLACEHOLDER, str(directory)) for word in command]
    if world == 1:
        return words
    index = _script_index(words)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [*words[:index], *launcher, *words[index:]]


def _script_index(words: list[str]) -> int:
    """The index of the script, or of its ``-m``, after the interpreter and its options."""
    index = 1
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c"):
        index += 2 if words[index] in _OPTIONS_WITH_VALUE else 1
    is_python = re.fullmatch(r"python[\d.]*", Path(words[0]).name)
    if not is_python or index >= len(words) or words[index] == "-c":
        raise ConfigurationError(
            " ".join(words),
            found="cannot be started on several ranks",
            expected="python <script.py> ... or python -m <module> ...",
            remedy="Leave --world out if the command starts its ranks itself",
        )
    return index


# ---------------------------------------------------------------- checkpoints of the script

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


# ---------------------------------------------------------------- copies of the working directory

_MEGABYTE = 1_000_000
_LARGEST_MEGABYTES = 500

# Caches and histories that no training reads.
_LEFT_OUT = frozenset(
    {".git", ".hg", ".nox", ".tox", "node_modules", "__pycache__"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}
)
# A directory with one of these is an environment, whatever its name (PEP 405; conda).
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")

# A script with these has its run directories relocated.
_RELOCATED = re.compile(r"resumekit\.adapters|\bCheckpointer\b|\bResumeCallback\b")


def workspace_of(
    command: Sequence[str], working_directory: Path, *, is_stock: bool = False
) -> Path | None:
    """The directory of which each run needs a copy; None when the command writes elsewhere.

    Args:
        command: as the user wrote it.
        working_directory: where the user started it.
        is_stock: whether the script has no run directory, whatever words are in it.

    Raises:
        ConfigurationError: the directory is too large to be copied.
    """
    if any(DIRECTORY_PLACEHOLDER in word for word in command):
        return None
    scripts = [working_directory / word for word in command if word.endswith(".py")]
    if not is_stock and any(
        _RELOCATED.search(path.read_text(errors="replace")) for path in scripts if path.exists()
    ):
        return None
    size = sum(path.lstat().st_size for path in _files(working_directory))
    if size > _LARGEST_MEGABYTES * _MEGABYTE:
        raise ConfigurationError(
            str(working_directory),
            found=f"{size / _MEGABYTE:.0f} MB, of which each run would need a copy",
            expected=f"at most {_LARGEST_MEGABYTES} MB",
            remedy="Put {dir} into the command where the script writes to",
        )
    return working_directory


def copy_workspace(source: Path, target: Path) -> list[str]:
    """Copies a directory without environments, caches and links that lead out of it.

    A script that writes through such a link would write to the user's files.

    Returns:
        The links that were left out, as paths in the directory.
    """
    left_out: list[str] = []

    def ignored(directory: str, names: list[str]) -> set[str]:
        links = {name for name in names if _leads_out(Path(directory, name), source)}
        left_out.extend(str(Path(directory, name).relative_to(source)) for name in sorted(links))
        return links | {name for name in names if _is_left_out(Path(directory, name))}

    shutil.copytree(source, target, symlinks=True, ignore=ignored)
    return left_out


def _is_left_out(path: Path) -> bool:
    return path.name in _LEFT_OUT or any((path / mark).exists() for mark in _ENVIRONMENT_MARKS)


def _leads_out(path: Path, root: Path) -> bool:
    return path.is_symlink() and not path.resolve().is_relative_to(root.resolve())


def _files(directory: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not _is_left_out(Path(parent, name))]
        yield from (Path(parent, name) for name in names)
