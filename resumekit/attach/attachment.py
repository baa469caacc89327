"""Which Trainers of a process get a callback, and in which directory each of them saves."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from resumekit.attach.settings import AttachSettings, private_directory, read_settings
from resumekit.attach.trainings import KnownRuns, Training
from resumekit.errors import ConfigurationError
from resumekit.log import logger, show_messages
from resumekit.storage.io.file_system import directory_errors

EXIT_USAGE = 2

OnFirst: TypeAlias = Callable[[Callable[[], Path]], Path]

# Names the process that trains. What that process starts is no part of the training.
_TRAINING_PROCESS = "PYTHONRESUMEKIT_TRAINS"

# The same of a loop that the user writes.
_LOOP_PROCESS = "PYTHONRESUMEKIT_LOOP"

_PROCESSES, _LOOPS = "processes", "loops"


class Attachment:
    """The Trainers of this process that are attached.

    Args:
        settings: of the command.
        private: the launcher's directory.
    """

    def __init__(self, settings: AttachSettings, private: Path) -> None:
        self._settings = settings
        self._private = private
        self._runs: KnownRuns | None = None  # on the first rank

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``ResumeCallback`` that the user gave."""
        return self._settings.options

    @property
    def is_allowed(self) -> bool:
        """Whether this process may attach: no process that it descends from trains."""
        return os.environ.get(_TRAINING_PROCESS, str(os.getpid())) == str(os.getpid())

    def directory_of(self, training: Mapping[str, Any], on_first: OnFirst) -> Path:
        """The run directory of a training that begins. Collective.

        Args:
            training: the fields of a ``Training``.
            on_first: runs a function on the first rank and gives its result to all.

        Raises:
            ConfigurationError: which run it continues is not known.
        """
        directory = on_first(lambda: self._begin(Training(**training)))
        self.note_training(directory)
        return directory

    def _begin(self, training: Training) -> Path:
        if self._runs is None:
            self._runs = KnownRuns(Path(self._settings.directory))
        return self._runs.begin(training)

    def note_training(self, directory: Path) -> None:
        """Records that a Trainer trains in this process, for the supervisor.

        Args:
            directory: of its run.

        Raises:
            DirectoryError: it cannot be written, as on a full disk.
        """
        os.environ[_TRAINING_PROCESS] = str(os.getpid())
        folder = self._private / _PROCESSES
        with directory_errors(folder, "be written"), _note(folder).open("a") as file:
            file.write(f"{directory.absolute()}\n")

    def note_script(self, directory: Path, *, logs: bool) -> None:
        """Records that the script has a ``ResumeCallback``, so that none is attached.

        Args:
            directory: of its run.
            logs: whether this rank logs.
        """
        self.note_training(directory)
        if logs:
            show_messages()
            logger.info("the script has a ResumeCallback in %s: none is attached", directory)


@functools.cache
def current_attachment() -> Attachment | None:
    """The attachment of this process, always the same one; None where nothing is to be attached."""
    private = private_directory()
    return None if private is None else Attachment(read_settings(private), private)


def note_loop(settings: Mapping[str, str]) -> None:
    """Records that this process has a Checkpointer, unless one above it has; an activation.

    Args:
        settings: ``private``, the launcher's directory.
    """
    if os.environ.setdefault(_LOOP_PROCESS, str(os.getpid())) == str(os.getpid()):
        _note(Path(settings["private"], _LOOPS)).touch()


def training_processes(private: Path) -> list[int]:
    """The ids of the processes on this node that train: with a Trainer, else a Checkpointer."""
    for name in (_PROCESSES, _LOOPS):
        notes = (path.name.rpartition("@") for path in (private / name).glob("*"))
        if found := [int(pid) for host, _, pid in notes if host == socket.gethostname()]:
            return sorted(found)
    return []


def _note(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / f"{socket.gethostname()}@{os.getpid()}"


def run_directories(private: Path) -> set[Path]:
    """The run directories of all Trainers that have begun to train, on any node."""
    notes = (private / _PROCESSES).glob("*")
    return {Path(line) for note in notes for line in note.read_text().splitlines()}


@contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Ends the process with the exit code of usage errors and one line, without a traceback."""
    try:
        yield
    except ConfigurationError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        raise SystemExit(EXIT_USAGE) from None
