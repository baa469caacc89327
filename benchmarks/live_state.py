"""What does live state cost: the variables of running functions, with all objects they reach?

The same program runs with ``loop_variables="restore"`` and with ``"off"``, in a random order in
every round, and each launch in a process of its own. A launch trains a few steps and saves after
each of them; a second launch resumes. All durations are measured in the program's loop, from the
end of a step to the next batch in hand. Programs:

* 1,000 modules and 10,000 Python objects: of user classes, nested lists and dicts. The script
  makes one half, training makes the other half and changes one object in each step;
* 1,000,000 objects that training does not change: a DataFrame, a graph, a vocabulary;
* a TensorDataset of 10 GB; of 2 GB where less memory is free.

CPU time of steps without a save is measured in one process, where both loops take turns.

    python benchmarks/live_state.py [--rounds 9] [--large-rounds 3] [--only steps objects ...]
        [--dataset-gb 10] [--directory DIR] [--profile] [--tiny] [--record]

``--profile`` prints where the first fetch, a save and a resume with 10,000 objects spend their
time; nothing is measured then. Checkpoints are written to memory by default, so that the disk adds
no noise to the differences.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import os
import pstats
import shutil
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judging import Target, Verdict, judge
from measuring import (
    Findings,
    MachineLoad,
    in_fresh_process,
    interleaved,
    parser_for,
    reset_peak,
    silenced,
    version_of,
)
from rich.console import Console
from step_overhead import BATCHES_PER_TURN, WARM_UP, cpu_seconds, make, tiny_run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

RESTORE, OFF = "restore", "off"
MODES = (RESTORE, OFF)

# The most that "restore" may add.
STEP = Target(1.0, unit=" µs")
SAVE = Target(20.0, unit=" ms")
FIRST_FETCH = Target(30.0, unit=" ms")
RESUME = Target(1.30)
LARGE_SAVE = Target(50.0, unit=" ms", min_rounds=3)
MEMORY = Target(1.05, min_rounds=3)

NUM_BATCHES = 10_000  # of a round without saves
NUM_SAVES = 4  # of a launch; the first one is reported alone
NUM_MODULES = 1_000
NUM_OBJECTS = 10_000
NUM_LARGE = 1_000_000
FALLBACK_GB = 2.0
BATCH_BYTES = 8 << 20  # so that a batch that outlives its fetch shows in the memory
WIDTH = 8

STEPS, OBJECTS, DATASET = "steps", "objects", "dataset"
Row = tuple[str, ...]
Pair = tuple[Sequence[float], Sequence[float]]  # of "restore" and of "off", a value for each round


# What the programs have in their variables


class Episode:
    """An object of a user class; with its list, its dict and the list in that it counts as four."""

    NUM_OBJECTS = 4

    def __init__(self, number: int) -> None:
        self.number = number
        self.returns = [0.5 * number, 1.5, 2.5]
        self.info = {"seed": number, "tags": [f"tag-{number % 7}", "all"]}

    def values(self) -> tuple[Any, ...]:
        """All that it holds."""
        return self.number, *self.returns, self.info["seed"], *self.info["tags"]  # type: ignore[misc]


class Experience:
    """Episodes: one half made by the script, the other half by the first step of training.

    Args:
        num_objects: of all episodes together.
    """

    def __init__(self, num_objects: int) -> None:
        self.length = num_objects // Episode.NUM_OBJECTS
        self.episodes = [Episode(number) for number in range(self.length // 2)]

    def collect(self, step: int) -> None:
        """What training does to it in a step."""
        while len(self.episodes) < self.length:
            self.episodes.append(Episode(len(self.episodes)))
        self.episodes[step % self.length].returns[0] += 1.0

    def content(self) -> str:
        """Equal for equal values."""
        return repr([each.values() for each in self.episodes])


class Unchanged:
    """An object that training only reads.

    Args:
        value: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def collect(self, step: int) -> None:
        """Training changes nothing."""

    def content(self) -> str:
        """Its class alone."""
        return type(self.value).__name__


def make_experience(num_objects: int) -> Experience:
    """The 10,000 objects."""
    return Experience(num_objects)


def make_table(num_objects: int) -> Unchanged:
    """A DataFrame with a column of Python strings and two of numbers."""
    import pandas as pd

    numbers = range(num_objects)
    texts = pd.Series([f"row {number}" for number in numbers], dtype=object)
    return Unchanged(pd.DataFrame({"text": texts, "number": numbers, "half": 0.5}))


