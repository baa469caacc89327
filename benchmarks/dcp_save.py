"""How long does ``dcp.save`` take through resumekit, beside DCP's own writer and the raw limit?

    python benchmarks/dcp_save.py [--rounds 9] [--directory DIR] [--record]

GPT-2 124M in float32 with AdamW's state, in one process and one thread. Each round has one save by
each writer into a new step, in a random order on the same disk, with an ``os.sync`` before it; the
step is removed when nobody looks. Both are durable: DCP's own syncs its files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from judging import HEADINGS, Target, compared, stated
from measuring import (
    Cost,
    Findings,
    MachineLoad,
    bytes_of,
    cost_of,
    interleaved,
    parser_for,
)
from raw_limits import RawLimits
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from workload import Training, gpt2

from resumekit.dcp import StorageReader, StorageWriter

WRITE, OURS = "raw write + fsync", "dcp.save through resumekit"
STOCK, STOCK_THREADS = "dcp.save, FileSystemWriter", "FileSystemWriter(thread_count=2)"
LIMIT = Target(0.40)


class Savers:
    """What saves the state of a training by ``dcp.save``, each into a directory of its own."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self._directory, self._state = directory, state
        self._numbers = count(1)
        self._ours = StorageWriter(directory / "ours", keep_latest=None)

    def ours(self) -> Cost:
        """One step of a run directory."""
        name = f"step-{next(self._numbers):08d}"
        return self._save(self._directory / "ours" / name, self._ours, name)

    def stock(self, *, num_threads: int) -> Cost:
        """One directory of DCP's own."""
        path = self._directory / f"stock-{next(self._numbers)}"
        return self._save(path, dcp.FileSystemWriter(path, thread_count=num_threads), None)

    def _save(self, path: Path, writer: Any, name: str | None) -> Cost:
        os.sync()
        save = partial(dcp.save, self._state, storage_writer=writer, checkpoint_id=name)
        cost = cost_of(save)
        shutil.rmtree(path)
        os.sync()
        return cost

    def check(self) -> int:
        """The bytes of one step of ours.

        Raises:
            SystemExit: a load does not give back what was saved.
        """
        directory = self._directory / "ours"
        dcp.save(self._state, storage_writer=self._ours, checkpoint_id="step-0")
        values = {name: torch.zeros_like(each) for name, each in self._state["model"].items()}
        dcp.load({"model": values}, storage_reader=StorageReader(directory))
        if not all(torch.equal(each, self._state["model"][name]) for name, each in values.items()):
            raise SystemExit("the load did not give back what was saved")
        num_bytes = bytes_of(directory / "step-00000000")
        shutil.rmtree(directory / "step-00000000")
        return num_bytes


def main() -> None:
    """Measures and prints."""
    warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
    parser = parser_for(__doc__, rounds=9, has_tiny=True)
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    given = parser.parse_args()
    load, training = MachineLoad(), Training.of(gpt2(tiny=given.tiny))
    model, optimizer = get_state_dict(training.model, training.optimizer)
    with tempfile.TemporaryDirectory(prefix="dcp-save-", dir=given.directory or ".") as name:
        directory = Path(name).absolute()
        savers = Savers(directory, {"model": model, "optimizer": optimizer})
        num_bytes = savers.check()
        limits = RawLimits(directory, num_bytes)
        contenders: dict[str, Callable[[], Cost]] = {
            WRITE: lambda: Cost(limits.write(), 0, 0, 0),
            OURS: savers.ours,
            STOCK: partial(savers.stock, num_threads=1),
            STOCK_THREADS: partial(savers.stock, num_threads=2),
        }
        costs = interleaved(contenders, given.rounds)
    seconds = {name: [cost.seconds for cost in found] for name, found in costs.items()}
    memory = {
        name: f"{max(cost.extra_bytes for cost in found) / 1e6:.0f} MB"
        for name, found in costs.items()
    }

    def row(name: str, against: str, target: Target | None) -> tuple[str, ...]:
        others = seconds[against]
        return compared(name, seconds[name], against, others, target, memory=memory[name])

    size = f"{num_bytes / 1e9:.2f} GB"
    Findings(
        "dcp-save",
        heading="dcp.save beside DCP's own writer",
        before=[
            f"`python benchmarks/dcp_save.py --record`: GPT-2 124M in float32 with AdamW, {size}:",
            "DCP saves tied weights twice, and so does this writer. One process, one thread. A",
            "ratio is the median of the rounds' ratios. Every save is durable. The raw row uses",
            "no code of resumekit: O_DIRECT from huge pages, one thread, as many bytes.",
        ],
        title=f"dcp.save of {size}, {given.rounds} rounds",
        headings=HEADINGS,
        rows=[
            stated(WRITE, seconds[WRITE]),
            row(OURS, STOCK, LIMIT),
            row(OURS, STOCK_THREADS, None),
            row(OURS, WRITE, None),
            row(STOCK, WRITE, None),
        ],
        packages=("torch", "numpy", "transformers"),
        load=load,
    ).publish(given.record)


if __name__ == "__main__":
    main()
