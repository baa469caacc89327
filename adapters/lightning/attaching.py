"""Attaches a ``ResumeCallback`` to each Trainer of a process when its ``fit()`` is called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from resumekit.adapters.lightning import ResumeCallback
from resumekit.adapters.lightning import _private as private
from resumekit.adapters.lightning._private import Callback
from resumekit.attach import (
    Attachment,
    current_attachment,
    exit_on_usage_error,
    replace_checkpoint,
)
from resumekit.distributed import World
from resumekit.frameworks.training_identity import training_identity


def attaching_callbacks() -> list[Any]:
    """What a new Trainer gets in a process of the command."""
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
        if stage != "fit" or trainer.fast_dev_run or self not in trainer.callbacks:
            return  # of two distributions with the entry point the first one has attached
        others = [e for e in trainer.callbacks if not isinstance(e, AttachingCallback)]
        trainer.callbacks = others
        for each in others:
            if isinstance(each, ResumeCallback):
                self._attachment.note_script(each.directory, logs=trainer.is_global_zero)
                return
        with exit_on_usage_error():
            directory = _directory_of(trainer, pl_module, self._attachment)
            callback = _AttachedCallback(directory, **self._attachment.options)
            trainer.callbacks = [*others, callback]
            callback.setup(trainer, pl_module, stage)  # Lightning goes through the former list


class _AttachedCallback(ResumeCallback):
    """In a script that may still pass the checkpoints of Lightning's own."""

    def _pass_over(self, trainer: Any, path: Any, *rest: Any, **named: Any) -> None:
        with exit_on_usage_error():
            step = _step_of(trainer, path, *rest, **named)
            logs = trainer.is_global_zero
            replace_checkpoint("ckpt_path", path, step, self.directory, logs=logs)


def _directory_of(trainer: Any, module: Any, attachment: Attachment) -> Path:
    names = ("accumulate_grad_batches", "gradient_clip_val", "precision")
    attributes = {**_attributes(trainer.datamodule), **_attributes(module)}
    settings = {**{name: getattr(trainer, name) for name in names}, **attributes}
    leaves, _ = tree_flatten(private.TRAIN_SOURCE.of(trainer).instance)  # loaders, or their maker
    datasets = [each.dataset for each in leaves if hasattr(each, "dataset")]
    datasets += [each for each in attributes.values() if isinstance(each, Dataset)]
    identity = training_identity(module, datasets, settings)
    return attachment.directory_of(identity, World.current().on_first)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes and hyperparameters of a module, or of what makes its data."""
    return {} if value is None else {**vars(value), **dict(getattr(value, "hparams", {}))}


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
