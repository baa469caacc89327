"""The page on Ray Train: workers and whole jobs are killed, started again, and compared."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from how_to_pages import (
    Page,
    Started,
    Workplace,
    are_equal,
    difference,
    num_repeated,
    same,
    wait_until,
    without,
)

pytestmark = pytest.mark.full

if find_spec("ray") is None:
    pytest.skip('no Ray: pip install "ray[train]"', allow_module_level=True)

PAGE = Page("ray")
NUM_WORKERS = 2
WAIT = {"HOW_TO_WAIT_AT": "13"}  # in the second epoch; the newest checkpoint is that of step 10
ROWS = [tuple(row) for row in PAGE.rows("program")]
NEEDS = {"train_lightning.py": "lightning", "train_transformers.py": "transformers"}
EVERYTHING = "SIGKILL to every process"


def kill_everything(started: Started, workers: list[int]) -> None:
    started.kill_tree()


def kill_one_worker(started: Started, workers: list[int]) -> None:
    os.kill(workers[1], signal.SIGKILL)


def terminate_one_worker(started: Started, workers: list[int]) -> None:
    os.kill(workers[1], signal.SIGTERM)
    wait_until(lambda: not psutil.pid_exists(workers[1]))


KILLS: dict[str, Callable[[Started, list[int]], None]] = {
    EVERYTHING: kill_everything,
    "SIGKILL to one worker": kill_one_worker,
    "SIGTERM to one worker": terminate_one_worker,
}


class Jobs:
    """Uninterrupted jobs, each made once, and killed ones.

    Args:
        directory: new.
        sessions: of Ray; its path is short, as it has sockets.
    """

    def __init__(self, directory: Path, sessions: Path) -> None:
        self._directory = directory
        self._sessions = sessions
        self._whole: dict[str, Workplace] = {}

    def new(self, name: str) -> Workplace:
        """A directory with the programs of the page."""
        directory = self._directory / name.replace(" ", "-")
        variables = {
            # Of its own: a job must not find the cluster of another.
            "RAY_TMPDIR": tempfile.mkdtemp(dir=self._sessions),
            "RAY_AUTH_MODE": "disabled",  # else it writes a token into the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        }
        return Workplace(directory, PAGE, variables)

    def elastic(self, name: str) -> Workplace:
        """The first program with the changes that the page has for another number of workers."""
        place = self.new(name)
        (changes,) = PAGE.blocks("diff")
        for removed, added in re.findall(r"^-(.*)\n((?:\+.*\n)+)", changes, re.MULTILINE):
            edit(place, re.escape(removed), added.replace("+", "", 1).replace("\n+", "\n").rstrip())
        return place

    def whole(self, program: str) -> Workplace:
        """The uninterrupted job of a program."""
        if program not in self._whole:
            place = self.new(f"{program} whole")
            place.output = place.run(command(program))
            self._whole[program] = place
        return self._whole[program]

    def waiting(self, place: Workplace, program: str) -> tuple[Started, list[int]]:
        """A job whose workers wait after step 13, and their process ids."""
        started = place.start(command(program), **WAIT)
        try:
            return started, place.wait_for_ranks(NUM_WORKERS, started)
        except BaseException:
            started.kill_tree()
            raise

    def killed(self, program: str, kill: str, **variables: str) -> Workplace:
        """A job that is killed once, and started again unless Ray does that."""
        place = self.new(f"{program} {kill} {' '.join(variables.values())}")
        started, workers = self.waiting(place, program)
        try:
            KILLS[kill](started, workers)
            place.release()
            if kill != EVERYTHING:
                place.output = started.output_at_success()
                return place
            wait_until(lambda: not any(map(psutil.pid_exists, workers)))
        finally:
            started.kill_tree()
        place.output = place.run(command(program), **variables)
        return place


def command(program: str) -> str:
    """Of a program, as it stands on the page; raises Skipped without its framework."""
    if program in NEEDS:
        pytest.importorskip(NEEDS[program])
    return PAGE.command(f"python {program}")


def edit(place: Workplace, pattern: str, text: str) -> None:
    """Changes one part of the first program."""
    program = place.directory / "train.py"
    changed, count = re.subn(pattern, text, program.read_text())
    assert count == 1
    program.write_text(changed)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    sessions = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        yield Jobs(tmp_path_factory.mktemp("ray"), sessions)
    finally:
        shutil.rmtree(sessions, ignore_errors=True)


def average(place: Workplace) -> str:
    """What the training function has returned: the local variable of its loop."""
    (line,) = [each for each in place.output.splitlines() if each.startswith("average loss:")]
    return line


@pytest.mark.parametrize(
    ("program", "kill", "result"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS]
)
def test_a_row_of_the_table(jobs: Jobs, program: str, kill: str, result: str) -> None:
    killed = jobs.killed(program, kill)
    whole = jobs.whole(program)
    assert not difference(whole, killed, num_ranks=NUM_WORKERS)
    assert result == f"exact, {num_repeated(whole, killed)} steps repeated"
    shown = PAGE.line("text", "resumekit: resuming").replace("/home/me", str(killed.directory))
    assert killed.output.count(shown) == 1
    if program == "train.py":
        assert average(killed) == average(whole)
        assert "the loop is outside of the main thread" in killed.output


@pytest.mark.parametrize("component", ["optimizer", "variables"])
def test_without_a_component_it_differs(jobs: Jobs, component: str) -> None:
    """The negative controls: of the steps, and of the local variable of the loop."""
    killed = jobs.killed("train.py", EVERYTHING, **without(component))
    whole = jobs.whole("train.py")
    found = difference(whole, killed, num_ranks=NUM_WORKERS)
    assert found == ("rank 0: launch 1 trained otherwise" if component == "optimizer" else "")
    assert average(killed) != average(whole)


def assert_continued_by_one_worker(place: Workplace) -> None:
    """The last launch has the weights of step 10 and the global batches of two workers."""
    first, last = place.launches()
    (other,) = place.launches(1)
    assert len(last) == 3 * 256 // 16 - 10
    assert same(last[0]["before"], first[9]["weights"])
    for one, both in zip(last, zip(first[10:], other[10:], strict=True), strict=False):
        parts = [part["used"][0] for part in both]
        rows = sorted(row.tolist() for part in parts for row in part)
        assert sorted(row.tolist() for row in one["used"][0]) == rows


def test_another_number_of_workers_is_refused_unless_it_is_allowed(jobs: Jobs) -> None:
    place = jobs.elastic("fewer workers")
    started, _ = jobs.waiting(place, "train.py")
    started.kill_tree()
    place.release()
    edit(place, r"num_workers=2", "num_workers=1")
    edit(place, r"max_failures=3", "max_failures=0")
    edit(place, r"\{\"world_size\", \"batch_size\"\}", "set()")
    refused = place.start(command("train.py"))
    assert refused.status() != 0
    assert "allow_changes" in refused.log.read_text()
    edit(place, r"set\(\)", '{"world_size", "batch_size"}')
    place.run(command("train.py"))
    assert_continued_by_one_worker(place)


CLUSTER = """
import os, runpy, threading, time
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)

