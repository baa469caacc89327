"""Runs a shape uninterrupted and crashed, and judges by what the shape itself recorded.

Every launch is a process of its own, so globals, class attributes, default arguments and random
generators are as a script finds them. The library is asked for nothing: which step a launch begins
with follows from the steps after which the ones before crashed, and from ``save_every``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
MODULES = (
    "shapes_of_values",
    "shapes_of_objects",
    "shapes_of_loops",
    "shapes_of_learning",
    "shapes_of_data",
    "shapes_of_libraries",
    "shapes_of_epochs",
    "shapes_without_state",
)
PRELOAD = ("no_power_cut", *DEFAULT_PRELOAD, "tiny_training", *MODULES)
LAUNCH_SECONDS = 60.0
# Saved after step 9, crashed after 10: the second launch crashes one step after its resume, the
# third one behind a save of its own, and the fourth one finishes.
KILLS, SAVE_EVERY = (10, 10, 13), 3
# The same with saves where an epoch ends.
KILLS_OF_EPOCHS, SAVE_EVERY_EPOCH = (8, 16), 7
# What a start or a first save reports, it reports before this step.
FIRST_SAVED_STEP = 4


class Verdict(Enum):
    """What became of a shape that was crashed and launched again."""

    EXACT = "exact"  # every executed step is that of the uninterrupted run, bit for bit
    REPORTED = "reported"  # a warning named the state in time, and strict=True refuses to train
    REFUSED = "refused"  # a launch that should resume raised an error of the library
    SILENT = "silent"  # it differs, and nothing was reported in time


@dataclass(frozen=True)
class Launch:
    """What one launch recorded.

    Args:
        steps: the loss and the digest of the weights after each of its steps.
        warnings: of the library, each with the number of steps that were recorded before.
        end: ``finished``, ``crashed``, ``refused`` (by a ResumekitError) or ``failed``.
        error: the text of the error.
    """

    steps: tuple[tuple[str, ...], ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    end: str = "failed"
    error: str = ""

    @classmethod
    def read(cls, path: Path) -> Launch:
        """What the process appended to its file."""
        steps: list[tuple[str, ...]] = []
        warnings: list[tuple[int, str]] = []
        end = {"end": "failed", "error": "the process died"}
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if "step" in line:
                steps.append(tuple(line["step"]))
            elif "end" in line:
                end = line
            elif line["level"] == "WARNING":
                warnings.append((len(steps), line["message"]))
        return cls(tuple(steps), tuple(warnings), **end)

    def reports(self, names: Sequence[str]) -> bool:
        """Whether a warning before step 4 contains one of the names."""
        return any(n < FIRST_SAVED_STEP and _contains(text, names) for n, text in self.warnings)

    def is_refused(self, names: Sequence[str]) -> bool:
        """Whether it ended before step 4 with an InexactError that contains one of the names."""
        in_time = self.end == "refused" and len(self.steps) < FIRST_SAVED_STEP
        return in_time and self.error.startswith("InexactError") and _contains(self.error, names)

    def __str__(self) -> str:
        messages = [text for _, text in self.warnings] + [self.error] * bool(self.error)
        return f"{self.end} after {len(self.steps)} steps {messages or ''}"


@dataclass(frozen=True)
class Judgement:
    """The verdict on a shape, and what it is based on.

    Args:
        verdict: see ``Verdict``.
        difference: the first step that differs; empty where none does.
        strict: the first launch, with ``strict=True``.
        launches: those that were crashed, and the last one; strict unless the first was refused.
    """

    verdict: Verdict
    difference: str
    strict: Launch = field(repr=False)
    launches: tuple[Launch, ...] = field(repr=False)

    @property
    def noise(self) -> list[str]:
        """All that was reported: nothing of it is right for a run that is exact."""
        warnings = [text for each in self.launches for _, text in each.warnings]
        return [self.strict.error] * (self.strict.end == "refused") + warnings

    def __str__(self) -> str:
        lines = [f"{self.verdict.value}: {self.difference or 'no step differs'}"]
        lines.append(f"  strict: {self.strict}")
        lines += [f"  launch {number}: {each}" for number, each in enumerate(self.launches, 1)]
        return "\n".join(lines)


def assert_verdict(judgement: Judgement, *allowed: Verdict) -> None:
    """Fails unless the verdict is one of these; nothing may be reported of an exact run.

    A run that was reported must differ, or its shape has no state that decides.
    """
    is_exact = judgement.verdict is Verdict.EXACT
    is_right = not judgement.noise if is_exact else bool(judgement.difference)
    is_allowed = judgement.verdict in allowed and is_right
    assert is_allowed, str(judgement)


class ForkedLaunches:
    """Starts each launch as a fork of one warm server."""

    def __init__(self) -> None:
        self._server = ForkServer(PRELOAD, environment())

    def __call__(self, directory: Path, given: dict[str, Any], log: Path) -> Launch:
        """What one launch did.

        Args:
            directory: the run directory.
            given: the keyword arguments of ``tiny_training.launch``.
            log: the file for stdout and stderr.
        """
        path = Path(given["path"])
        path.touch()
        task = Task("tiny_training:launch", str(directory), given, {}, str(log))
        ended = self._server.run([task], LAUNCH_SECONDS)
        assert ended, f"{given['shape']}: a launch did not end"
        return Launch.read(path)

    def close(self) -> None:
        """Ends the server."""
        self._server.close()


class Judge:
    """Judges shapes; keeps the uninterrupted run of each.

    Args:
        directory: an empty directory for all that the shapes write.
        execute: runs one launch, see ``ForkedLaunches``.
    """

    def __init__(
        self, directory: Path, execute: Callable[[Path, dict[str, Any], Path], Launch]
    ) -> None:
        self.directory = directory
        self._execute = execute
        self._num_launches = 0
        self._references: dict[str, Launch] = {}

    def verdict(
        self,
        shape: str,
        *,
        names: Sequence[str] = (),
        kills: Sequence[int] = KILLS,
        save_every: int = SAVE_EVERY,
        **options: Any,
    ) -> Judgement:
        """The judgement of a shape.

        Args:
            shape: ``module:function``.
            names: how a report may name what decides in the shape; empty for any report.
            kills: the step after which each launch crashes, counted from the run's start.
            save_every: of the crashed run. The uninterrupted one saves at its end only, so a save
                that changes the training is seen as well.
            **options: of the Checkpointer, for the crashed run.

        Raises:
            AssertionError: the shape fails without any resume, or does not reach a kill.
        """
        reference = self._reference(shape)
        options |= {"save_every": save_every, "strict": True}
        launches = self._run(shape, kills, options)
        strict = launches[0]
        if strict.end == "refused":
            launches = self._run(shape, kills, {**options, "strict": False})
        difference = _difference(reference, launches, kills, save_every)
        if strict.is_refused(names) and launches[0].reports(names):
            verdict = Verdict.REPORTED
        elif launches[-1].end == "refused":
            verdict = Verdict.REFUSED
        else:
            verdict = Verdict.SILENT if difference else Verdict.EXACT
        return Judgement(verdict, difference, strict, tuple(launches))

    def _reference(self, shape: str) -> Launch:
        """The uninterrupted run."""
        if shape not in self._references:
            launch = self._launch(shape, self._new_directory(), None, {"save_every": None})
            assert launch.end == "finished", f"{shape}, uninterrupted: {launch}"
            self._references[shape] = launch
        return self._references[shape]

    def _run(self, shape: str, kills: Sequence[int], options: dict[str, Any]) -> list[Launch]:
        """One launch for each kill and one that finishes; ends early where one raises an error."""
        directory = self._new_directory()
        launches: list[Launch] = []
        for start, kill in zip(_starts(kills, options["save_every"]), (*kills, None), strict=True):
            crash_after = None if kill is None else kill - start
            launch = self._launch(shape, directory, crash_after, options)
            launches.append(launch)
            if launch.end == "refused" or (launch.end == "failed" and start):
                break
            is_right = launch.end == ("finished" if kill is None else "crashed")
            # A run whose state was lost may end at another step, but not before its first resume.
            assert is_right or start, f"{shape}, crashed after {kill}: {launch}"
        return launches

    def _launch(
        self, shape: str, directory: Path, crash_after: int | None, options: dict[str, Any]
    ) -> Launch:
        self._num_launches += 1
        path = self.directory / f"launch-{self._num_launches:05d}.jsonl"
        given = {"shape": shape, "path": str(path), "crash_after": crash_after, "options": options}
        return self._execute(directory, given, path.with_suffix(".log"))

    def _new_directory(self) -> Path:
        return self.directory / f"run-{self._num_launches:05d}"


def environment() -> dict[str, str]:
    """Of every launch: one thread, no settings of the library, and the modules of this folder."""
    folders = (ROOT, FOLDER, ROOT / "integration" / "shared")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("RESUMEKIT_")},
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }


def _starts(kills: Sequence[int], save_every: int) -> list[int]:
    """The number of steps that each launch resumes at: the newest save of all before it.

    A save of step n is made when step n + 1 asks for its batch.
    """
    saved = [(kill - 1) // save_every * save_every for kill in kills]
    return [max((0, *saved[:number])) for number in range(len(kills) + 1)]


def _difference(
    reference: Launch, launches: Sequence[Launch], kills: Sequence[int], save_every: int
) -> str:
    """The first executed step that is not the uninterrupted run's; empty where all are."""
    starts = _starts(kills, save_every)
    for number, (start, launch) in enumerate(zip(starts, launches, strict=False), 1):
        expected = reference.steps[start:]
        for index, found in enumerate(launch.steps):
            if index == len(expected) or found != expected[index]:
                return f"step {start + index + 1} of launch {number} differs"
        if launch.end == "failed":
            return f"launch {number} failed"
    if launches[-1].end == "finished" and len(launches) == len(starts):
        num_steps = starts[-1] + len(launches[-1].steps)
        is_short = num_steps != len(reference.steps)
        return f"it ended after step {num_steps} of {len(reference.steps)}" if is_short else ""
    return "it did not reach its end"


def _contains(text: str, names: Sequence[str]) -> bool:
    return not names or any(re.search(rf"(?<!\w){re.escape(n)}(?!\w)", text) for n in names)
