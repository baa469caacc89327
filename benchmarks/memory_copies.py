"""What does a copy of the state in the memory of the node cost, beside one copy and a digest?

    python benchmarks/memory_copies.py [--rounds 20] [--record]

Half a minute. The steps of one training are timed, each from the end of a step to the next batch;
beside each of them the same bytes are copied once in memory, and digested.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import xxhash
from judging import HEADINGS, Target, compared, stated
from measuring import Findings, MachineLoad, bytes_of, parser_for, timed
from raw_limits import RawLimits
from torch import nn

from resumekit import Place
from resumekit.adapters.torch import Checkpointer
from resumekit.places import memory
from resumekit.storage.store import Store

WIDTH, NUM_LAYERS = 2000, 10  # 160 MB of weights, and as much momentum
NUM_WARM = 4  # copies that write fresh pages, and one that uses them for the first time
LIMIT = Target(1.5)


class Training:
    """A training that copies each step to memory, or none.

    Args:
        directory: of the run.
        layers: of the model.
        width: of each layer.
        is_copied: whether there is a place in memory.
    """

    def __init__(self, directory: Path, layers: int, width: int, *, is_copied: bool) -> None:
        self._model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self.checkpointer = Checkpointer(
            directory,
            model=self._model,
            optimizer=optimizer,
            save_every=None,
            loop_variables="off",  # those of this benchmark
            places=[Place("memory", save_every=1)] if is_copied else [],
        )
        self._optimizer = optimizer
        self._batches = iter(self.checkpointer.batches(range(100_000), epochs=1))

    def step(self) -> float:
        """Seconds from the end of a step to the next batch."""
        for each in self._model.parameters():
            each.grad = torch.zeros_like(each)
        self._optimizer.step()
        self.checkpointer.step()
        return timed(lambda: next(self._batches))[0]

    def begin(self) -> None:
        """Gets the first batch, and makes the first copies."""
        next(self._batches)
        for _ in range(NUM_WARM):
            self.step()


def bytes_copied(directory: Path) -> int:
    """The files of a copy together."""
    run_id = Store(directory).recorded_run_id()
    copies = None if run_id is None else memory.find_memory(run_id)
    assert copies is not None, "no copy was made: is there memory for two?"
    (newest,) = copies.glob("step-*")
    return bytes_of(newest)


def main() -> None:
    """Measures and prints."""
    given = parser_for(__doc__, rounds=20, has_tiny=True).parse_args()
    layers, width = (1, 300) if given.tiny else (NUM_LAYERS, WIDTH)
    load, seconds = (
        MachineLoad(),
        {name: list[float]() for name in ("large", "limit", "small", "none")},
    )
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        large = Training(root / "large", layers, width, is_copied=True)
        small = Training(root / "small", 1, 16, is_copied=True)
        none = Training(root / "none", 1, 16, is_copied=False)
        for each in (large, small, none):
            each.begin()
        num_bytes = bytes_copied(root / "large")
        limits, buffer = RawLimits(root, num_bytes), bytearray(num_bytes)
        for _ in range(given.rounds):
            seconds["large"].append(large.step())
            digest = timed(lambda: xxhash.xxh3_128(buffer).digest())[0]
            seconds["limit"].append(limits.copy() + digest)
            seconds["small"].append(small.step())
            seconds["none"].append(none.step())
        for each in (large, small, none):
            each.checkpointer.close()
        for name in ("large", "small"):
            memory.remove_memory(Store(root / name).recorded_run_id() or "")
    size = f"{num_bytes / 1e6:,.0f} MB"
    Findings(
        "memory-copies",
        heading="Copies in the memory of the node",
        before=[
            "`python benchmarks/memory_copies.py --record`: SGD with momentum on the CPU, one",
            'thread, `Place("memory", save_every=1)`. Timed from the end of a step to the next',
            "batch. The limit is one copy of as many bytes to memory that is in use, and an",
            "xxh3-128 of them.",
        ],
        title="copies in memory",
        headings=HEADINGS,
        rows=[
            compared(
                f"a copy of {size}",
                seconds["large"],
                "one copy and digest",
                seconds["limit"],
                LIMIT,
            ),
            stated("a copy of a model of 16 x 16", seconds["small"]),
            stated("the same boundary without", seconds["none"]),
        ],
        packages=("torch", "xxhash"),
        load=load,
    ).publish(given.record)


if __name__ == "__main__":
    main()
