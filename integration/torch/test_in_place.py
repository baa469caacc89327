"""Saves on a real mount that renames a directory by copying it, see ``copying_mount``.

The process that trains is killed at calls of a save, or the mount stops at one of its changes, as
the machine of an object store's client would. The same command, launched again, ends as if
undisturbed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from faults_trials import Trial, Trials
from small_volumes import fuse

from resumekit.storage.directories import StepName
from resumekit.storage.store import Store
from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer

PRELOAD = (*DEFAULT_PRELOAD, "resumekit.adapters.torch")
MOUNT = Path(__file__).with_name("copying_mount.py")
NUM_CALLS = 130  # of a launch that saves twice and deletes once, on the mount

RecordProperty = Callable[[str, object], None]


def _mounted(root: Path, path: Path, *, last: int = 0) -> AbstractContextManager[None]:
    """The root at a path; the mount stops before its change of the number ``last``."""
    pytest.importorskip("mfusepy", reason="needs mfusepy")
    return fuse(path, sys.executable, str(MOUNT), str(root), str(path), str(last))


@pytest.fixture
def trials(tmp_path: Path, server: ForkServer) -> Trials:
    return Trials(tmp_path, server)


class Mounts:
    """One trial whose run directory is on the mount."""

    def __init__(self, trial: Trial, trials: Trials) -> None:
        self.trial, self._trials = trial, trials
        self._root = trial.run.with_name("root")
        trial.run.rename(self._root)

    def mounted(self, *, last: int = 0) -> AbstractContextManager[None]:
        """The run directory is there in the body, up to the change of this number."""
        return _mounted(self._root, self.trial.run, last=last)

    def launch(self, *, last: int = 0, failpoints: str | None = None) -> bool:
        """Launches it once; whether the mount was still there at the end."""
        with self.mounted(last=last):
            self.trial.launch(failpoints=failpoints)
            return os.path.exists(self.trial.run)

    def finish(self) -> StepName:
        """The same command again; gives the newest checkpoint that was there."""
        with self.mounted():
            newest = self.trial.newest_complete()
            assert newest is not None
            ended = self.trial.launch()
            assert ended.succeeded, ended.output
            verdict = self.trial.judge(self._trials.reference)
            assert verdict.exact, verdict
            assert verdict.resumes[-1].step == newest.step
            # A kill between the manifest and the removal of its mark leaves the mark, which counts
            # for nothing next to a whole checkpoint.
            marks = {path.stem for path in self.trial.run.glob("*.incomplete")}
            assert marks <= set(map(str, Store(self.trial.run).step_names()))
            assert not (self.trial.run / "quarantine").exists()
            return newest


@pytest.mark.parametrize(
    "apart", [pytest.param(1, marks=pytest.mark.full), pytest.param(40, id="some")]
)
def test_a_kill_at_every_call_costs_at_most_the_save_under_way(
    apart: int, trials: Trials, record_property: RecordProperty
) -> None:
    newest = []
    for call in range(1, NUM_CALLS, apart):
        mounts = Mounts(trials.new(), trials)
        mounts.launch(failpoints=f"{call}=kill")
        newest.append(mounts.finish())
    assert newest == sorted(newest)
    record_property("SIGKILL at a call of a save in place", len(newest))


@pytest.mark.parametrize(
    "apart", [pytest.param(1, marks=pytest.mark.full), pytest.param(60, id="some")]
)
def test_a_mount_that_stops_at_every_change_costs_at_most_the_save_under_way(
    apart: int, trials: Trials, record_property: RecordProperty
) -> None:
    newest = []
    for change in range(1, 1000, apart):
        mounts = Mounts(trials.new(), trials)
        is_over = mounts.launch(last=change)
        newest.append(mounts.finish())
        if is_over:
            break
    assert newest == sorted(newest)
    assert newest[-1] == StepName(7)
    record_property("mount that stops at a change of a save in place", len(newest))


def test_the_mount_may_stop_within_a_rename(trials: Trials) -> None:
    """The control: a commit by rename would leave a part of the checkpoint under each name."""
    mounts = Mounts(trials.new(), trials)
    run = mounts.trial.run
    with mounts.mounted(last=5), pytest.raises(ConnectionError):
        (run / "step-00000003").rename(run / "step-00000004")
    with mounts.mounted():
        assert {path.name for path in run.glob("step-*")} == {"step-00000003", "step-00000004"}
