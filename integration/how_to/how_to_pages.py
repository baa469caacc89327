"""Runs the programs and commands of a how-to page as they stand there, killed and uninterrupted.

A block of code that begins with e.g. ``# name.py`` is that file; each line of a block of bash is a
command. What the steps did is read from the files of ``recorder/sitecustomize.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from documents import ROOT, Document

from resumekit.record.trace import INJECT_VARIABLE

RECORDER = Path(__file__).with_name("recorder")
TIMEOUT_SECONDS = 240.0


class Page(Document):
    """A page of ``docs/how-to``.

    Args:
        name: without ``.md``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(ROOT / "docs" / "how-to" / f"{name}.md")

    def write_files(self, directory: Path) -> None:
        """Writes its programs into a directory."""
        for name, program in self.programs().items():
            (directory / name).write_text(program, encoding="utf-8")

    def lines(self, language: str) -> list[str]:
        """The lines of its blocks in one language; bash are commands, text is what they print."""
        return [line for block in self.blocks(language) for line in block.splitlines()]

    def line(self, language: str, start: str) -> str:
        """The one line of these that begins so."""
        (found,) = [line for line in self.lines(language) if line.startswith(start)]
        return found

    def command(self, start: str) -> str:
        """The one command that begins so."""
        return self.line("bash", start)

    def rows(self, first: str) -> list[list[str]]:
        """The cells of the table whose first column has this title, without backquotes."""
        table = self.text.partition(f"| {first} |")[2]
        rows = table.partition("\n\n")[0].splitlines()[2:]
        return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


Step = Mapping[str, Any]


@dataclass
class Workplace:
    """A directory with the programs of a page, and what was run in it.

    Args:
        directory: new or empty.
        page: whose programs it gets.
        variables: of the environment of every command.
        output: what the last launch printed, where a test keeps it.
    """

    directory: Path
    page: Page
    variables: Mapping[str, str] = field(default_factory=dict)
    output: str = ""  # of the last launch

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.records.mkdir()
        self.page.write_files(self.directory)

    @property
    def records(self) -> Path:
        """The folder of the records of all processes."""
        return self.directory / "records"

    def environment(self, **variables: str) -> dict[str, str]:
        """Of a command: without the settings of this process's launcher, with the recorder."""
        given = os.environ.get("PYTHONPATH", "")  # of packages that are installed elsewhere
        known = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(RECORDER), str(self.directory), str(ROOT), given]),
            "HOW_TO_RECORDS": str(self.records),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return {**os.environ, **known, **self.variables, **variables}

    def start(self, command: str, **variables: str) -> Started:
        """Starts a command, e.g. with ``HOW_TO_WAIT_AT="7"``."""
        log = self.directory / f"log-{len(list(self.directory.glob('log-*')))}.txt"
        with log.open("wb") as file:
            shell = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.directory,
                env=self.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return Started(shell, log)

    def run(self, *commands: str, **variables: str) -> str:
        """Runs commands at the same time until they succeed; what they print."""
        started = [self.start(command, **variables) for command in commands]
        return "".join(each.output_at_success() for each in started)

    def wait_for_ranks(self, num_ranks: int, *started: Started) -> list[int]:
        """Waits until so many ranks wait at their step; their process ids, in rank order."""

        def waiting() -> list[int]:
            files = sorted(self.records.glob("waits-*"))
            ids = [file.read_text() for file in files]
            return [int(each) for each in ids if each]

        def are_there() -> bool:
            for each in started:
                assert each.process.poll() is None, each.log.read_text()[-3000:]
            return len(waiting()) == num_ranks

        wait_until(are_there)
        return waiting()

    def kill_at(self, step: int, command: str, *, num_ranks: int = 1) -> None:
        """Starts a command and SIGKILLs it after an optimizer step of this launch, from 1."""
        started = self.start(command, HOW_TO_WAIT_AT=str(step))
        try:
            ranks = self.wait_for_ranks(num_ranks, started)
        finally:
            started.kill_tree()
        assert len(ranks) == num_ranks
        for file in self.records.glob("waits-*"):
            file.unlink()

    def release(self) -> None:
        """Lets the ranks that wait continue."""
        (self.records / "go").touch()

    def launches(self, rank: int = 0) -> list[list[Step]]:
        """The recorded steps of each process that was this rank, in the order of their starts."""
        found = []
        for folder in (self.records / f"rank-{rank}").glob("*"):
            found.append([torch.load(file) for file in sorted(folder.glob("*.pt"))])
        return sorted(found, key=lambda steps: steps[0]["time"])


