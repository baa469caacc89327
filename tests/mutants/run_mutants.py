"""Applies each mutant of ``mutants.toml`` to a copy of the sources; a test must fail.

``python tests/mutants/run_mutants.py [--jobs N] [--only TEXT] [--floor PERCENT] [--record FILE]``.
A mutant is one replacement in one file. It is caught when a test fails; a session that collects
nothing or cannot start does not count. All tests named in the table must pass without a mutant.
Each session of pytest is a fork of this process, which has imported torch already.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = ("resumekit", "adapters", "tests", "integration", "benchmarks", "pyproject.toml")
PASSED, FAILED = 0, 1  # exit codes of pytest
TIMEOUT_SECONDS = 600
POLL_SECONDS = 0.02
FLOOR_PERCENT = 95.0


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Args:
        name: what is wrong, in words.
        area: what it belongs to, e.g. ``data position``.
        file: the source file.
        before: text that occurs once in the file.
        after: its replacement.
        tests: the tests of which one must fail, as in a shell.
        survives: why no test can notice it; empty for a mutant that must be caught.
    """

    name: str
    area: str
    file: str
    before: str
    after: str
    tests: str
    survives: str = ""


@dataclass(frozen=True)
class Result:
    """What the tests said of a mutant."""

    mutant: Mutant
    caught: bool
    seconds: float
    detail: str


class Session(NamedTuple):
    """The end of a session of pytest.

    Args:
        code: its exit code; None where it ran out of time.
        output: what it printed.
        seconds: how long it took.
    """

    code: int | None
    output: str
    seconds: float


def entries(path: Path = TABLE) -> list[Mutant]:
    """The mutants of a table, as they are written there."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in table["mutant"]]


def _exists(test: str) -> bool:
    """Whether there is such a file or folder, and in it the function, whatever its parameters."""
    file, _, name = test.partition("::")
    path, function = ROOT / file, name.partition("[")[0].rpartition("::")[2]
    return path.exists() and (not name or f"def {function}(" in path.read_text(encoding="utf-8"))


def problems_of(mutants: Sequence[Mutant]) -> list[str]:
    """Texts that do not occur once in their file, tests that do not exist, names given twice."""
    problems = []
    for each in mutants:
        path = ROOT / each.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := source.count(each.before)) != 1:
            problems.append(f"{each.name}: {count} occurrences of {each.before!r} in {each.file}")
        lacking = [name for name in shlex.split(each.tests) if not _exists(name)]
        problems += [f"{each.name}: no test {name}" for name in lacking]
    names = [each.name for each in mutants]
    return problems + [f"{n}: given twice" for n in sorted(set(names)) if names.count(n) > 1]


def copy_sources(folder: Path) -> None:
    """Copies what the tests need; the link of the adapters stays a link."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)


class Copy:
    """A copy of the sources, in which one session of pytest runs at a time.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sources"
        self._output = folder / "output"
        self._pid = 0
        self._started = 0.0
        self._num_writes = 0
        self._folder.mkdir()
        copy_sources(self._folder)

    def write(self, file: str, source: str) -> None:
        """Replaces a source file; cached bytecode of its former content is not used."""
        path = self._folder / file
        path.write_text(source, encoding="utf-8")
        self._num_writes += 1  # Python compares the time of a change in whole seconds
        os.utime(path, (self._num_writes, self._num_writes))

    def start(self, tests: Sequence[str]) -> None:
        """Starts a session that stops at the first failure."""
        self._started = time.monotonic()
        self._pid = os.fork()
        if not self._pid:
            self._run(tests)

    def ended(self) -> Session | None:
        """The end of the session, or None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.monotonic() - self._started
        if not pid and seconds < TIMEOUT_SECONDS:
            return None
        if not pid:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return Session(os.waitstatus_to_exitcode(status) if pid else None, output, seconds)

    def _run(self, tests: Sequence[str]) -> NoReturn:
        code = -1
        try:
            os.setsid()
            target = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            os.chdir(self._folder)
            os.environ["PYTHONPATH"] = str(self._folder)
            sys.path[:] = [str(self._folder), *(path for path in sys.path if path != str(ROOT))]
            import pytest

            arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            code = int(pytest.main([*arguments, *tests]))
        except BaseException:  # noqa: BLE001  # the parent reads it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if code >= 0 else 3)


def preload() -> None:
    """Imports what takes long, and nothing of this repository."""
    import numpy
    import pytest
    import torch._dynamo  # which the first step of an optimizer imports
    import torch.utils.data

    assert all((numpy, pytest, torch))
    ours = sorted({name.partition(".")[0] for name in sys.modules} & {"resumekit", "adapters"})
    assert not ours, f"imported before the sources are copied: {ours}"


def judge(mutant: Mutant, session: Session) -> Result:
    """The verdict of a session that ran with a mutant."""
    lines = session.output.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    is_over = session.code in (PASSED, FAILED)
    detail = failures[0] if failures else "passed" if is_over else session.output[-500:]
    if session.code is None:
        return Result(mutant, True, session.seconds, "no end")
    return Result(mutant, session.code == FAILED, session.seconds, detail)


