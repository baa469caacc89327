"""Attaches a ``ResumeCallback`` to each Trainer of a process when its ``fit()`` is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from resumekit.adapters.lightning import OF_TUNERS, ResumeCallback
from resumekit.adapters.lightning import _private as private
from resumekit.adapters.lightning._private import Callback
from resumekit.attach import (
    Attachment,
    current_attachment,
    exit_on_usage_error,
    replace_checkpoint,
)
from resumekit.requirements import check_tested, faults


def callbacks() -> list[Any]:
    """What a new Trainer gets: an entry point, which Lightning calls."""
    attachment = current_attachment()
    if attachment is None or not attachment.is_allowed:
        return []
    return [AttachingCallback(attachment)]


class AttachingCallback(Callback):
    """Is replaced by a ``ResumeCallback`` when a fit begins, unless the script has one.

    Args:
        attachment: of the process.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The Trainer trains; one that only evaluates does not come here with this stage."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        others = [each for each in trainer.callbacks if each is not self]
        trainer.callbacks = others
        for each in others:
            if isinstance(each, ResumeCallback):
                self._attachment.note_script(each.directory, logs=trainer.is_global_zero)
                return
        with exit_on_usage_error():
            directory = self._attachment.next_directory()
            callback = ResumeCallback(directory, **self._attachment.options)
            trainer.callbacks = [*others, callback]
            resume_start = private.RESUME_START
            found = faults(trainer, [resume_start])
            check_tested("lightning", found=found, strict=False, warns=trainer.is_global_zero)
            replaced = partial(_resume_start, resume_start.of(trainer), trainer, directory)
            resume_start.write(trainer, replaced)
            callback.setup(trainer, pl_module, stage)  # Lightning goes through the former list


def _resume_start(
    resume_start: Callable[..., None],
    trainer: Any,
    directory: Path,
    checkpoint_path: Any = None,
    *rest: Any,
    **named: Any,
) -> None:
    """Reads no checkpoint of Lightning's own in a fit."""
    fits = trainer.state.fn == "fit"
    if not checkpoint_path or not fits or Path(checkpoint_path).name.startswith(OF_TUNERS):
        resume_start(checkpoint_path, *rest, **named)
        return
    with exit_on_usage_error():
        step = _step_of(trainer, checkpoint_path, *rest, **named)
        logs = trainer.is_global_zero
        replace_checkpoint("ckpt_path", checkpoint_path, step, directory, logs=logs)
    resume_start(None)


def _step_of(trainer: Any, path: Any, *rest: Any, **named: Any) -> int | None:
    # A strategy that writes a folder loads it into the live objects, so only its name is read.
    if Path(path).is_dir():
        match = re.search(r"step=(\d+)", Path(path).name)
        return int(match[1]) if match else None
    checkpoint = trainer.strategy.load_checkpoint(path, *rest, **named)
    # A step here is a batch after which an optimizer has stepped; Lightning counts the steps of
    # each optimizer, and batches: lightning 2.6 loops/training_epoch_loop.py.
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    return min(int(checkpoint["global_step"]), int(batches))
