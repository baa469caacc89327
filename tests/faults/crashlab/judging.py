"""What a resume from a mutated checkpoint comes to, judged without asking the library."""

from __future__ import annotations

import gc
import logging
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from crashlab.content import Mutation
from resumekit import ResumeReport
from resumekit.errors import ResumekitError

NEWEST, OLDER = "step-00000003", "step-00000001"

# The outcomes that the library promises never to have.
PROGRAM_ERROR = "the program's own error"  # of its code, with a value of its own that any may be
AT_A_BATCH = ": at a batch: "  # after all was loaded
USERS = ("extras", "variables", "callbacks/hooks")
BROKEN = ("untyped error", "typed error after live objects had changed", "another run, no warning")

# What decides which batch and which step come next: no other value of it may load.
POSITIONS = ("progress.", "data.")
# Parts of it that are states of generators and of the user's loaders: another state is legal.
STATES = (".generators.", ".start.", ".before.", ".loader.", ".copied.", ".objects.", ".fetches.")


class Launch(Protocol):
    """One launch of a program: its live objects, and its training."""

    @property
    def report(self) -> ResumeReport | None:
        """On the resume; None until all of it was loaded."""

    def digest(self) -> str:
        """Of every live object that a resume may change; found without the library."""

    def run(self) -> Any:
        """Resumes and trains; gives what the training has seen after the newest checkpoint."""

    def abandon(self) -> None:
        """An error has ended it."""


class Judge:
    """Resumes one program from mutated copies of its run directory.

    Args:
        make: a launch in a run directory, with other initial values than the run began with.
        pristine: the run directory.
        scratch: an empty directory.
        code: the name of the file that has the program.
        positions: how the names of values begin that decide what comes next.
    """

    def __init__(
        self,
        make: Callable[[Path], Launch],
        pristine: Path,
        scratch: Path,
        *,
        code: str = "programs.py",
        positions: tuple[str, ...] = POSITIONS,
    ) -> None:
        self._make, self._pristine, self._code = make, pristine, code
        self._folder, self._positions = scratch / "judged", positions
        outcome, self.expected = "", ""
        outcome = self.outcome(lambda step: None)
        if outcome != "another run":
            raise AssertionError(f"the unchanged checkpoint: {outcome}")
        self.expected = self._reached

    def judged(self, chosen: Iterable[Mutation]) -> tuple[Counter[str], list[str]]:
        """How often each outcome came, and the lines of those that must not."""
        counts: Counter[str] = Counter()
        wrong = []
        gc.collect()
        gc.freeze()  # what was imported is not looked at again in each launch: 2.5 times as fast
        for each in chosen:
            outcome = self.outcome(each.apply)
            counts[outcome.partition(":")[0]] += 1
            if self._is_broken(each, outcome) or self._is_silently_wrong(each, outcome):
                wrong.append(f"{each}: {outcome}")
        gc.unfreeze()
        return counts, wrong

    def _is_broken(self, mutation: Mutation, outcome: str) -> bool:
        word = outcome.partition(":")[0]
        # All of it has loaded, and the program has no use for a value of the right type.
        loads = AT_A_BATCH in outcome and not self._decides(mutation)
        is_users = mutation.path[0] in USERS or "attributes" in mutation.path[0]
        # Of Lightning: how the program has called self.log(), which must not change in an epoch.
        is_users = is_users or ".meta." in str(mutation)
        return word in BROKEN or (word == PROGRAM_ERROR and not (loads or is_users))

    def _is_silently_wrong(self, mutation: Mutation, outcome: str) -> bool:
        return self._decides(mutation) and outcome == "another run"

    def _decides(self, mutation: Mutation) -> bool:
        path = str(mutation)
        return path.startswith(self._positions) and not any(each in path for each in STATES)

    def outcome(self, mutate: Callable[[Path], None]) -> str:
        """In words; details follow after a colon."""
        copy = self._folder / "run"
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._pristine, copy)
        mutate(copy / NEWEST)
        launch = self._make(copy)
        before = launch.digest()
        with _Warnings() as warnings:
            try:
                seen = launch.run()
                self._reached = f"{launch.digest()} {seen}"
            except Exception as error:  # noqa: BLE001 - whatever comes is counted
                launch.abandon()
                return self._word_of(error, launch, before)
        assert launch.report is not None
        rejected = launch.report.rejected
        if self._reached == self.expected:
            return f"passed over: {rejected[0].reason}" if rejected else "equal"
        if rejected:
            return f"another run from the older checkpoint: {rejected[0].reason}"
        return f"another run: {warnings.lines[0]}" if warnings.lines else "another run"

    def _word_of(self, error: Exception, launch: Launch, before: str) -> str:
        if isinstance(error, ResumekitError):
            if launch.report is not None:
                return f"refused at the first batch: {error}"
            if launch.digest() == before:
                return f"refused: {error}"
            # The load of an object of the program raises, with a value that it has saved itself.
            is_of_program = error.__cause__ is not None and self._is_of_program(error.__cause__)
            return f"{PROGRAM_ERROR if is_of_program else BROKEN[1]}: {error}"
        if launch.report is None:
            return f"{BROKEN[0]}: {error!r}"
        word = PROGRAM_ERROR if self._is_of_program(error) else BROKEN[0]
        return f"{word}{AT_A_BATCH}{error!r}"

    def _is_of_program(self, error: BaseException) -> bool:
        """Whether the library was not asked for anything when it was raised."""
        files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        named = (n for n, each in enumerate(reversed(files)) if each.name == self._code)
        inner = next(named, len(files))
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
