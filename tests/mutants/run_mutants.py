"""Applies each mutant of ``mutants.toml`` to a copy of the sources; a test must fail.

``python tests/mutants/run_mutants.py [--jobs N] [--only TEXT] [--floor PERCENT] [--record FILE]``.
A mutant is one replacement in one file. It is caught when a test fails; a session that collects
nothing or cannot start does not count. Before the mutants, all tests named in the table must pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = ("resumekit", "adapters", "tests", "integration", "benchmarks", "pyproject.toml")
PASSED, FAILED = 0, 1  # exit codes of pytest
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Args:
        name: what is wrong, in words.
        area: what it belongs to, e.g. ``data position``.
        file: the source file.
        before: text that occurs once in the file.
        after: its replacement.
        tests: arguments of pytest that select the tests that must fail.
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


def read_table(path: Path) -> list[Mutant]:
    """The mutants of a table, each checked against the sources.

    Raises:
        SystemExit: a text does not occur exactly once, or two mutants share a name.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**entry) for entry in entries]
    problems = [
        f"{each.name}: {count} occurrences of {each.before!r} in {each.file}"
        for each in mutants
        if (count := (ROOT / each.file).read_text(encoding="utf-8").count(each.before)) != 1
    ]
    names = [each.name for each in mutants]
    problems += [f"{name}: given twice" for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        raise SystemExit("\n".join(problems))
    return mutants


def copy_sources(folder: Path) -> None:
    """Copies what the tests need; the link of the adapters stays a link."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)


def run_tests(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """One session of pytest that stops at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def judge(mutant: Mutant, folder: Path) -> Result:
    """Applies a mutant to a copy, runs its tests, and removes it again."""
    path = folder / mutant.file
    source = path.read_text(encoding="utf-8")
    started = time.monotonic()
    path.write_text(source.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        done = run_tests(folder, mutant.tests)
        caught = done.returncode == FAILED
        known = done.returncode in (PASSED, FAILED)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        detail = lines[0] if lines else "passed" if known else done.stdout[-500:]
    except subprocess.TimeoutExpired:
        caught, detail = True, "no end"
    finally:
        path.write_text(source, encoding="utf-8")
    return Result(mutant, caught, time.monotonic() - started, detail)


@contextmanager
def copies(number: int) -> Iterator[Queue[Path]]:
    """Copies of the sources, one for each job."""
    with tempfile.TemporaryDirectory() as temporary:
        free: Queue[Path] = Queue()
        for job in range(number):
            folder = Path(temporary, str(job))
            folder.mkdir()
            copy_sources(folder)
            free.put(folder)
        yield free


def run(mutants: list[Mutant], jobs: int) -> list[Result]:
    """The verdicts, in the order of the table.

    Raises:
        SystemExit: a test that is to catch a mutant fails without one.
    """
    with copies(jobs) as free, ThreadPoolExecutor(jobs) as pool:

        def within_a_copy(mutant: Mutant | None, tests: str) -> Result | str:
            folder = free.get()
            try:
                if mutant is not None:
                    result = judge(mutant, folder)
                    print("caught  " if result.caught else "SURVIVES", mutant.name, flush=True)
                    return result
                done = run_tests(folder, tests)
                return "" if done.returncode == PASSED else f"{tests}\n{done.stdout[-2000:]}"
            finally:
                free.put(folder)

        chosen = sorted({each.tests for each in mutants})
        failed = [text for text in pool.map(lambda t: within_a_copy(None, t), chosen) if text]
        if failed:
            raise SystemExit("These fail without a mutant:\n" + "\n".join(map(str, failed)))
        results = pool.map(lambda each: within_a_copy(each, ""), mutants)
        return [each for each in results if isinstance(each, Result)]


def table_of(results: list[Result]) -> str:
    """The verdicts as a table in Markdown."""
    lines = ["| area | defect | verdict | seconds | by |", "|---|---|---|---|---|"]
    for each in results:
        verdict = "caught" if each.caught else f"survives: {each.mutant.survives or 'no test'}"
        by = each.detail.removeprefix("FAILED ").split(" - ")[0] if each.caught else ""
        columns = (each.mutant.area, each.mutant.name, verdict, f"{each.seconds:.0f}", by)
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table; exits with 1 when fewer are caught than the floor demands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="part of a name or an area")
    parser.add_argument("--floor", type=float, default=95.0, help="percent that must be caught")
    parser.add_argument("--record", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    chosen = [each for each in read_table(TABLE) if arguments.only in each.name + "\n" + each.area]
    results = run(chosen, arguments.jobs)
    caught = sum(each.caught for each in results)
    share = 100 * caught / len(results) if results else 0.0
    summary = f"{caught} of {len(results)} mutants caught, {share:.0f} %"
    text = f"# Mutants\n\n{summary}.\n\n{table_of(results)}"
    if arguments.record:
        arguments.record.write_text(text, encoding="utf-8")
    print(text)
    if share < arguments.floor:
        raise SystemExit(f"{summary}; the floor is {arguments.floor:.0f} %")


if __name__ == "__main__":
    main()
