"""What benchmarks share: options, clocks, child processes, load of the machine, tables."""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

_QUIET_CORES = 0.3  # that others may use; more of two cores showed in the figures

T = TypeVar("T")


def parser_for(
    doc: str | None, *, rounds: int | None = None, has_tiny: bool = False
) -> argparse.ArgumentParser:
    """The options of every benchmark.

    Args:
        doc: the docstring of the script.
        rounds: the default of ``--rounds``; None without that option.
        has_tiny: whether the script can be tried with sizes that show nothing.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if rounds is not None:
        about = f"measured rounds (default {rounds})"
        parser.add_argument("--rounds", type=int, default=rounds, help=about)
    if has_tiny:
        parser.add_argument("--tiny", action="store_true", help="a tiny state, to try the script")
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


def in_fresh_process(function: Callable[..., T], *arguments: Any, preload: Sequence[str] = ()) -> T:
    """The result of a function of a module, called where nothing has run but imports.

    Its memory and its optimizers are as new as those of a restarted run, and it need not wait for
    imports: it is forked from a process that has done them.

    Args:
        function: of a module.
        *arguments: of the function.
        preload: the modules that are imported once for all calls.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with context.Pool(1) as pool:
        result, cpu_seconds = pool.apply(_called, (function, arguments))
    _seconds_of_calls.append(cpu_seconds)
    return result


# Of the processes above, which are no children of this one.
_seconds_of_calls: list[float] = []


def _called(function: Callable[..., T], arguments: tuple[Any, ...]) -> tuple[T, float]:
    """The result, and the CPU seconds of this process with its children."""
    before = _own_seconds()
    return function(*arguments), _own_seconds() - before


