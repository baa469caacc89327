"""Where a script writes that names no directory: a copy of the working directory for each run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from resumekit.errors import ConfigurationError
from resumekit.prove.command import DIRECTORY_PLACEHOLDER

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
