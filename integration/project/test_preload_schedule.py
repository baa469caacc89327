"""A worker of pytest continues with files that import what its last file imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHARED = Path(__file__).parents[1] / "shared"
CONFTEST = """
import sys

sys.path.insert(0, {folder!r})
from preload_schedule import PreloadScheduling

def pytest_xdist_make_scheduler(config, log):
    return PreloadScheduling(config, log)
"""


def test_files_with_the_same_imports_are_run_by_one_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(SHARED)))
    for number, preload in enumerate(("A", "A", "B", "B")):
        program = f"A = B = ()\nPRELOAD = {preload}\ndef test_it(): ...\n"
        (tmp_path / f"test_{preload}_{number}.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--numprocesses=2", "--dist=loadscope"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    passed = [line for line in done.stdout.splitlines() if "PASSED" in line]
    assert len(passed) == 4, done.stdout + done.stderr
    runs = {(line.split()[0], line.partition("test_")[2][0]) for line in passed}
    assert len(runs) == 2, runs  # each worker has one kind of files
