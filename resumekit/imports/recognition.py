"""Recognises checkpoints of other programs by their content; loads nothing of them."""

from __future__ import annotations

import json
import shlex
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from resumekit.errors import DirectoryError
from resumekit.storage.directories import OWNER, StepName

# lightning 2.6 fabric/strategies/fsdp.py: what is no shard, in a folder of DCP.
SHARDED_META = "meta.pt"
_HEAD_BYTES = 4096  # of a pickle; the first keys are there


class WrittenBy(str, Enum):
    """What wrote a checkpoint, in words."""

    TRAINER = "a checkpoint of the Trainer"
    ACCELERATE = "a save_state folder of Accelerate"
    LIGHTNING = "a checkpoint of Lightning"
    DEEPSPEED = "a checkpoint of DeepSpeed"
    DCP = "a DCP checkpoint"
    TORCH = "a torch.save file"


@dataclass(frozen=True)
class OtherCheckpoint:
    """A checkpoint of another program.

    Args:
        path: of it.
        kind: what wrote it.
        step: its optimizer step, where that is known without loading it.
        trusted: whether objects of any class in it may be made, which runs code that it names.
    """

    path: Path
    kind: WrittenBy
    step: int | None = None
    trusted: bool = False

    def __str__(self) -> str:
        return self.kind.value + ("" if self.step is None else f" at step {self.step}")

    def command(self, directory: Path | str = "RUN") -> str:
        """The command that makes it the first step of a run."""
        return f"resumekit import {shlex.quote(str(self.path))} {shlex.quote(str(directory))}"


def recognise(path: Path) -> OtherCheckpoint | None:
    """What a file or a directory is; None for anything else, also for what is of resumekit."""
    with suppress(OSError):
        if path.is_file():
            return _recognise_file(path)
        if path.is_dir() and not is_of_resumekit(path):
            return _recognise_directory(path, {each.name for each in path.iterdir()})
    return None


def is_of_resumekit(directory: Path) -> bool:
    """Whether a directory is one of a run, or a step in one."""
    names = (each.name for each in directory.iterdir())
    is_step = StepName.parse(directory.resolve().name) is not None
    return is_step or any(name == OWNER or StepName.parse(name) is not None for name in names)


def refuse_other(directory: Path) -> None:
    """Raises DirectoryError where a run directory is a checkpoint of another program."""
    found = recognise(directory)
    if found is not None:
        raise DirectoryError(
            str(directory),
            found=f"{found}, not a run",
            expected="an empty directory, or that of a run",
            remedy=f"Choose another run directory RUN, and import it first: {found.command()}",
        )


def _recognise_directory(path: Path, names: set[str]) -> OtherCheckpoint | None:
    if "trainer_state.json" in names and (path / "trainer_state.json").is_file():
        step = None
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            step = int(json.loads((path / "trainer_state.json").read_text())["global_step"])
        return OtherCheckpoint(path, WrittenBy.TRAINER, step)
    if any(name.startswith(("random_states_", "pytorch_model_fsdp")) for name in names):
        return OtherCheckpoint(path, WrittenBy.ACCELERATE)
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        meta = _recognise_file(path / SHARDED_META) if SHARDED_META in names else None
        is_lightning = meta is not None and meta.kind is WrittenBy.LIGHTNING
        return OtherCheckpoint(path, WrittenBy.LIGHTNING if is_lightning else WrittenBy.DCP)
    if any(name.endswith("_model_states.pt") for name in names):
        return OtherCheckpoint(path, WrittenBy.DEEPSPEED)
    if "latest" in names and (path / "latest").is_file():
        tag = path / (path / "latest").read_text()[:255].strip()
        if tag.is_dir() and any(tag.glob("*_model_states.pt")):
            return OtherCheckpoint(tag, WrittenBy.DEEPSPEED)
    return None


def _recognise_file(path: Path) -> OtherCheckpoint | None:
    if not zipfile.is_zipfile(path):
        return None
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        # torch 2.13 serialization.py: everything lies in one folder, named like the file.
        members = [each for each in archive.namelist() if each.endswith("/data.pkl")]
        if members:
            with archive.open(members[0]) as pickled:
                is_lightning = b"pytorch-lightning_version" in pickled.read(_HEAD_BYTES)
            return OtherCheckpoint(path, WrittenBy.LIGHTNING if is_lightning else WrittenBy.TORCH)
    return None
