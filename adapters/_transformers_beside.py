"""The Trainer's own checkpoints, beside those of the run: told, refused, or pointed elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from resumekit.adapters._transformers_arguments import saves_by_itself
from resumekit.errors import ConfigurationError
from resumekit.storage import StepName, Store

if TYPE_CHECKING:
    from resumekit import Checkpointer

# transformers 5.23 trainer_utils.py get_last_checkpoint: the folders that it takes for its own.
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def require_own(resume_from_checkpoint: Any, directory: Path, args: Any) -> None:
    """Returns when ``train(resume_from_checkpoint=...)`` asks for what ``train()`` does anyway.

    True means the run directory, which need not hold a checkpoint yet. So does the word, which is
    what a script has from its command line, and the path of the run directory. Scripts that ask
    ``get_last_checkpoint(output_dir)`` give what the run has saved beside.

    Args:
        resume_from_checkpoint: what the user gave.
        directory: the run directory.
        args: the ``TrainingArguments``.

    Raises:
        ConfigurationError: it is the path of a checkpoint.
    """
    if resume_from_checkpoint in (None, False, True):
        return
    path = Path(resume_from_checkpoint)
    if path.resolve() == directory.resolve() or str(path).lower() == "true":
        return
    if saves_by_itself(args) and _held(directory) and path == _newest(args.output_dir):
        return
    _refuse(resume_from_checkpoint, path, directory)


def _refuse(given: Any, path: Path, directory: Path) -> NoReturn:
    held = _held(directory)
    found = "a checkpoint that is not of this run"
    remedy = (
        "Let the stock Trainer finish that run, or begin a new one from its weights alone: "
        "from_pretrained(that path)"
    )
    if path.resolve().parent == directory.resolve():
        found = "one checkpoint of this run"
        remedy = f"Pass resume_from={path.name!r} to ResumeCallback"
    elif held:
        found += f", and {directory} holds {held[0]}"
        remedy = "Call trainer.train() alone: it resumes from the run directory"
    raise ConfigurationError(
        f"resume_from_checkpoint={given!r}", found=found, expected="None or True", remedy=remedy
    )


def passed_over(output_dir: str, step: int, directory: Path) -> str | None:
    """What to tell of a checkpoint of the Trainer's own that is newer than where the run goes on.

    Args:
        output_dir: where the Trainer saves.
        step: the step that the run continues from.
        directory: the run directory.
    """
    newest = _newest(output_dir)
    if newest is None or _number(newest) <= step:
        return None
    return (
        f"{newest} is the Trainer's own and newer than step {step}: it is not read, train() "
        f"resumes from {directory} alone"
    )


def _held(directory: Path) -> list[StepName]:
    return Store(directory).step_names() if directory.is_dir() else []


def _newest(output_dir: str) -> Path | None:
    """The newest of the Trainer's own checkpoints, if there is one."""
    folders = Path(output_dir).glob("checkpoint-*")
    return max((each for each in folders if _number(each)), key=_number, default=None)


def _number(folder: Path) -> int:
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else 0


class BestModel:
    """``best_model_checkpoint``: of a Trainer that saves nothing by itself, the best of the run.

    Args:
        trainer: the ``transformers.Trainer``.
        checkpointer: of the run.
    """

    def __init__(self, trainer: Any, checkpointer: Checkpointer) -> None:
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._is_ours = not saves_by_itself(trainer.args)
        self._may_differ = True

    def take_over(self) -> None:
        """The state is that of the checkpoint; since then folders may have gone or moved."""
        state = self._trainer.state
        if self._is_ours:
            # transformers 5.23 trainer.py _finalize_training deletes all others where it is 1.
            self._trainer.args.save_total_limit = None
            self.point()
        elif state.best_model_checkpoint and not Path(state.best_model_checkpoint).is_dir():
            state.best_model_checkpoint = None  # as _init_training_state does

    def note_metrics(self) -> None:
        """A step was evaluated; its checkpoint follows at the settled point."""
        self._may_differ = True

    def point(self) -> None:
        """Where a step was evaluated, and that is settled, sets the folder of the best model."""
        if self._is_ours and self._may_differ:
            best = self._checkpointer.best()
            folder = None if best is None else str(best.path / "model")
            self._trainer.state.best_model_checkpoint = folder
            self._may_differ = False
