"""Attaches a ``ResumeCallback`` to each Trainer of a process when its ``train()`` is called."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from resumekit.adapters.transformers import ResumeCallback
from resumekit.adapters.transformers import _private as private
from resumekit.adapters.transformers.arguments import newest_checkpoint
from resumekit.attach import (
    Attachment,
    asked_step,
    current_attachment,
    exit_on_usage_error,
    replace_checkpoint,
)
from resumekit.distributed import World
from resumekit.frameworks.training_identity import training_identity


def attach(settings: Any) -> None:
    """Replaces ``Trainer.train``; called after the import of the module that has it.

    Args:
        settings: unused, the launcher passes it.
    """
    from transformers.trainer import Trainer

    attachment = current_attachment()
    if attachment is not None:
        Trainer.train = _attaching(Trainer.train, attachment)  # type: ignore[method-assign]


def _attaching(train: Callable[..., Any], attachment: Attachment) -> Callable[..., Any]:
    @functools.wraps(train)
    def attached_train(trainer: Any, *arguments: Any, **named: Any) -> Any:
        stock_train = partial(train, trainer)
        if not attachment.is_allowed or _is_of_script(trainer, attachment):
            return stock_train(*arguments, **named)
        with exit_on_usage_error():
            return _train(stock_train, trainer, attachment, *arguments, **named)

    return attached_train


def _is_of_script(trainer: Any, attachment: Attachment) -> bool:
    """Whether the script has attached a callback, see ``ResumeCallback.attach``."""
    callback = _callback_of(trainer)
    found = callback is not None and private.TRAIN.name in vars(trainer)
    if callback is not None and found:
        attachment.note_script(callback._directory, logs=trainer.args.process_index == 0)
    return found


def _callback_of(trainer: Any) -> ResumeCallback | None:
    callbacks = trainer.callback_handler.callbacks
    return next((each for each in callbacks if isinstance(each, ResumeCallback)), None)


def _train(
    stock_train: Callable[..., Any],
    trainer: Any,
    attachment: Attachment,
    resume_from_checkpoint: Any = None,
    trial: Any = None,
    *rest: Any,
    **named: Any,
) -> Any:
    callback = _callback_of(trainer)
    if callback is None:
        callback = ResumeCallback(trainer, _directory_of(trainer, attachment), **attachment.options)
        trainer.add_callback(callback)
        # A class that overrides train() has called this one, and must not be entered again.
        del vars(trainer)[private.TRAIN.name]
    elif callback._has_finished:
        callback._begin_another(_directory_of(trainer, attachment))
    path = _path_of(resume_from_checkpoint, trainer.args)
    asked = None if path is None else asked_step(path, callback._directory)
    if path is not None and asked is None:
        logs = trainer.args.process_index == 0
        argument = "resume_from_checkpoint"
        replace_checkpoint(argument, path, _step_of(path), callback._directory, logs=logs)
    return callback._train(stock_train, path if asked else None, trial, *rest, **named)


def _directory_of(trainer: Any, attachment: Attachment) -> Path:
    args = trainer.args.to_dict()
    identity = training_identity(trainer.model, [trainer.train_dataset], args)
    return attachment.directory_of(identity, World.current().on_first)


def _path_of(resume_from_checkpoint: Any, args: Any) -> Path | None:
    """The checkpoint that the Trainer itself would read."""
    if resume_from_checkpoint in (None, False):
        return None
    if str(resume_from_checkpoint).lower() == "true":
        return newest_checkpoint(args.output_dir)
    return Path(resume_from_checkpoint)


def _step_of(path: Path) -> int | None:
    # transformers 5.23 trainer.py train: the Trainer reads the same file.
    with suppress(OSError, ValueError, KeyError):
        return int(json.loads((path / "trainer_state.json").read_text())["global_step"])
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match and path.is_dir() else None
