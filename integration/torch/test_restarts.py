"""A launcher that starts a job again by itself: the second attempt continues exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from workloads import train

from resumekit.prove import compare
from resumekit.testing import Cell, Kit

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).with_name("restart_workload.py")


@pytest.mark.parametrize("kill", ["step:7", "checkpoint:6"])
def test_a_rank_that_dies_under_torchrun_is_started_again_and_continues(
    tmp_path: Path, kit: Kit, kill: str
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [str(SCRIPT), str(tmp_path / "run"), str(tmp_path / "trace"), kill]
    command = [sys.executable, *launcher, "--max-restarts=3", *words]
    # torch 2.13 else keeps one store for all attempts, in which gloo finds the addresses of ranks
    # that are gone: distributed/elastic/rendezvous/dynamic_rendezvous.py.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    whole = kit.run_uninterrupted(Cell(train, {"dropout": True, "save_every": 3}, world_size=2))
    verdict = compare(whole.trace, tmp_path / "trace", expect_resume=True)
    assert verdict.exact, f"{verdict}"
    # An attempt may fail before it has trained: gloo does not always find its peers at once.
    assert [resume.step for resume in verdict.resumes] == [6], done.stderr
