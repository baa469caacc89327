"""What the benchmarks share: options, clocks, child processes, and tables with their machine."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def parser_for(doc: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """The options of every benchmark.

    Args:
        doc: the docstring of the script.
        rounds: the default of ``--rounds``; None without that option.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if rounds is not None:
        about = f"measured rounds (default {rounds})"
        parser.add_argument("--rounds", type=int, default=rounds, help=about)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    return parser


def run_child(script: str, *arguments: str, options: Sequence[str] = ()) -> Any:
    """The JSON in the last line that a script prints in a fresh process.

    Args:
        script: its path.
        arguments: of the script.
        options: of Python.

    Raises:
        SystemExit: the process failed; with what it wrote to stderr.
    """
    command = [sys.executable, *options, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


class Timed:
    """Calls a function, and keeps how long each call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seconds, result = timed(lambda: self._function(*args, **kwargs))
        self.seconds.append(seconds)
        return result


def durations(function: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of some calls."""
    return [timed(function)[0] for _ in range(repeats)]


@contextmanager
def silenced() -> Iterator[None]:
    """Hides what is printed and warned of inside."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def fsync_all(folder: Path) -> None:
    """Waits until the folder and all below it are on the disk."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_page_cache(folder: Path) -> None:
    """Makes the next read come from the disk; as root the whole cache goes."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def bytes_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def paired_row(what: str, stock: Sequence[float], ours: Sequence[float]) -> tuple[str, ...]:
    """Milliseconds: medians of both, of what ours adds, and the median ratio of the pairs."""
    median = statistics.median
    added = median([b - a for a, b in zip(stock, ours, strict=True)])
    seconds = (median(stock), median(ours), added)
    return (what, *map(_ms, seconds), f"{median_ratio(ours, stock):.2f}x")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if abs(seconds) < 0.1 else f"{seconds * 1e3:,.0f}"


def version_of(package: str) -> str | None:
    """The installed version; None when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(*packages: str) -> dict[str, str]:
    """Hardware, system, load, and the versions of those packages that are installed."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {name: version_of(name) for name in packages}
    return {
        "processor": f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {found}" for name, found in versions.items() if found),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
    }


@dataclass(frozen=True)
class Findings:
    """What a benchmark found.

    Args:
        name: of the dated file, after the date; empty for the date alone.
        heading: of its page, before the date.
        before: the lines that say what was measured.
        title: of the table.
        headings: of its columns.
        rows: its cells.
        packages: those whose versions are reported.
        after: the lines that say how to read it.
    """

    name: str
    heading: str
    before: Sequence[str]
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    packages: Sequence[str]
    after: Sequence[str] = ()

    @cached_property
    def _about(self) -> dict[str, str]:
        return machine(*self.packages)

    def publish(self, record: bool) -> None:
        """Prints the table and the machine; where ``record`` is set, writes the dated file too."""
        console = Console()
        table = Table(*self.headings, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        facts = "\n".join(f"{name}: {text}" for name, text in self._about.items())
        console.print(facts, style="dim")
        if record:
            console.print(f"written to {self.record()}")

    def record(self) -> Path:
        """The dated file with the table, which is written."""
        now = datetime.now(timezone.utc)
        path = RESULTS / f"{now:%Y-%m-%d}{self.name and '-'}{self.name}.md"
        lines = [f"# {self.heading}, {now:%Y-%m-%d %H:%M} UTC", "", *self.before, ""]
        lines += [f"- {name}: {text}" for name, text in self._about.items()]
        lines += ["", *self.markdown(), *(["", *self.after] if self.after else [])]
        RESULTS.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def markdown(self) -> list[str]:
        """The table's lines."""
        table = [self.headings, ("---",) * len(self.headings), *self.rows]
        return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in table]