def run(mutants: Sequence[Mutant], jobs: int) -> list[Result]:
    """The verdicts, in the order of the table.

    Raises:
        SystemExit: a test that is to catch a mutant fails without one.
    """
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        copies = []
        for job in range(jobs):
            folder = Path(temporary, str(job))
            folder.mkdir()
            copies.append(Copy(folder))
        results = {each.mutant.name: each for each in _results(mutants, copies)}
    return [results[each.name] for each in mutants]


def _all_tests(mutants: Sequence[Mutant]) -> list[str]:
    """All tests that the mutants name, each once."""
    selected = {name for each in mutants for name in shlex.split(each.tests)}
    return sorted(
        name for name in selected if "::" not in name or name.split("::")[0] not in selected
    )


def _results(mutants: Sequence[Mutant], copies: Sequence[Copy]) -> Iterator[Result]:
    waiting: deque[Mutant | None] = deque([None, *mutants])  # None: without a mutant
    free, running = list(copies), list[tuple[Mutant | None, Copy]]()
    num_done = 0
    while waiting or running:
        while waiting and free:
            mutant, copy = waiting.popleft(), free.pop()
            if mutant is None:
                copy.start(_all_tests(mutants))
            else:
                source = (ROOT / mutant.file).read_text(encoding="utf-8")
                copy.write(mutant.file, source.replace(mutant.before, mutant.after))
                copy.start(shlex.split(mutant.tests))
            running.append((mutant, copy))
        time.sleep(POLL_SECONDS)
        for mutant, copy in list(running):
            session = copy.ended()
            if session is None:
                continue
            running.remove((mutant, copy))
            free.append(copy)
            if mutant is None:
                _require_passing(session)
                continue
            copy.write(mutant.file, (ROOT / mutant.file).read_text(encoding="utf-8"))
            result = judge(mutant, session)
            num_done += 1
            word = "caught  " if result.caught else "SURVIVES"
            count = f"{num_done:3d}/{len(mutants)} {result.seconds:4.0f} s"
            print(f"{count} {word} [{mutant.area}] {mutant.name}: {result.detail}", flush=True)
            yield result


def _require_passing(session: Session) -> None:
    if session.code != PASSED:
        raise SystemExit(f"Without a mutant, exit code {session.code}:\n{session.output[-3000:]}")
    print(f"without a mutant: passed, {session.seconds:.0f} s", flush=True)


def table_of(results: list[Result]) -> str:
    """The verdicts as tables in Markdown: by area, then one row for each mutant."""
    lines = ["| area | mutants | caught |", "|---|---|---|"]
    for area in dict.fromkeys(each.mutant.area for each in results):
        of_area = [each for each in results if each.mutant.area == area]
        lines.append(f"| {area} | {len(of_area)} | {sum(each.caught for each in of_area)} |")
    lines += ["", "| area | defect | verdict | seconds | by |", "|---|---|---|---|---|"]
    for each in results:
        verdict = "caught" if each.caught else f"survives: {each.mutant.survives or 'no test'}"
        by = each.detail.removeprefix("FAILED ").split(" - ")[0] if each.caught else ""
        columns = (each.mutant.area, each.mutant.name, verdict, f"{each.seconds:.0f}", by)
        lines.append("| " + " | ".join(column.replace("|", "\\|") for column in columns) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table; exits with 1 when fewer are caught than the floor demands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="part of a name or an area")
    parser.add_argument("--floor", type=float, default=FLOOR_PERCENT, help="percent to be caught")
    parser.add_argument("--record", type=Path, help="a file for the table, or a folder")
    arguments = parser.parse_args()
    mutants = entries()
    problems = problems_of(mutants)
    if problems:
        raise SystemExit("\n".join(problems))
    chosen = [each for each in mutants if arguments.only in each.name + "\n" + each.area]
    if not chosen:
        raise SystemExit(f"no name and no area of a mutant has {arguments.only!r} in it")
    results = run(chosen, arguments.jobs)
    caught = sum(each.caught for each in results)
    share = 100 * caught / len(results) if results else 0.0
    summary = f"{caught} of {len(results)} mutants caught, {share:.0f} %"
    conditions = f"Python {platform.python_version()}, {arguments.jobs} at a time"
    text = f"# Mutants\n\n{summary}; {conditions}.\n\n{table_of(results)}"
    if arguments.record:
        path = arguments.record
        path = path / f"{datetime.date.today()}-mutants.md" if path.is_dir() else path
        path.write_text(text, encoding="utf-8")
    print(text)
    unexpected = [r.mutant.name for r in results if r.caught and r.mutant.survives]
    if unexpected:
        raise SystemExit("listed as a survivor, and caught: " + "; ".join(unexpected))
    if share < arguments.floor:
        raise SystemExit(f"{summary}; the floor is {arguments.floor:.0f} %")


if __name__ == "__main__":
    main()
