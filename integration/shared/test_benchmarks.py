"""The benchmark of all adapters runs, and its figures are those of what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
ADAPTERS = ("torch", "accelerate", "transformers", "lightning", "deepspeed")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_overheads_are_measured_under_each_adapter(adapter: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "overheads.py")]
    command += ["--child", "--quick", "--adapter", adapter]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = {row[1]: row[2:] for row in json.loads(done.stdout.splitlines()[-1])}
    _, step, reports, save = rows.values()
    bare, ours, _, journal, watch = map(_number, step)
    assert 0 < journal < ours
    assert 0 < watch < ours
    assert bare > 0
    assert _number(reports[-1]) > 0
    assert 0 < _number(save[-1]) < _number(save[1]), "the tracker's share is less than the save"


def _number(text: str) -> float:
    return float(text.replace(",", ""))