def lose():
    while not os.path.exists("lose"):
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)

threading.Thread(target=lose, daemon=True).start()
runpy.run_path("train.py", run_name="__main__")
"""


def test_ray_continues_on_one_worker_when_a_node_is_lost(jobs: Jobs) -> None:
    place = jobs.elastic("a lost node")
    edit(place, r"num_workers=2", "num_workers=(1, 2)")
    (place.directory / "cluster.py").write_text(CLUSTER)
    job = place.start("python cluster.py", **WAIT)
    try:
        workers_before = place.wait_for_ranks(NUM_WORKERS, job)
        (place.directory / "lose").touch()
        wait_until(lambda: not all(map(psutil.pid_exists, workers_before)))
        place.release()
        job.status()  # not 0: the cluster of the test ends with an error, as it has lost a node
        place.output = job.log.read_text()
    finally:
        job.kill_tree()
    assert average(place)
    assert_continued_by_one_worker(place)


def test_a_wrapper_of_ray_and_its_checkpoints_change_nothing(jobs: Jobs) -> None:
    killed = jobs.new("reported")
    edit(killed, r"DistributedDataParallel\((.*)\)", r"prepare_model(\1)")
    imported = "import ray.train\nfrom ray.train.torch import prepare_model\n"
    edit(killed, r"import torch\n", f"{imported}import torch\n")
    reported = "ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory('.'))"
    edit(killed, r"( +)ckpt\.step\(.*\)", rf"\g<0>\n\1{reported}")
    started, _ = jobs.waiting(killed, "train.py")
    started.kill_tree()
    killed.release()
    killed.run(command("train.py"))
    assert not difference(jobs.whole("train.py"), killed, num_ranks=NUM_WORKERS)


def test_a_relative_path_is_another_run_in_each_job(jobs: Jobs) -> None:
    place = jobs.new("relative")
    edit(place, r'Path\("runs/a"\)\.resolve\(\)', '"runs/a"')
    started, _ = jobs.waiting(place, "train.py")
    started.kill_tree()
    place.release()
    place.run(command("train.py"))
    first, last = place.launches()
    assert (len(first), len(last)) == (13, 3 * 256 // 16 // NUM_WORKERS)
    assert are_equal(first[0], last[0])
