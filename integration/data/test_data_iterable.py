"""Iterable data, killed by SIGKILL and started again: the run ends with the same bits.

Every two of loader, workers and kill points meet; ``--full-matrix`` runs them all.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from iterable_workloads import (
    BATCH_SIZE,
    STEPS_PER_EPOCH,
    Drawing,
    OwnLoader,
    Stream,
    make_loader,
    stateful_data_loader,
    streaming,
    train,
    train_by_trainer,
)
from preloads import ALL
from torch.utils.data import DataLoader, TensorDataset

from resumekit.data.position import open_source
from resumekit.state import Fidelity
from resumekit.testing import Cell, Kit, kill_points, pairwise

missing = [n for n in ("torchdata", "datasets") if importlib.util.find_spec(n) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")

SAVE_EVERY = 2
_KILL_POINTS = kill_points(STEPS_PER_EPOCH, SAVE_EVERY)
KILLS = {
    "in epoch 0 and on the boundary": (
        *_KILL_POINTS["mid-epoch 0"],
        *_KILL_POINTS["on the boundary"],
    ),
    "in epoch 1 and twice in it": _KILL_POINTS["twice in one epoch"],
}
BOUNDARY, TWICE = KILLS
FACTORS: dict[str, tuple[str, ...]] = {
    "kind": (
        "iterable",
        "sharded",
        "drawing",
        "streaming",
        "buffered",
        "stateful map",
        "stateful iterable",
        "own",
    ),
    "workers": ("0", "2"),
    "kill": (BOUNDARY, TWICE),
}
PRELOAD = ALL


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fed" in metafunc.fixturenames:
        cells = pairwise(FACTORS, full=bool(metafunc.config.getoption("--full-matrix")))
        metafunc.parametrize("fed", cells, ids=lambda cell: ", ".join(cell.values()))


def cell(kill: str, *, kind: str, workers: str, **options: Any) -> Cell:
    # Both ways to write the loop, for every loader and for any number of workers.
    loop = ("batches", "epochs")[(FACTORS["kind"].index(kind) + (workers != "0")) % 2]
    whole = {"save_every": SAVE_EVERY, "kind": kind, "workers": workers, "loop": loop, **options}
    return Cell(train, whole, 1, KILLS[kill])


@pytest.mark.quick(
    "iterable, 2*", "sharded, 2*", "drawing, 2*", "buffered, 2*", "stateful iterable, 2*"
)
def test_every_way_to_feed_continues_exactly(kit: Kit, fed: dict[str, str]) -> None:
    kit.assert_exact(cell(**fed))


@pytest.mark.quick("buffered*")
@pytest.mark.parametrize(
    ("kind", "kill"), [("drawing", TWICE), ("buffered", BOUNDARY), ("stateful map", TWICE)]
)
def test_persistent_workers_continue_exactly(kit: Kit, kind: str, kill: str) -> None:
    kit.assert_exact(cell(kill, kind=kind, workers="persistent"))


@pytest.mark.quick("batches-2")
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("loop", ["batches", "epochs"])
def test_a_loader_of_nodes_continues_exactly(kit: Kit, loop: str, workers: str) -> None:
    options = {"kind": "nodes", "workers": workers, "loop": loop, "save_every": SAVE_EVERY}
    kit.assert_exact(Cell(train, options, 1, KILLS[TWICE]))


@pytest.mark.quick("dispatcher*")
@pytest.mark.parametrize(
    ("through", "workers", "kill"),
    [("dispatcher", "2", TWICE), ("shard", "0", BOUNDARY), ("shard", "persistent", TWICE)],
)
def test_loaders_that_accelerate_puts_around_a_stream_continue_exactly(
    kit: Kit, through: str, workers: str, kill: str
) -> None:
    kit.assert_exact(cell(kill, kind="drawing", through=through, workers=workers))


@pytest.mark.full
@pytest.mark.parametrize(
    ("through", "kind", "workers"),
    [
        ("shard", "buffered", "0"),
        ("dispatcher", "streaming", "2"),
        ("shard, stateful", "drawing", "0"),
        ("shard, stateful", "buffered", "2"),
        ("dispatcher, stateful", "drawing", "persistent"),
    ],
)
def test_streams_of_datasets_and_of_torchdata_continue_exactly_in_accelerates_loaders(
    kit: Kit, through: str, kind: str, workers: str
) -> None:
    kit.assert_exact(cell(TWICE, kind=kind, through=through, workers=workers))


@pytest.mark.quick("shard")
@pytest.mark.parametrize("through", ["dispatcher", "shard"])
def test_two_ranks_continue_a_stream_exactly(kit: Kit, through: str) -> None:
    options = {"kind": "drawing", "through": through, "save_every": 1}
    kills = kill_points(STEPS_PER_EPOCH // 2, 1)["mid-epoch 1"]
    kit.assert_exact(Cell(train, options, 2, kills))


@pytest.mark.full
def test_the_trainer_continues_a_stream_exactly(kit: Kit) -> None:
    options = {"workers": "2", "save_every": SAVE_EVERY}
    kit.assert_exact(Cell(train_by_trainer, options, 1, KILLS[TWICE]))


@pytest.mark.quick("drawing")
@pytest.mark.parametrize("kind", ["drawing", "stateful map", "own"])
def test_a_position_left_out_is_caught_and_named(kit: Kit, kind: str) -> None:
    kit.assert_caught(cell(TWICE, kind=kind, workers="0"), "data")


def test_random_numbers_left_out_are_caught_and_named(kit: Kit) -> None:
    kit.assert_caught(cell(BOUNDARY, kind="drawing", workers="2"), "rng")


# ---------------------------------------------------------------- what the page on data says


class WithGenerator(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)


class Plain:
    def __iter__(self) -> Iterator[int]:
        yield from range(6)


def prepared(loader: DataLoader[Any] | None = None, **settings: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    return accelerator.prepare(DataLoader(Stream(), BATCH_SIZE) if loader is None else loader)


def dispatching(**settings: Any) -> Any:
    loader = prepared(DataLoader(TensorDataset(torch.arange(8)), **settings), dispatch_batches=True)
    loader.state = SimpleNamespace(num_processes=2)
    return loader


TWO: dict[str, Any] = {"num_workers": 2}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
ROWS: dict[str, Callable[[], Any]] = {
    "`DataLoader` over an `IterableDataset`, no workers": lambda: DataLoader(Drawing()),
    "`DataLoader` over an `IterableDataset`, workers": lambda: DataLoader(Drawing(), **TWO),
    "`DataLoader` over an `IterableDataset`, persistent workers": lambda: DataLoader(
        Drawing(), **PERSISTENT
    ),
    "the same, and the dataset holds a generator": lambda: DataLoader(
        WithGenerator(), **PERSISTENT
    ),
    "the same, `in_order=False`": lambda: DataLoader(Drawing(), in_order=False, **TWO),
    "an `IterableDataset` itself": Stream,
    "`DataLoader` over a stream of `datasets`": lambda: make_loader("streaming", "0"),
    "`DataLoader` over a stream of `datasets` with a shuffle buffer, workers": lambda: make_loader(
        "buffered", "2"
    ),
    "`StatefulDataLoader` over a map-style dataset, workers": lambda: make_loader(
        "stateful map", "2"
    ),
    "`StatefulDataLoader` over an `IterableDataset` with a state, no workers": lambda: make_loader(
        "stateful iterable", "0"
    ),
    "`StatefulDataLoader` over an `IterableDataset` with a state, workers": lambda: make_loader(
        "stateful iterable", "2"
    ),
    "`StatefulDataLoader` over a stream of `datasets`": lambda: stateful_data_loader(
        streaming(buffer_size=12)
    ),
    "`Loader` of `torchdata.nodes`": lambda: make_loader("nodes", "2"),
    "an object of yours with a state": lambda: OwnLoader(0),
    "an object of yours with a state, and `num_workers` above 0": lambda: with_workers(
        OwnLoader(2)
    ),
    "a loader prepared by Accelerate or the Trainer, around a stream": prepared,
    "the same, made with `use_stateful_dataloader=True`": lambda: prepared(
        use_stateful_dataloader=True
    ),
    "a dispatching loader (`dispatch_batches=True`) over a map-style dataset": dispatching,
    "the same, persistent workers": lambda: dispatching(**PERSISTENT),
    "a `range`, list, tuple, tensor or array": lambda: range(8),
    "any other iterable": Plain,
}
FOUND = {
    "ReplaySource": "replayed",
    "StatefulSource": "by its own state",
    "MapSource": "by its indices",
}


def with_workers(loader: Any) -> Any:
    loader.num_workers = loader.workers
    return loader


def rows_of_the_page() -> dict[str, tuple[str, str]]:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "data.md").read_text(
        encoding="utf-8"
    )
    section = page.split("## Iterable data", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return {what: (found, word) for what, found, word in lines[2:]}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11
def test_what_a_run_says_at_its_start_is_what_the_page_on_data_says() -> None:
    said = {}
    for row, make in ROWS.items():
        source = open_source(make(), "train")
        fidelity, reason = source.fidelity
        # What is not exact names what would make it so.
        assert fidelity is Fidelity.EXACT or "=" in reason or "DataLoader" in reason, row
        said[row] = (FOUND[type(source).__name__], fidelity.value)
    assert said == rows_of_the_page()
