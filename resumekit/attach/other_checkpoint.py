"""The path of a checkpoint that the script passes to its framework, beside the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from resumekit.errors import ConfigurationError
from resumekit.imports.recognition import recognise
from resumekit.log import logger, show_messages
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store


def asked_step(path: Any, directory: Path) -> dict[str, Any] | None:
    """The option for what a path names: a step of the run; none for the run directory itself.

    Args:
        path: what the script passes.
        directory: the run directory.

    Returns:
        ``resume_from`` or nothing; None where the path leads elsewhere.
    """
    given, here = Path(path).resolve(), directory.resolve()
    if given.parent == here and StepName.parse(given.name) is not None:
        return {"resume_from": given.name}
    return {} if given == here else None


def refuse_checkpoint(
    argument: str, path: Any, directory: Path, *, framework: str, call: str, weights: str
) -> NoReturn:
    """Raises ConfigurationError: a checkpoint is not of the run, and nothing of it is loaded.

    Args:
        argument: the name of the argument, e.g. ``ckpt_path``.
        path: its value.
        directory: the run directory.
        framework: what may have written it.
        call: what resumes the run.
        weights: what loads the weights of the checkpoint alone.

    Raises:
        ConfigurationError: always, with both and the remedy.
    """
    given, steps = Path(path).resolve(), step_names(directory)
    run = given if StepName.parse(given.name) is None else given.parent
    other = recognise(given)
    found = f"a checkpoint of {framework}" if other is None else str(other)
    remedy = f"Call {call} alone: it resumes from the run directory, or starts the run there"
    if not given.exists():
        found = "no such file or directory"
    elif step_names(run):
        found = f"of another run, in {run}"
        remedy = f"Pass that directory to ResumeCallback: {str(run)!r}"
    elif not steps and other is not None:
        remedy = (
            f"Pass import_from={str(path)!r} to ResumeCallback to continue that run, or begin a "
            f"new one from its weights alone: {weights}"
        )
    raise ConfigurationError(
        f"{argument}={str(path)!r}",
        found=f"{found}, and {directory} {f'holds {steps[0]}' if steps else 'is empty'}",
        expected="a step of that directory, the directory, or nothing",
        remedy=remedy,
    )


def step_names(directory: Path) -> list[StepName]:
    """The steps of a run directory, newest first; none where there is no such directory."""
    return Store(directory).step_names() if directory.is_dir() else []


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
    names = step_names(directory)
    ours = names[0].step if names else 0
    if step is None or step > _last_begun_step(directory, ours):
        found = f"at step {step}" if step is not None else "at an unknown step"
        other = None if names else recognise(Path(path))
        takes_over = ""
        if other is not None:
            takes_over = f", or take it over: {other.command(directory)}"
        raise ConfigurationError(
            f"{argument}={str(path)!r}",
            found=f"{found}, and {directory} is {f'at step {ours}' if names else 'empty: step 0'}",
            expected="a step that the run directory has reached",
            remedy=f"Remove the argument to train from step {ours}, or finish that run without "
            f"resumekit run{takes_over}",
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
