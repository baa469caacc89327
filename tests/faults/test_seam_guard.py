"""The seam is the only way to a run directory: its log is what the kernel was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest

from crashlab import guarded_training
from crashlab.system_calls import Change, changes, python, strace, traced

# The journal is not part of a checkpoint: nothing of it is fsynced, and no resume reads it.
JOURNAL = "journal"
OF_THE_JOURNAL = {"mkdir", "create", "write"}

# The lock is not part of a checkpoint: it is taken before anything else and never written to.
LOCK = Change("open for writing", (".lock",))


def _by_file(changes: Iterable[Change]) -> dict[tuple[str, ...], list[str]]:
    """The calls on each path in their order; a write in pieces is one write."""
    found: dict[tuple[str, ...], list[str]] = {}
    for change in changes:
        found.setdefault(change.paths, []).append(change.call)
    return {paths: [call for call, _ in groupby(calls)] for paths, calls in found.items()}


def _seam_changes(log: Path, run: Path) -> list[Change]:
    found = []
    for line in log.read_text().splitlines():
        call, *paths = line.split(" ")
        inside = [Path(path) for path in paths if Path(path).is_relative_to(run)]
        if inside:
            relative = tuple(str(path.relative_to(run)) for path in inside)
            found.append(Change("fsync" if call == "fsync_dir" else call, relative))
    return found


@pytest.mark.skipif(strace() is None, reason="strace is not installed or may not trace")
def test_every_change_of_a_run_directory_goes_through_the_seam(tmp_path: Path) -> None:
    run, log, calls = tmp_path / "run", tmp_path / "seam.log", tmp_path / "strace.log"
    root = str(Path(__file__).parents[2])
    command = python(guarded_training.__file__, str(run), str(log))
    environment = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = traced(command, log=calls, environment=environment)
    assert done.returncode == 0, done.stderr

    everything = [change for change in changes(calls, run) if change != LOCK]
    journal = [change for change in everything if change.paths[0].split("/")[0] == JOURNAL]
    assert {change.call for change in journal} == OF_THE_JOURNAL
    asked = [change for change in everything if change not in journal]
    taken = Change("rename", ("step-00000004/manifest.json",))  # by the script, to do damage
    asked.remove(taken)
    through_the_seam = _seam_changes(log, run)
    assert _by_file(asked) == _by_file(through_the_seam)
    assert len(through_the_seam) > 100
    assert {change.call for change in through_the_seam} == {
        "mkdir", "create", "write", "fsync", "rename", "unlink", "rmdir",
    }  # fmt: skip


@pytest.mark.skipif(strace() is None, reason="strace is not installed or may not trace")
def test_a_change_that_goes_around_the_seam_is_seen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "step").mkdir(parents=True)
    program = (
        "import mmap, os, sys; os.chdir(sys.argv[1]);"
        "f = open('step/a', 'wb'); f.write(bytes(10)); f.close();"
        "f = open('step/a', 'r+b'); mmap.mmap(f.fileno(), 10)[0] = 1; f.close();"
        "os.link('step/a', 'b'); os.truncate('b', 3); os.chmod('b', 0o600); os.symlink('b', 'c');"
        "d = os.open('step', 0); os.rename('a', 'z', src_dir_fd=d, dst_dir_fd=d); os.utime('b')"
    )
    done = traced(python("-c", program, str(run)), log=tmp_path / "log", environment={})
    assert done.returncode == 0, done.stderr
    assert [str(change) for change in changes(tmp_path / "log", run, cwd=run)] == [
        "open for writing step/a",
        "write step/a",
        "open for writing step/a",
        "mmap step/a",
        "link step/a b",
        "truncate b",
        "chmod b",
        "symlink b c",
        "rename step/a step/z",
        "utimens b",
    ]