def make_graph(num_objects: int) -> Unchanged:
    """A graph; four neighbours and its attributes make five entries a node."""
    import networkx as nx

    num_nodes = max(num_objects // 5, 16)
    graph = nx.Graph()
    for offset in (1, 7):
        graph.add_edges_from((each, (each + offset) % num_nodes) for each in range(num_nodes))
    return Unchanged(graph)


def make_vocabulary(num_objects: int) -> Unchanged:
    """A token's id by its text."""
    return Unchanged({f"token-{number}": number for number in range(num_objects)})


def make_dataset(num_bytes: int) -> Unchanged:
    """Samples in memory that is really there."""
    samples = torch.empty(num_bytes // 4 // 256, 256).fill_(0.5)
    return Unchanged(TensorDataset(samples))


@dataclass(frozen=True)
class Case:
    """A program.

    Args:
        about: of the rows.
        make: makes the object in the program's variables, of a size.
        size: the number of objects, or of bytes.
        num_modules: of the model.
        needs: a distribution that it is left out without.
    """

    about: str
    make: Callable[[int], Any]
    size: int
    num_modules: int = 4
    needs: str = "torch"


def cases_of(*, dataset_gb: float, tiny: bool) -> dict[str, Case]:
    """All programs."""
    num_modules, num_objects, num_large = NUM_MODULES, NUM_OBJECTS, NUM_LARGE
    if tiny:
        num_modules, num_objects, num_large, dataset_gb = 20, 200, 1_000, 0.001
    large = f"{num_large:,} objects"
    return {
        OBJECTS: Case(
            f"{num_modules:,} modules, {num_objects:,} objects",
            make_experience,
            num_objects,
            num_modules,
        ),
        "table": Case(f"DataFrame, {large}", make_table, num_large, needs="pandas"),
        "graph": Case(f"graph of dicts, {large}", make_graph, num_large, needs="networkx"),
        "vocabulary": Case(f"vocabulary, {large}", make_vocabulary, num_large),
        DATASET: Case(f"TensorDataset, {dataset_gb:g} GB", make_dataset, int(dataset_gb * 10**9)),
    }


# The program


class Layer(nn.Module):
    """A layer of a user class, which counts its calls; with its linear map it is two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + 0.01 * self.linear(x)


def collated(samples: list[Any]) -> torch.Tensor:
    """A large batch, the first samples of which are used."""
    batch = torch.empty(BATCH_BYTES // 4 // WIDTH, WIDTH)
    return batch.fill_(len(samples) / 8)


@dataclass
class Probe:
    """Observes a loop from inside its function; it is no state of the program.

    Args:
        num_fetches: after which the launch ends.
        profiled: the numbers of the fetches that are profiled, counted from 0.
    """

    num_fetches: int
    profiled: Sequence[int] = ()
    seconds: list[float] = field(default_factory=list)
    num_survivors: int = 0
    profiles: list[str] = field(default_factory=list)
    _began: float = 0.0
    _profile: cProfile.Profile | None = None
    _former: Callable[[], Any] = lambda: None

    def begin_fetch(self) -> None:
        """The next batch is about to be requested."""
        if len(self.seconds) in self.profiled:
            self._profile = cProfile.Profile()
            self._profile.enable()
        self._began = time.perf_counter()

    def end_fetch(self, batch: Any) -> bool:
        """Records a batch; returns whether it is the last one.

        Args:
            batch: which replaces the one before in all variables of the program.
        """
        self.seconds.append(time.perf_counter() - self._began)
        if self._profile is not None:
            self._profile.disable()
            self.profiles.append(profile_text(self._profile))
            self._profile = None
        self.num_survivors += self._former() is not None
        self._former = weakref.ref(batch)
        return len(self.seconds) == self.num_fetches


def profile_text(profile: cProfile.Profile) -> str:
    """The functions that take the most time, with all that they call."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(45)
    return text.getvalue()


def train(
    checkpointer: Checkpointer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    probe: Probe,
) -> str:
    """The loop; gives the content of its object when the probe ends the launch."""
    loader = DataLoader(range(1 << 20), batch_size=8, collate_fn=collated)  # type: ignore[arg-type]
    num_steps = 0
    probe.begin_fetch()
    for batch in checkpointer.batches(loader, epochs=1):
        if probe.end_fetch(batch):
            break
        loss = model(batch[:8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        data.collect(num_steps)
        num_steps += 1
        checkpointer.step(loss=loss.detach())
        checkpointer.save()
        probe.begin_fetch()
    return f"{num_steps} {data.content()}"


@dataclass(frozen=True)
class Launch:
    """What one launch found.

    Args:
        start_seconds: until the Checkpointer was made.
        fetch_seconds: of the first fetch, which loads a checkpoint if there is one.
        save_seconds: of the fetches with a save.
        num_survivors: batches that outlived the next fetch.
        peak_bytes: the most resident memory.
        content: of the program's variables at the end.
        profiles: of the fetches that were profiled.
    """

    start_seconds: float
    fetch_seconds: float
    save_seconds: Sequence[float]
    num_survivors: int
    peak_bytes: int
    content: str
    profiles: Sequence[str]


def launch(
    case: Case, mode: Any, directory: Path, num_saves: int, profiled: Sequence[int] = ()
) -> Launch:
    """Runs the program in this process until it has made so many saves."""
    reset_peak()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(max(case.num_modules // 2, 1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = case.make(case.size)
    probe = Probe(num_saves + 1, profiled)
    content = ""
    with silenced(), contextlib.suppress(KeyboardInterrupt):
        began = time.perf_counter()
        with Checkpointer(
            directory,
            model=model,
            optimizer=optimizer,
            save_every=None,
            leave_on=(),
            loop_variables=mode,
            transient={"probe"},
        ) as checkpointer:
            start_seconds = time.perf_counter() - began
            content = train(checkpointer, model, optimizer, data, probe)
            raise KeyboardInterrupt  # leaves without a last save
    return Launch(
        start_seconds,
        probe.seconds[0],
        probe.seconds[1:],
        probe.num_survivors,
        reset_peak(peak=True),
        content,
        probe.profiles,
    )


def in_child(*arguments: Any) -> Launch:
    """A launch in a process of its own, without its imports."""
    optional = [name for name in ("pandas", "networkx") if version_of(name)]
    return in_fresh_process(launch, *arguments, preload=("step_overhead", *optional))


@dataclass(frozen=True)
class Both:
    """A fresh launch and the launch that resumes it, in one mode.

    Args:
        fresh: saves.
        resumed: makes no save.
    """

    fresh: Launch
    resumed: Launch

    @property
    def is_restored(self) -> bool:
        """Whether the second launch has the variables of the first."""
        return self.fresh.content == self.resumed.content

    def cleared(self) -> Both:
        """Checks that no batch was kept.

        Raises:
            SystemExit: a batch outlived the fetch of the next one.
        """
        if num := self.fresh.num_survivors + self.resumed.num_survivors:
            raise SystemExit(f"{num} batches outlived the fetch of the next one")
        return self


def both_launches(case: Case, mode: str, folder: Path) -> Both:
    """Both launches, in a directory that is removed afterwards."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    try:
        fresh = in_child(case, mode, directory, NUM_SAVES)
        return Both(fresh, in_child(case, mode, directory, 0)).cleared()
    finally:
        shutil.rmtree(directory)


def measure(case: Case, num_rounds: int, folder: Path) -> dict[str, list[Both]]:
    """All rounds of both modes."""
    contenders = {mode: partial(both_launches, case, mode, folder) for mode in MODES}
    return interleaved(contenders, num_rounds, warms_up=case.num_modules >= NUM_MODULES)


# Steps without a save


def stepping(run: Checkpointer, length: int, experience: Experience) -> Iterator[None]:
    """A loop that the caller advances by one step at a time."""
    loss = torch.tensor(0.5)
    for number, _ in enumerate(run.batches(make(length, 1), epochs=1)):
        experience.collect(number)
        run.step(loss=loss)
        if not number:
            run.save()
        yield
    experience.content()


def measure_steps(num_objects: int, num_batches: int) -> dict[str, float]:
    """One round: microseconds of CPU time of a step in each mode, turn by turn."""
    took = dict.fromkeys(MODES, 0.0)
    with contextlib.ExitStack() as stack:
        loops: dict[str, Callable[[], Any]] = {}
        for mode in MODES:
            run = stack.enter_context(tiny_run(loop_variables=mode))
            loop = stepping(run, WARM_UP + num_batches + 1, Experience(num_objects))
            loops[mode] = loop.__next__
            cpu_seconds(loops[mode], WARM_UP)
        left, is_even = num_batches, False
        while left:
            turn, is_even = min(BATCHES_PER_TURN, left), not is_even
            for mode in MODES if is_even else MODES[::-1]:
                took[mode] += cpu_seconds(loops[mode], turn)
            left -= turn
    return {mode: seconds / num_batches * 1e6 for mode, seconds in took.items()}


# The table

HEADINGS = ("figure", RESTORE, OFF, "more, or ratio", "interval", "limit", "result")


def difference(figure: str, pair: Pair, target: Target | None, unit: str) -> Row:
    """The row of a difference.

    Args:
        figure: its name.
        pair: of "restore" and of "off", in the same rounds.
        target: the most that the difference may be.
        unit: of all of them.
    """
    found = judge([mine - other for mine, other in zip(*pair, strict=True)], target)
    return (figure, *medians(pair, unit), f"{found.value:,.1f} {unit}", *found.cells()[1:])


def ratio(figure: str, pair: Pair, target: Target | None, unit: str) -> Row:
    """The row of a ratio; arguments as of a difference."""
    found = judge([mine / other for mine, other in zip(*pair, strict=True)], target)
    return (figure, *medians(pair, unit), *found.cells())


def medians(pair: Pair, unit: str) -> list[str]:
    """Both, with their unit."""
    return [f"{statistics.median(each):,.1f} {unit}" for each in pair]


def step_rows(rounds: Sequence[Mapping[str, float]], num_objects: int) -> list[Row]:
    """The row of the steps."""
    pair = [each[RESTORE] for each in rounds], [each[OFF] for each in rounds]
    return [difference(f"CPU of a step, {num_objects:,} objects", pair, STEP, "µs")]


def launch_rows(case: Case, found: Mapping[str, Sequence[Both]], *, is_large: bool) -> list[Row]:
    """The rows of one program."""

    def both(read: Callable[[Both], float], unit: float) -> Pair:
        values = [[read(each) / unit for each in found[mode]] for mode in MODES]
        return values[0], values[1]

    def later(each: Both) -> float:
        return statistics.median(each.fresh.save_seconds[1:])

    def named(figure: str) -> str:
        return f"{case.about}: {figure}"

    ms, mb = 1e-3, 1e6
    fresh = both(lambda each: each.fresh.fetch_seconds, ms)
    first = both(lambda each: each.fresh.save_seconds[0], ms)
    start = both(lambda each: each.resumed.start_seconds, ms)
    resumed = both(lambda each: each.resumed.fetch_seconds, ms)
    peak = both(lambda each: each.fresh.peak_bytes, mb)
    peak_again = both(lambda each: each.resumed.peak_bytes, mb)
    fetch_limit, save_limit, later_limit, resume_limit = (
        (None, None, LARGE_SAVE, None) if is_large else (FIRST_FETCH, SAVE, SAVE, RESUME)
    )
    return [
        difference(named("first fetch of a fresh launch"), fresh, fetch_limit, "ms"),
        difference(named("first save"), first, save_limit, "ms"),
        difference(named("later save"), both(later, ms), later_limit, "ms"),
        difference(named("Checkpointer() of a resumed launch"), start, None, "ms"),
        ratio(named("load and first fetch, resumed"), resumed, resume_limit, "ms"),
        ratio(named("peak RSS, fresh launch"), peak, MEMORY, "MB"),
        ratio(named("peak RSS, resumed launch"), peak_again, MEMORY, "MB"),
        # Any other number has ended the benchmark.
        (named("batches that outlive the next fetch"), "0", "0", "", "", "0", met(True)),
        *([] if is_large else [restored_row(case, found)]),
    ]


def restored_row(case: Case, found: Mapping[str, Sequence[Both]]) -> Row:
    """Whether what was measured is right; "off" is the negative control."""
    are_right = [all(each.is_restored for each in found[mode]) for mode in MODES]
    texts = ["as saved" if each else "not as saved" for each in are_right]
    result = met(are_right == [True, False])
    return (f"{case.about}: variables after the resume", *texts, "", "", "as saved", result)


def met(is_met: bool) -> str:
    """The last cell of a row without an interval."""
    return (Verdict.MET if is_met else Verdict.NOT_MET).value


def free_gb() -> float:
    """Memory that is available, in GB."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(each.split()[1]) for each in lines if "MemAvailable" in each) * 1024 / 1e9


def size_of_dataset(asked_gb: float) -> float:
    """The size that fits, with as much again for what others use meanwhile."""
    return asked_gb if free_gb() > 1.6 * asked_gb else FALLBACK_GB


def print_profiles(case: Case, folder: Path) -> None:
    """Where the first fetch, the last save and the resume spend their time."""
    directory = folder / "profiled"
    fresh = in_child(case, RESTORE, directory, NUM_SAVES, (0, NUM_SAVES))
    resumed = in_child(case, RESTORE, directory, 0, (0,))
    titles = ("first fetch of a fresh launch", "a later save", "load and first fetch, resumed")
    for title, text in zip(titles, [*fresh.profiles, *resumed.profiles], strict=True):
        print(f"== {case.about}: {title}\n{text}")


def measure_all(arguments: Any, cases: Mapping[str, Case], folder: Path) -> list[Row]:
    """The rows of all programs that were asked for."""
    console, rows = Console(stderr=True), list[Row]()
    only = arguments.only or (STEPS, *cases)
    if STEPS in only:
        size = cases[OBJECTS].size
        num_batches = BATCHES_PER_TURN if arguments.tiny else NUM_BATCHES
        rounds = [measure_steps(size, num_batches) for _ in range(arguments.rounds)]
        rows += step_rows(rounds, size)
    for name in (each for each in cases if each in only):
        case = cases[name]
        if not version_of(case.needs):
            console.print(f"{case.about} is left out: {case.needs} is not installed")
            continue
        is_large = name != OBJECTS
        num_rounds = arguments.large_rounds if is_large else arguments.rounds
        console.print(f"{case.about}: {num_rounds} rounds")
        rows += launch_rows(case, measure(case, num_rounds, folder), is_large=is_large)
    return rows


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=9, has_tiny=True)
    names = [STEPS, *cases_of(dataset_gb=1, tiny=True)]
    parser.add_argument("--large-rounds", type=int, default=3, help="of the large programs")
    parser.add_argument("--only", nargs="+", choices=names, help="these programs")
    parser.add_argument("--dataset-gb", type=float, default=10, help="size of the TensorDataset")
    parser.add_argument("--directory", type=Path, help="where to write (default: in memory)")
    parser.add_argument("--profile", action="store_true", help="print profiles, measure nothing")
    arguments = parser.parse_args()
    dataset_gb = size_of_dataset(arguments.dataset_gb)
    cases = cases_of(dataset_gb=dataset_gb, tiny=arguments.tiny)
    memory = Path("/dev/shm")
    directory = arguments.directory or (memory if os.access(memory, os.W_OK) else Path())
    load = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="live-state-", dir=directory) as name:
        folder = Path(name).absolute()
        if arguments.profile:
            print_profiles(cases[OBJECTS], folder)
            return
        rows = measure_all(arguments, cases, folder)
    smaller = dataset_gb < arguments.dataset_gb and not arguments.tiny
    Findings(
        "live-state",
        heading="What live state costs",
        before=[
            '`python benchmarks/live_state.py --record`: `loop_variables="restore"` and `"off"`,',
            "each launch in a process of its own, both in a random order in every round;",
            f"{arguments.rounds} rounds, {arguments.large_rounds} of the large programs.",
            f"Checkpoints are written to {directory.absolute()}. A launch makes {NUM_SAVES} saves,",
            "one a step. A save is all from the end of a step to the next batch; a later save is",
            "the median of those after the first. Values are medians of the rounds; intervals are",
            "a bootstrap's, of the median of the rounds' differences or ratios. CPU of a step:",
            f"without a save, both loops in one process, {NUM_BATCHES:,} steps a round, in turns",
            f"of {BATCHES_PER_TURN}.",
            *(["The TensorDataset is smaller: less memory was free."] if smaller else []),
        ],
        title='Live state, "restore" compared with "off"',
        headings=HEADINGS,
        rows=rows,
        packages=("torch", "numpy", "pandas", "networkx"),
        load=load,
        part=", ".join(arguments.only or ()),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
