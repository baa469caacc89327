"""TensorBoard: the event files of a SummaryWriter, of torch or tensorboardX.

``purge_step`` is not used: it is one number for all tags, where a script may count steps, samples
and epochs, and it only hides rows. Files that were written after the save are removed instead, and
longer ones cut to the size that they had then; each ends with a whole row there, as it was flushed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Files that this process has made have a later time in their name.
_STARTED = int(time.time())
_FILES = "events.out.tfevents.*"
_MARK = ".resumekit-"


class EventFiles:
    """The event files of one SummaryWriter, and of the folders that ``add_scalars`` makes.

    Those that are written after the first batch have the id of the run at the end of their name:
    a directory may have the files of other runs, too.

    Args:
        writer: the SummaryWriter.
        run_id: of the run.
        holder: what a framework logs with, if that has the writer.
    """

    kind, name = "tensorboard", "TensorBoard"

    def __init__(self, writer: Any, run_id: str, holder: Any = None) -> None:
        self._writer = writer
        self._suffix = f"{_MARK}{run_id[:8]}"
        self._holder = holder

    @staticmethod
    def may_follow(writer: Any) -> bool:
        """Whether it is open, and no other run of this process uses it."""
        return writer.all_writers is not None and _MARK not in writer.filename_suffix

    @property
    def run(self) -> str:
        """The directory of the event files."""
        return os.path.abspath(str(self._writer.log_dir))

    def begin(self) -> None:
        """What was logged before the first batch stays in a file of its own."""
        self._writer.close()  # what is logged next opens a new file, in torch and tensorboardX
        self._writer.filename_suffix += self._suffix

    def mark(self) -> dict[str, Any]:
        """The size of each file."""
        self._writer.flush()
        directory = Path(self.run)
        sizes = {
            path.relative_to(directory).as_posix(): path.stat().st_size
            for path in _event_files(directory, self._suffix)
        }
        return {"files": sizes, "version": getattr(self._holder, "version", None)}

    def resume(self, mark: Mapping[str, Any], *, cuts: bool) -> None:
        """Cuts the files to the mark, and writes further ones into the same directory.

        Raises:
            FileNotFoundError: the directory is not there.
        """
        here, there = Path(self.run), Path(mark["run"])
        self.begin()
        os.stat(there)
        for path in _event_files(here, ""):
            if _is_of_this_process(path):
                remove(path)
        for path in _event_files(there, self._suffix) if cuts else ():
            size = mark["files"].get(path.relative_to(there).as_posix())
            if size is None:
                remove(path)
            else:
                os.truncate(path, size)
        self._writer.log_dir = str(there)
        if self._holder is not None:
            move_holder(self._holder, here, there, mark["version"])


def _event_files(directory: Path, suffix: str) -> Iterator[Path]:
    for pattern in (_FILES, f"*/{_FILES}"):
        yield from list(directory.glob(f"{pattern}{suffix}"))


def _is_of_this_process(path: Path) -> bool:
    """Whether the name says so: events.out.tfevents.<time>.<host>.<process>.<number>."""
    started, _, rest = path.name[len(_FILES) - 1 :].partition(".")
    process = f"{socket.gethostname()}.{os.getpid()}."
    return rest.startswith(process) and started.isdecimal() and int(started) >= _STARTED


def remove(path: Path) -> None:
    """Removes a file, and its directory where that is empty then."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


def move_holder(holder: Any, here: Path, there: Path, version: Any) -> None:
    """Lets what a framework logs with use another directory.

    Args:
        holder: it.
        here: the directory of this launch, which is left.
        there: the directory to use.
        version: what Lightning calls that directory.
    """
    attributes = vars(holder)
    # transformers 5.23 TensorBoardCallback.logging_dir, accelerate 1.15 TensorBoardTracker.
    # lightning 2.6 loggers have the number of the directory only.
    for name, value in list(attributes.items()):
        if isinstance(value, (str, Path)) and os.path.abspath(value) == str(here):
            setattr(holder, name, str(there))
    if "_version" in attributes:
        attributes["_version"] = version
        if here != there:
            remove(here / "hparams.yaml")