def _own_seconds() -> float:
    """CPU seconds of this process, its children, and the calls in fresh processes."""
    return sum(os.times()[:4]) + sum(_seconds_of_calls)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def durations(function: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of some calls."""
    return [timed(function)[0] for _ in range(repeats)]


def interleaved(
    contenders: Mapping[str, Callable[[], T]],
    num_rounds: int,
    *,
    seed: int = 0,
    warms_up: bool = True,
) -> dict[str, list[T]]:
    """What each contender returns in each round; the order changes from round to round.

    Args:
        contenders: by name.
        num_rounds: those that are returned.
        seed: of the order.
        warms_up: whether a first round is measured and not returned.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for names in shuffled(list(contenders), num_rounds + warms_up, seed=seed):
        for name in names:
            found[name].append(contenders[name]())
    return {name: results[warms_up:] for name, results in found.items()}


def shuffled(names: Sequence[str], num_rounds: int, *, seed: int = 0) -> list[list[str]]:
    """The names in a random order for each round; the same for the same seed."""
    generator = random.Random(seed)
    return [generator.sample(names, len(names)) for _ in range(num_rounds)]


@dataclass(frozen=True)
class Cost:
    """What a call cost.

    Args:
        seconds: until it returned.
        cpu_seconds: of all threads of this process.
        extra_bytes: of resident memory at its highest, above both before and after the call.
        kept_bytes: by which the resident memory is larger afterwards.
        durable_seconds: until an async save was committed; 0 for everything else.
    """

    seconds: float
    cpu_seconds: float
    extra_bytes: int
    kept_bytes: int
    durable_seconds: float = 0.0


def cost_of(call: Callable[[], Any]) -> Cost:
    """Calls it, with the clocks of this process read around it."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak so far is the size now
    before, cpu = _status_bytes("VmRSS"), time.process_time()
    seconds, _ = timed(call)
    cpu = time.process_time() - cpu
    after = _status_bytes("VmRSS")
    extra = max(0, _status_bytes("VmHWM") - max(before, after))
    return Cost(seconds, cpu, extra, after - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


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


def drop_page_cache(folder: Path, *, whole: bool = True) -> None:
    """Makes the next read come from the disk; as root the whole cache goes, where asked for."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if whole:
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")


def bytes_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class MachineLoad:
    """The load from when it is made until it is shown, and what of it others made."""

    def __init__(self) -> None:
        self._at_start = os.getloadavg()[0]
        self._began = time.monotonic()
        self._busy, self._own_seconds = _busy_seconds(), _own_seconds()

    def __str__(self) -> str:
        elapsed = max(time.monotonic() - self._began, 0.01)
        own_seconds = _own_seconds() - self._own_seconds
        others = max(0.0, (_busy_seconds() - self._busy - own_seconds) / elapsed)
        found = (
            f"{self._at_start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end; other "
            f"processes and the kernel's threads used {others:.2f} of {os.cpu_count()} cores"
        )
        is_busy = others > _QUIET_CORES
        return f"{found}. Busy: these are not the figures of an idle machine" if is_busy else found


def _busy_seconds() -> float:
    """Seconds of all cores that were not idle since the system started."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Args:
        name: what it shows.
        points: its positive values, by what they grow with.
    """

    name: str
    points: Sequence[tuple[float, float]]


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """The fitted slope of log against log: 1 is linear, 0 flat."""
    across = [math.log(value) for value, _ in points]
    up = [math.log(max(value, 1e-12)) for _, value in points]
    return statistics.linear_regression(across, up).slope


@dataclass(frozen=True)
class Plot:
    """One of the plots of a picture, both axes logarithmic.

    Args:
        across: what the values grow with, and its unit.
        up: what is shown, and its unit.
        lines: of it.
    """

    across: str
    up: str
    lines: Sequence[Line]


_PLOTS_A_ROW = 4


def draw(name: str, plots: Sequence[Plot]) -> Path:
    """A dated PNG of these plots, in rows.

    Args:
        name: of the file, after the date.
        plots: in order.
    """
    from matplotlib.figure import Figure

    columns = min(len(plots), _PLOTS_A_ROW)
    rows = -(-len(plots) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.8 * rows), layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for plot, axes in zip(plots, cells, strict=False):
        for line in plot.lines:
            axes.loglog(*zip(*line.points, strict=True), marker="o", label=line.name)
        low, high = axes.get_ylim()
        if high < 100 * low:  # what is flat looks flat
            middle = math.sqrt(low * high)
            axes.set_ylim(middle / 10, middle * 10)
        axes.set(xlabel=plot.across, ylabel=plot.up)
        axes.grid(visible=True, which="major", alpha=0.4)
        axes.legend(fontsize="small")
    for axes in cells[len(plots) :]:
        axes.set_axis_off()
    path = RESULTS / f"{datetime.now(timezone.utc):%Y-%m-%d}-{name}.png"
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def reset_peak(*, peak: bool = False) -> int:
    """The resident bytes of this process, whose peak counts from here on.

    Args:
        peak: gives the peak since the last call instead.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


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
        load: the load since the first round; without it that of the last minutes is reported.
        part: what of the benchmark was run; such a run adds a section to the page of that day.
    """

    name: str
    heading: str
    before: Sequence[str]
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    packages: Sequence[str]
    after: Sequence[str] = ()
    load: MachineLoad | None = None
    part: str = ""

    @cached_property
    def _about(self) -> dict[str, str]:
        found = machine(*self.packages)
        return found if self.load is None else {**found, "load": str(self.load)}

    def publish(self, record: bool) -> None:
        """Prints the table and the machine; where ``record`` is set, writes the dated file too."""
        console = Console()
        if console.is_terminal:
            table = Table(*self.headings, title=self.title)
            for row in self.rows:
                table.add_row(*row)
            console.print(table)
        else:  # where the width is not known, nothing may be cut
            print("\n".join([self.title, "", *self.markdown(), ""]))
        facts = "\n".join(f"{name}: {text}" for name, text in self._about.items())
        console.print(facts, style="dim", soft_wrap=True)
        if record:
            console.print(f"written to {self.record()}")

    def record(self) -> Path:
        """The dated file with the table, which is written, or with one more section."""
        now = datetime.now(timezone.utc)
        path = RESULTS / f"{now:%Y-%m-%d}{self.name and '-'}{self.name}.md"
        found = [f"- {name}: {text}" for name, text in self._about.items()]
        found += ["", *self.markdown(), *(["", *self.after] if self.after else [])]
        RESULTS.mkdir(exist_ok=True)
        time_of_day = "" if self.part else f"{now: %H:%M} UTC"
        lines = [f"# {self.heading}, {now:%Y-%m-%d}{time_of_day}", "", *self.before, ""]
        if self.part:
            is_begun = path.exists()
            before = path.read_text(encoding="utf-8").splitlines() if is_begun else lines[:-1]
            lines = [*before, "", f"## {self.part}, {now:%H:%M} UTC", ""]
        path.write_text("\n".join([*lines, *found]) + "\n", encoding="utf-8")
        return path

    def markdown(self) -> list[str]:
        """The table's lines."""
        table = [self.headings, ("---",) * len(self.headings), *self.rows]
        return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in table]
