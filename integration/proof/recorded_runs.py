"""Runs of a script that the recorder looks at, killed at one step and resumed in several ways."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from faulty_resumes import SAVE_EVERY

from resumekit.prove.causes import Finding, find_causes
from resumekit.prove.comparison import constant_components
from resumekit.prove.execution import write_positions
from resumekit.record.moments import CHECKPOINT, launch_directory, of_trace, read_trace, records_of
from resumekit.record.trace import INJECT_VARIABLE, TRACE_VARIABLE
from resumekit.recorder import RecorderSettings
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90.0


@dataclass(frozen=True)
class Wrong:
    """How a resume is wrong; without a fault and a component it is not.

    Args:
        fault: of ``faulty_resumes``.
        without: a component that the library is not to restore.
        amount: how far the fault goes.
    """

    fault: str = ""
    without: str = ""
    amount: int = 1


class RecordedRuns:
    """The runs of one script; use it as a context manager.

    Args:
        directory: an empty one.
        script: resumes by itself from ``--directory``.
        preload: modules that each launch finds imported.
    """

    def __init__(self, directory: Path, script: Path, preload: Sequence[str]) -> None:
        self._directory = directory
        self._script = script
        self._killed: int | None = None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "integration" / "shared"), os.environ.get("PYTHONPATH", "")]
        )
        self._server = ForkServer(preload, environment)

    def __enter__(self) -> RecordedRuns:
        try:
            self._launch(self._directory / "reference", 0, Wrong())
        except BaseException:
            self._server.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()

    def components(self) -> list[str]:
        """What the library saves and could leave out, but for what never changes."""
        attempts = read_trace(self._directory / "reference" / "trace")[0]
        saved = records_of(attempts, CHECKPOINT)
        every = dict.fromkeys(key for record in saved for key in record.components)
        return [key for key in every if key not in constant_components(attempts)]

    def kill(self, step: int) -> None:
        """A run that is killed right after a step; the next resumes continue it."""
        run, aside = self._directory / "killed", self._directory / "killed-aside"
        for each in (run, aside):
            shutil.rmtree(each, ignore_errors=True)
        self._launch(run, 0, Wrong(), kill=step)
        run.rename(aside)
        self._killed = step

    def resume(self, wrong: Wrong) -> None:
        """The killed run once more, resumed in this way."""
        assert self._killed is not None
        run = self._directory / "killed"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self._directory / "killed-aside", run, symlinks=True)
        self._launch(run, 1, wrong)

    def causes(self, seen_by: str = "records") -> list[Finding]:
        """What the last resume is found to have lost, without what follows from it.

        Args:
            seen_by: ``"records"`` of the recorder, or the ``"trace"`` of the script itself.
        """
        runs = (self._directory / name / seen_by for name in ("reference", "killed"))
        reference, judged = (of_trace(read_trace(run)[0]) for run in runs)
        found = find_causes(reference, judged)
        return [each for each in found if each.cause.name != "CONSEQUENCE"]

    def _launch(self, run: Path, number: int, wrong: Wrong, *, kill: int | None = None) -> None:
        (run / "files").mkdir(parents=True, exist_ok=True)
        records = run / "records"
        positions = ""
        if number:
            known = [self._directory / "reference" / "records", records]
            positions = str(write_positions(run / "positions", known))
        settings = RecorderSettings(
            directory=str(launch_directory(records, number)),
            positions=positions,
            kill="" if kill is None else f"step:{kill}",
        )
        options = {
            "script": str(self._script),
            "settings": settings.as_dict(),
            "history": str(self._directory / "history"),
            "fault": wrong.fault,
            "step": resumed_step(self._killed or 0),
            "amount": wrong.amount,
        }
        environment = {
            TRACE_VARIABLE: str(launch_directory(run / "trace", number)),
            INJECT_VARIABLE: wrong.without or None,
        }
        log = run / f"launch-{number}.txt"
        target = f"{Path(__file__).with_name('faulty_resumes.py')}:run_recorded"
        task = Task(target, str(run / "files" / "run"), options, environment, str(log))
        ended = self._server.run([task], SECONDS).get(0)
        # A wrong resume may train more steps than the schedule has, and fails then.
        expected = [-9] if kill is not None else [0] if wrong == Wrong() else [0, 1]
        if ended not in expected:
            raise AssertionError(f"{wrong}: ended as {ended}:\n{log.read_text()[-3000:]}")


def resumed_step(killed: int) -> int:
    """The last step that a run need not train again which was killed right after a step."""
    return (killed - 1) // SAVE_EVERY * SAVE_EVERY
