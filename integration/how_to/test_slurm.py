"""The page on Slurm: its batch scripts on a real cluster of one node, signalled and requeued."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from how_to_pages import Page, Workplace, difference, num_repeated, wait_until
from slurm_cluster import Cluster

pytestmark = pytest.mark.full

PAGE = Page("slurm")
WAIT = {"HOW_TO_WAIT_AT": "13"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if missing := Cluster.missing():
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path, for a socket
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def whole_run(directory: Path, command: str) -> Workplace:
    place = Workplace(directory, PAGE)
    place.run(command)
    return place


def test_a_job_is_signalled_before_its_time_limit_and_requeues_itself(
    tmp_path: Path, cluster: Cluster
) -> None:
    whole = whole_run(tmp_path / "whole", "python train.py")
    killed = Workplace(tmp_path / "killed", PAGE)
    _, *words = PAGE.command("sbatch ").split()
    job = cluster.submit(killed.directory, *words, **killed.environment(**WAIT))
    log = killed.directory / f"slurm-{job}.out"
    wait_until(lambda: list(killed.records.glob("waits-*")))
    wait_until(lambda: PAGE.line("text", "SIGTERM") in log.read_text())
    killed.release()
    ended = cluster.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert not difference(whole, killed)
    assert num_repeated(whole, killed) == 0
    lines = [line for line in log.read_text().splitlines() if "SIGTERM" in line or "runs/a" in line]
    shown = PAGE.lines("text")
    assert lines == [line.replace("/home/me", str(killed.directory)) for line in shown]


def test_a_job_with_srun_is_requeued_by_somebody_else(tmp_path: Path, cluster: Cluster) -> None:
    whole = whole_run(tmp_path / "whole", "python train.py")
    killed = Workplace(tmp_path / "killed", PAGE)
    job = cluster.submit(killed.directory, "steps.sbatch", **killed.environment(**WAIT))
    wait_until(lambda: list(killed.records.glob("waits-*")))
    cluster.ask("scontrol", "requeue", job)
    killed.release()
    ended = cluster.wait_for_end(job)
    log = (killed.directory / f"slurm-{job}.out").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert not difference(whole, killed)
    assert num_repeated(whole, killed) == 0, log


def test_a_job_of_lightning_saves_once_and_is_requeued_once(
    tmp_path: Path, cluster: Cluster
) -> None:
    pytest.importorskip("lightning")
    whole = whole_run(tmp_path / "whole", "python train_lightning.py")
    killed = Workplace(tmp_path / "killed", PAGE)
    job = cluster.submit(killed.directory, "lightning.sbatch", **killed.environment(**WAIT))
    wait_until(lambda: list(killed.records.glob("waits-*")))
    # As slurmctld does before the time limit: to the processes of the steps, not to the script.
    cluster.ask("scancel", f"--signal={signal.SIGUSR1.name}", job)
    time.sleep(5)
    killed.release()
    ended = cluster.wait_for_end(job)
    log = (killed.directory / f"slurm-{job}.out").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    assert not difference(whole, killed), log
    assert num_repeated(whole, killed) == 0, log
    assert log.count("saved at step") == log.count("resuming at step") == 1, log
    assert not list(killed.directory.rglob("*hpc_ckpt*")), log
