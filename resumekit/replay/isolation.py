"""Keeps what a replayed command writes away from the user's files, or lists it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resumekit.launcher import Activation, prepared_environment

_MOUNTS = Path(__file__).with_name("mounts.py")

# Of trackers and of the Hub: nothing is sent. A tracker that a script configures in its code may
# ignore them; then the overlay keeps its files, but not what it sends.
_OFFLINE = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_OFFLINE": "1",
}

# Offline the constructor of a Trainer with push_to_hub fails.
_TRAINER = Activation(
    "transformers.trainer", "resumekit.adapters.transformers.replaying:switch_hub_off", {}
)


def offline_environment(
    environment: Mapping[str, str], scratch: Path, launcher: Path
) -> dict[str, str]:
    """The environment of a command whose trackers send nothing.

    Args:
        environment: of the command otherwise.
        scratch: takes what is not sent.
        launcher: see ``prepared_environment``.
    """
    mlflow = {"MLFLOW_TRACKING_URI": (scratch / "mlflow").as_uri()}
    return prepared_environment({**environment, **_OFFLINE, **mlflow}, launcher, [_TRAINER])


@dataclass(frozen=True)
class Isolation:
    """An overlay over directories.

    Args:
        directories: those whose files stay as they are.
        layers: an empty directory that takes what is written.
        visible: a directory that the command sees as it is, even inside of one of them.
    """

    directories: tuple[Path, ...]
    layers: Path
    visible: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs a command behind the overlay."""
        settings = {
            "directories": [str(directory) for directory in self.directories],
            "layers": str(self.layers),
            "kept": str(self.visible),
        }
        return [sys.executable, "-I", "-S", str(_MOUNTS), json.dumps(settings), *command]

    def obstacle(self) -> str:
        """Why the kernel does not allow it; empty if it does."""
        found = subprocess.run(self.command(()), capture_output=True, text=True, check=False)
        for layer in self.layers.iterdir():
            remove_layer(layer)
        return (found.stderr.strip() or str(found.returncode)) if found.returncode else ""


def outermost(directories: Iterable[Path]) -> tuple[Path, ...]:
    """The directories with their links resolved, without those inside another one."""
    resolved = sorted({directory.resolve() for directory in directories})
    return tuple(each for each in resolved if not any(other in each.parents for other in resolved))


def remove_layer(layer: Path) -> None:
    """Removes what an overlay has written; the kernel leaves a directory without permissions."""
    import shutil

    inner = layer / "work" / "work"
    if inner.is_dir():
        os.chmod(inner, 0o700)
    shutil.rmtree(layer, ignore_errors=True)


# ---------------------------------------------------------------- files without an overlay

# A listing takes about 10 microseconds a file.
MAX_FILES = 1_000_000

Listing = dict[str, tuple[int, int, int]]


def list_files(directories: Sequence[Path], *, but: Path) -> Listing | None:
    """Inode, size and time of each file; None where there are too many, or some cannot be listed.

    Writes are found afterwards, not while they happen: hooks of the interpreter see none of those
    that libraries in C++ or Rust make.

    Args:
        directories: none of them inside another one.
        but: a directory that is left out.
    """
    found: Listing = {}
    try:
        for directory in directories:
            for entry in _files(str(directory), str(but)):
                status = entry.stat(follow_symlinks=False)
                found[entry.path] = (status.st_ino, status.st_size, status.st_mtime_ns)
                if len(found) > MAX_FILES:
                    return None
    except OSError:  # another process has removed it
        return None
    return found


def changed_files(before: Listing, after: Listing) -> tuple[str, ...]:
    """The paths of new, changed and removed files."""
    return tuple(sorted({path for path, _ in before.items() ^ after.items()}))


def _files(directory: str, but: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.path != but:
                    yield from _files(entry.path, but)
            else:
                yield entry
