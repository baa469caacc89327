"""``doctor``: what the checkpoints of a training will hold and cost, seen from its first steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resumekit.attach import AttachSettings, attached_environment, lines_for_loop
from resumekit.cadence import BACKGROUND_SHARE, SaveInterval, seconds_of
from resumekit.errors import ReplayError
from resumekit.progress_display import human_bytes
from resumekit.record.journal import DIRECTORY, SAVED, find_attempts
from resumekit.replay import isolated
from resumekit.replay_plan import ReplayPlan
from resumekit.run.options import Options
from resumekit.state import Fidelity
from resumekit.storage.manifest import StepReader
from resumekit.storage.store import Store

_DEFAULTS = Options()


@dataclass(frozen=True)
class Diagnosis:
    """What the checkpoints of a training will hold and cost.

    Args:
        capture: of each part its fidelity, or None where the training has no such part; and why.
        num_ranks: of the job.
        checkpoint_bytes: of all files of a checkpoint.
        free_bytes: of the file system that the directory is on.
        blocked_seconds: how long training stood still for a save.
        background_seconds: how long it was written while training ran.
        written: the files that the command has written where no overlay kept them; None if they
            are not known.
    """

    capture: Mapping[str, tuple[str | None, str]]
    num_ranks: int
    checkpoint_bytes: int
    free_bytes: int
    blocked_seconds: float
    background_seconds: float
    written: tuple[str, ...] | None = ()

    @property
    def inexact(self) -> dict[str, tuple[str, str]]:
        """The parts that are not restored exactly."""
        found = self.capture.items()
        return {key: (how, why) for key, (how, why) in found if how not in (None, _EXACT)}

    @property
    def needed_bytes(self) -> int:
        """Of the disk: the checkpoints that are kept by default, and the one being written."""
        return self.checkpoint_bytes * ((_DEFAULTS.keep_latest or 0) + 1)

    @property
    def save_every(self) -> str:
        """The interval of ``save_every="auto"``, and its cost."""
        cost = self.blocked_seconds + BACKGROUND_SHARE * self.background_seconds
        return str(SaveInterval(cost, seconds_of(_DEFAULTS.mtbf) or 0.0))

    def lines(self) -> list[str]:
        """The text for the terminal."""
        exact = [key for key, (fidelity, _) in self.capture.items() if fidelity == _EXACT]
        absent = [key for key, (fidelity, _) in self.capture.items() if fidelity is None]
        seconds = self.blocked_seconds + self.background_seconds
        lines = [
            *(f"{fidelity}: {key}: {reason}" for key, (fidelity, reason) in self.inexact.items()),
            f"exact: {', '.join(exact)}",
            f"not in this training: {', '.join(absent) or 'nothing'}",
            f"a checkpoint: {human_bytes(self.checkpoint_bytes)}, of {self.num_ranks} "
            f"rank{'s' * (self.num_ranks > 1)}",
            f"disk: {human_bytes(self.needed_bytes)} with keep_latest={_DEFAULTS.keep_latest}; "
            f"{human_bytes(self.free_bytes)} are free",
            f'save_every="auto": {self.save_every}',
            f"after SIGTERM: a save takes {seconds:.2g} s, of grace_seconds="
            f"{_DEFAULTS.grace_seconds:g}",
        ]
        if self.written != ():
            names = "unknown files" if self.written is None else ", ".join(self.written)
            lines.append(f"written without an overlay: {names}")
        return lines


_EXACT = Fidelity.EXACT.value


def diagnose(
    command: Sequence[str],
    *,
    num_steps: int = 3,
    allow_writes: bool = False,
    on_event: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Runs the first steps of a training, and says what its checkpoints hold and cost.

    The command runs as under ``replay``: its run directory is a scratch directory, an overlay takes
    what else it writes below the working directory, and trackers are switched off. A Trainer
    without a callback gets one, as under ``resumekit run``. Each rank ends with status 0 after the
    last step. There are two saves, after the last two steps; the figures are of the second one.

    Args:
        command: program and arguments, as the run is started.
        num_steps: how many optimizer steps, at least 2.
        allow_writes: where the kernel allows no overlay, run without one, and list the files that
            have changed.
        on_event: called with one line about what happens.

    Raises:
        ConfigurationError: there is no such program, or the kernel allows no overlay.
        ReplayError: the command failed before the last step, or saves nothing.
        SystemExit: SIGTERM or SIGHUP came, which the command has received too, and has ended.
    """
    here, private = Path.cwd(), list[Path]()
    with isolated(command, [here], None, example="doctor", allow_writes=allow_writes) as isolation:
        isolated_command, scratch = isolation

        def attached(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
            private.append(directory)
            return attached_environment(environment, directory, AttachSettings(str(scratch)))

        overlay = f"{'no ' if isolated_command.obstacle else ''}overlay over the files"
        on_event(f"{num_steps} steps in a scratch directory, {overlay}")
        saved = (num_steps - 1, num_steps)
        plan = ReplayPlan(None, str(scratch), last_step=num_steps, saved_steps=saved)
        status = isolated_command.run(plan, attached)
        store = Store(scratch)
        steps = store.step_names()
        if not steps or (steps[0].step < num_steps and status):
            raise ReplayError(
                " ".join(command),
                found=f"ended with exit status {status} before step {num_steps}"
                if status
                else "saved nothing: no Checkpointer and no Trainer has trained a step",
                remedy=None if status else _lines(private[0]),
            )
        return _diagnosis(store.open_step(steps[0]), here, isolated_command.written)


def _lines(private: Path) -> str | None:
    lines = lines_for_loop(private, "runs/a")
    return f"Add these lines to its loop:\n{lines}" if lines else None


def _diagnosis(step: StepReader, directory: Path, written: tuple[str, ...] | None) -> Diagnosis:
    manifest = step.manifest
    attempts = find_attempts(step.path.parent / DIRECTORY, rank=0)
    saves = [event for each in attempts for event in each.events() if event.kind == SAVED]
    return Diagnosis(
        capture={key: (line["fidelity"], line["reason"]) for key, line in manifest.capture.items()},
        num_ranks=manifest.world_size,
        checkpoint_bytes=sum(entry.size for entry in manifest.files),
        free_bytes=shutil.disk_usage(directory).free,
        blocked_seconds=saves[-1].blocked_seconds if saves else 0.0,
        background_seconds=saves[-1].background_seconds if saves else 0.0,
        written=written,
    )
