"""What the processes of a command have imported, for advice where no Trainer trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FOLDER = "imported"

# Of a loop that the user writes: what makes it save and resume.
_LOOP = "for batch in ckpt.batches(loader, epochs=3):"
_STEP = f"{_LOOP}  # at the end of each step: ckpt.step(loss=loss)"
_LINES: Mapping[str, str] = {
    "deepspeed": "from resumekit.adapters.deepspeed import Checkpointer\n"
    "ckpt = Checkpointer(engine, {directory!r})  # after deepspeed.initialize\n"
    f"{_LOOP}",
    "accelerate": "from resumekit.adapters.accelerate import Checkpointer\n"
    "ckpt = Checkpointer(accelerator, {directory!r})  # after prepare\n"
    f"{_STEP}",
    "torch": "from resumekit.adapters.torch import Checkpointer\n"
    "ckpt = Checkpointer({directory!r}, model=model, optimizer=optimizer)\n"
    f"{_STEP}",
}

# A script that imports this has those lines.
_USES_RESUMEKIT = "resumekit.checkpointer"

# What has a Trainer: the module that the launcher can wait for.
_TRAINERS = ("transformers.trainer", "lightning.pytorch", "pytorch_lightning")

NOTED_MODULES = (*_LINES, *_TRAINERS, _USES_RESUMEKIT)


def note_import(settings: Mapping[str, str]) -> None:
    """Records that a process has imported a module; an activation.

    Args:
        settings: ``private``, the launcher's directory, and ``module``.
    """
    with suppress(OSError):  # the advice is less precise
        folder = Path(settings["private"], _FOLDER)
        folder.mkdir(exist_ok=True)
        (folder / settings["module"]).touch()


def lines_for_loop(private: Path, directory: str) -> str:
    """The lines that a script's own loop needs; empty where it has them, or uses no framework.

    Args:
        private: the launcher's directory.
        directory: of the run.
    """
    imported = _imported(private)
    if _USES_RESUMEKIT in imported:
        return ""
    used = next((name for name in _LINES if name in imported), None)
    return "" if used is None else _LINES[used].format(directory=directory)


def has_imported_trainer(private: Path) -> bool:
    """Whether a process of the command has imported a Trainer, of which none may train.

    Args:
        private: the launcher's directory.
    """
    return not _imported(private).isdisjoint(_TRAINERS)


def _imported(private: Path) -> set[str]:
    return {path.name for path in (private / _FOLDER).glob("*")}
