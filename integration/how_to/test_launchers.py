"""The page on launchers: each row of its table is killed, started again, and compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from how_to_pages import Page, Started, Workplace, difference, num_repeated, wait_until, without

from resumekit.testing.launchers import free_port

PAGE = Page("launchers")
NUM_RANKS = 2
WAIT = {"HOW_TO_WAIT_AT": "13"}  # in the second epoch; the newest checkpoint is that of step 10

# The name of a launcher in the table, the beginnings of its commands on the page, what it needs.
COMMANDS = {
    "torchrun": ("torch", "torchrun --standalone --nproc-per-node=2 train.py"),
    "torchrun --max-restarts": ("torch", "torchrun --standalone --nproc-per-node=2 --max-restarts"),
    "two nodes": (
        "torch",
        "torchrun --nnodes=2 --node-rank=0",
        "torchrun --nnodes=2 --node-rank=1",
    ),
    "torch.multiprocessing": ("torch", "MASTER_PORT="),
    "accelerate launch": ("accelerate", "accelerate launch"),
    "notebook_launcher": ("accelerate", "python notebook.py"),
    "deepspeed": ("deepspeed", "deepspeed "),
    "Lightning": ("lightning", "python train_lightning.py"),
}
ROWS = [tuple(row) for row in PAGE.rows("started by")]


def kill_everything(started: list[Started], ranks: list[int]) -> None:
    for each in started:
        each.kill_tree()


def kill_one_rank(started: list[Started], ranks: list[int]) -> None:
    os.kill(ranks[1], signal.SIGKILL)


def kill_one_node(started: list[Started], ranks: list[int]) -> None:
    started[1].kill_tree()


def terminate(started: list[Started], ranks: list[int]) -> None:
    for each in started:
        each.process.terminate()


def terminate_group(started: list[Started], ranks: list[int]) -> None:
    os.killpg(started[0].process.pid, signal.SIGTERM)


KILLS: dict[str, Callable[[list[Started], list[int]], None]] = {
    "SIGKILL to every process": kill_everything,
    "SIGKILL to one rank": kill_one_rank,
    "SIGKILL to one node": kill_one_node,
    "SIGTERM": terminate,
    "SIGTERM to the process group": terminate_group,
}


class Runs:
    """Uninterrupted runs, each made once, and killed ones.

    Args:
        directory: new.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._whole: dict[str, Workplace] = {}

    def whole(self, launcher: str) -> Workplace:
        """The uninterrupted run of a launcher."""
        if launcher not in self._whole:
            place = self.new(f"{launcher} whole")
            place.output = place.run(*self.commands(launcher), **self.variables(launcher))
            self._whole[launcher] = place
        return self._whole[launcher]

    def new(self, name: str) -> Workplace:
        variables = {"HEAD": "localhost", "PORT": str(free_port())}
        directory = self._directory / name.replace(" ", "-").replace("/", "-")
        return Workplace(directory, PAGE, variables)

    def commands(self, launcher: str) -> list[str]:
        """Of a launcher, as they stand on the page; raises Skipped without its package."""
        needs, *starts = COMMANDS[launcher]
        pytest.importorskip(needs)
        return [PAGE.command(start) for start in starts]

    def variables(self, launcher: str) -> dict[str, str]:
        """That the page exports before the command of a launcher."""
        if "--max-restarts" not in launcher:
            return {}
        return dict([PAGE.command("export ").removeprefix("export ").split("=")])

    def killed(self, launcher: str, kill: str, **variables: str) -> Workplace:
        """A run that is killed once, and what is left of it ended and started again."""
        place = self.new(f"{launcher} {kill} {' '.join(variables)}")
        commands = self.commands(launcher)
        restarts = self.variables(launcher)
        started = [place.start(command, **WAIT, **restarts) for command in commands]
        try:
            ranks = place.wait_for_ranks(NUM_RANKS, *started)
            KILLS[kill](started, ranks)
            place.release()
            if restarts:
                place.output = "".join(each.output_at_success() for each in started)
                return place
            if launcher != "Lightning" or "one rank" not in kill:
                assert [each.status() for each in started] != [0] * len(started)
                wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
            else:  # as the page says, it does not notice
                wait_until(lambda: not psutil.pid_exists(ranks[1]))
        finally:
            for each in started:
                each.kill_tree()
        place.output = place.run(*commands, **variables)
        return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("launchers"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "kill", "result"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS]
)
def test_a_row_of_the_table(runs: Runs, launcher: str, kill: str, result: str) -> None:
    killed = runs.killed(launcher, kill)
    whole = runs.whole(launcher)
    assert not difference(whole, killed, num_ranks=NUM_RANKS)
    repeated = num_repeated(whole, killed)
    assert result == f"exact, {repeated or 'no'} steps repeated".replace("no steps", "no step")
    assert "WARNING: torchrun" not in killed.output
    if launcher == "torchrun" and repeated:
        shown = PAGE.line("text", "resumekit: resuming").replace("/home/me", str(killed.directory))
        assert shown in killed.output


@pytest.mark.full
def test_without_the_optimizer_a_launcher_continues_otherwise(runs: Runs) -> None:
    """The negative control of the rows."""
    kill = "SIGKILL to every process"
    killed = runs.killed("torch.multiprocessing", kill, **without("optimizer"))
    whole = runs.whole("torch.multiprocessing")
    assert difference(whole, killed, num_ranks=NUM_RANKS) == "rank 0: launch 1 trained otherwise"


def test_a_job_that_torchrun_may_fail_to_restart_logs_the_missing_variable(runs: Runs) -> None:
    place = runs.new("without the variable")
    (command,) = runs.commands("torchrun --max-restarts")
    output = place.run(command)
    assert output.count(PAGE.line("text", "resumekit: WARNING")) == 1
