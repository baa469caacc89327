"""A checkpoint of the framework's own that the script passes, compared with the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resumekit.errors import ConfigurationError
from resumekit.log import logger, show_messages
from resumekit.storage.store import Store


def replace_checkpoint(
    argument: str, path: Any, step: int | None, directory: Path, *, logs: bool
) -> None:
    """Raises ConfigurationError unless the run directory is to be used instead of a checkpoint.

    It is when it has the same or a later step, or when its journal shows that this run came to the
    checkpoint's step itself: the script saved it after the last save here, and then died.

    Args:
        argument: the name of the argument, e.g. ``ckpt_path``.
        path: its value.
        step: the optimizer step of that checkpoint; None if it is unknown.
        directory: the run directory.
        logs: whether this rank logs.

    Raises:
        ConfigurationError: resuming here would lose steps of another run.
    """
    names = Store(directory).step_names() if directory.is_dir() else []
    ours = names[0].step if names else 0
    if step is None or step > _last_begun_step(directory, ours):
        found = f"at step {step}" if step is not None else "at an unknown step"
        raise ConfigurationError(
            f"{argument}={str(path)!r}",
            found=f"{found}, and {directory} is {f'at step {ours}' if names else 'empty: step 0'}",
            expected="a step that the run directory has reached",
            remedy=f"Remove the argument to train from step {ours}, or finish that run without "
            "resumekit run",
        )
    if logs:
        show_messages()
        resumes = f"resumes from step {ours}" if names else "starts from step 0"
        logger.info("%s=%s (step %d) is not read: %s %s", argument, path, step, directory, resumes)


def _last_begun_step(directory: Path, saved: int) -> int:
    """The step after the newest checkpoint and the newest record of the journal.

    A record is written when all code of its step has run, also what saves a checkpoint.
    """
    from resumekit.record.journal import DIRECTORY, find_attempts  # loads torch

    attempts = find_attempts(directory / DIRECTORY, rank=0)
    done = [record.step for each in attempts for record in each.records()]
    return max([saved, *done]) + bool(attempts)