@dataclass(frozen=True)
class Started:
    """A command that runs, and all processes that come of it.

    Args:
        process: which was started.
        log: what it prints.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def kill_tree(self) -> None:
        """SIGKILLs the process and all its descendants, in whatever sessions they are."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            tree = [root, *root.children(recursive=True)]
            for each in tree:
                each.suspend()
            tree = [root, *root.children(recursive=True)]
            for each in tree:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            self.process.wait(timeout=TIMEOUT_SECONDS)  # first: psutil would take its status
            psutil.wait_procs(tree[1:], timeout=30)

    def status(self) -> int:
        """The exit status, once the command has ended by itself."""
        try:
            return self.process.wait(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill_tree()
            raise AssertionError(f"it did not end:\n{self.log.read_text()[-3000:]}") from None

    def output_at_success(self) -> str:
        """What the command printed; fails if its exit status is not 0."""
        assert self.status() == 0, self.log.read_text()[-5000:]
        return self.log.read_text()


def wait_until(condition: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> None:
    """Waits until a condition is true; fails after a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def are_equal(one: Step, other: Step) -> bool:
    """Whether two steps had the same inputs, loss, gradients and weights, bit for bit."""
    losses = [[each["loss"]] if each["loss"] is not None else [] for each in (one, other)]
    lists = ("used", "gradients", "weights")
    return same(*losses) and all(same(one[name], other[name]) for name in lists)


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def difference(whole: Workplace, killed: Workplace, *, num_ranks: int = 1) -> str:
    """Where a killed and resumed run differs from an uninterrupted one; empty where it does not.

    Each launch must repeat some steps of the uninterrupted run, in order and without a gap. Those
    after the first must not begin at step 1, and the last must end with the last step.
    """
    for rank in range(num_ranks):
        (expected,) = whole.launches(rank)
        first, *others = killed.launches(rank)
        if not others or len(first) >= len(expected):
            return f"rank {rank}: not killed and resumed"
        reached = 0
        for number, steps in enumerate([first, *others]):
            last = range(len(expected) - len(steps), len(expected) - len(steps) + 1)
            starts = last if number == len(others) else range(reached + 1)
            starts = starts if number else range(1)
            found = [s for s in starts if _is_part(steps, expected[s:], is_relaunch=number > 0)]
            if not found:
                return f"rank {rank}: launch {number} trained otherwise"
            if number and found[0] == 0:
                return f"rank {rank}: launch {number} began at step 1"
            if found[0] > reached:
                return f"rank {rank}: launch {number} left out steps"
            reached = max(reached, found[0] + len(steps))
    return ""


def num_repeated(whole: Workplace, killed: Workplace) -> int:
    """How many steps of rank 0 the launches of the killed run trained twice."""
    (expected,) = whole.launches()
    return sum(map(len, killed.launches())) - len(expected)


def _is_part(steps: list[Step], expected: list[Step], *, is_relaunch: bool) -> bool:
    if is_relaunch and steps and expected:
        # Code that follows a run that has finished calls the model again, before the first step.
        first, num_used = steps[0], len(expected[0]["used"])
        steps = [{**first, "used": first["used"][len(first["used"]) - num_used :]}, *steps[1:]]
    return len(steps) <= len(expected) and all(map(are_equal, steps, expected))


def without(component: str) -> dict[str, str]:
    """Variables under which a resume does not restore a component: a negative control."""
    return {INJECT_VARIABLE: component}
