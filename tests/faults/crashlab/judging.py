"""What a resume from a mutated checkpoint comes to, judged without asking the library."""

from __future__ import annotations

import logging
import shutil
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from crashlab.programs import NEWEST, Program, apart
from resumekit.errors import ResumekitError

UNTIL = 9

# The outcomes that the library promises never to have.
PROGRAM_ERROR = "the program's own error"  # of its code, with a value of its own that any may be
BROKEN = ("untyped error", "typed error after live objects had changed", "another run, no warning")


class Judge:
    """Resumes one program from mutated copies of its run directory.

    Args:
        kind: of the program.
        pristine: its run directory.
        scratch: an empty directory.
    """

    def __init__(self, kind: str, pristine: Path, scratch: Path) -> None:
        self._kind, self._pristine, self._copy = kind, pristine, scratch / "run"
        outcome, self._expected = "", ""
        outcome = self.outcome(lambda step: None)
        if outcome != "another run":
            raise AssertionError(f"the unchanged checkpoint: {outcome}")
        self._expected = self._reached

    def outcome(self, mutate: Callable[[Path], None]) -> str:
        """In words; details follow after a colon."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._pristine, self._copy)
        mutate(self._copy / NEWEST)
        program = Program(self._kind, self._copy, seed=9)
        before = program.digest()
        with _Warnings() as warnings:
            try:
                report = program.checkpointer.resume()
            except ResumekitError as error:
                program.checkpointer._loop.abandon()
                if program.digest() != before:
                    return f"{BROKEN[1]}: {error}"
                return f"refused: {error}"
            except Exception as error:  # noqa: BLE001 - whatever comes is counted
                program.checkpointer._loop.abandon()
                return f"{BROKEN[0]}: {error!r}"
            try:
                variables = apart(partial(program.train, until=UNTIL))
            except ResumekitError as error:
                return f"refused at the first batch: {error}"
            except Exception as error:  # noqa: BLE001 - the same
                word = PROGRAM_ERROR if _is_of_program(error) else BROKEN[0]
                return f"{word}: at a batch: {error!r}"
        self._reached = f"{program.digest()} {variables}"
        if self._reached == self._expected:
            names = [each.reason for each in report.rejected]
            return f"passed over: {names[0]}" if names else "equal"
        if report.rejected:
            return f"another run from the older checkpoint: {report.rejected[0].reason}"
        return f"another run: {warnings.lines[0]}" if warnings.lines else "another run"


def _is_of_program(error: Exception) -> bool:
    """Whether the library was not asked for anything when it was raised."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    inner = next(n for n, each in enumerate(reversed(files)) if each.name == "programs.py")
    return not any("resumekit" in each.parts for each in files[len(files) - inner :])


class _Warnings(logging.Handler):
    """Collects the warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> _Warnings:
        logging.getLogger("resumekit").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("resumekit").removeHandler(self)
