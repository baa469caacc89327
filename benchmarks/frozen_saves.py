"""How long does a save take when 98 % of the parameters are frozen, beside the first save?

Layers of 1.3 GB; 98 % of their parameters are in no optimizer. A run saves three times, with a step
of the trained ones between, and in every round that is a new run. From the third save on, the
frozen ones need not be written again: their file is a link to that of an earlier checkpoint. As
long as there is no such link, the row says that this is not built.

Before it links, the save reads every frozen byte once: only a digest shows that nothing has written
to them. How fast memory is read limits it, so one pass over these bytes is a row of its own, and so
is the write of all others: the save overlaps the two, and takes at least as long as the slower one.

    python benchmarks/frozen_saves.py [--rounds 7] [--directory DIR] [--record]
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from judging import HEADINGS, Target, compared, stated
from measuring import Findings, MachineLoad, interleaved, parser_for, timed
from raw_limits import RawLimits
from torch import nn
from workload import SavingRun, Training

from resumekit.storage.io.pipeline import num_threads

TARGET = Target(0.10)
NUM_FROZEN, NUM_TRAINED = 147, 3
WIDTH = 1448  # 8.4 MB a layer
_PIECE_BYTES = 512 << 10  # stays in the second-level cache
FIRST, THIRD = "first save", "third save"

Array: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Saves:
    """Of one run: seconds of each, and whether a file of the last is an earlier one's too."""

    seconds: tuple[float, ...]
    is_linked: bool


def partly_frozen(width: int) -> Training:
    """Layers, of which the last ones are trained."""
    layers = [nn.Linear(width, width) for _ in range(NUM_FROZEN + NUM_TRAINED)]
    for layer in layers[:NUM_FROZEN]:
        layer.requires_grad_(requires_grad=False)
    return Training.of(nn.Sequential(*layers))


def save_three_times(training: Training, directory: Path) -> Saves:
    """A new run."""
    run = SavingRun(directory / "run", training, keep_latest=3)
    seconds = []
    for _ in range(3):
        training.step()
        run.finish()
        seconds.append(timed(run.save)[0])
    run.finish()
    files = [path for path in run.newest().rglob("*") if path.is_file()]
    is_linked = any(path.stat().st_nlink > 1 for path in files)
    run.leave()
    shutil.rmtree(directory / "run")
    os.sync()
    return Saves(tuple(seconds), is_linked)


class OnePass:
    """Reads memory once, in a few threads, by whichever reader is the fastest.

    Args:
        tensors: contiguous and in host memory.
        num_threads: how many threads read at the same time.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], num_threads: int) -> None:
        arrays = (each.detach().numpy().reshape(-1).view(np.uint8) for each in tensors)
        pieces = [
            array[begin : begin + _PIECE_BYTES]
            for array in arrays
            for begin in range(0, array.nbytes, _PIECE_BYTES)
        ]
        self._by_thread = [pieces[number::num_threads] for number in range(num_threads)]
        self._scratch = [np.empty(_PIECE_BYTES, np.uint8) for _ in self._by_thread]

    def seconds(self) -> float:
        """Of one pass."""
        readers = (_digest, _sum, _copy)
        return min(timed(partial(self._read, reader))[0] for reader in readers)

    def _read(self, reader: Callable[[Array, Array], object]) -> None:
        def read(pieces: Sequence[Array], scratch: Array) -> None:
            for piece in pieces:
                reader(piece, scratch)

        threads = [
            threading.Thread(target=read, args=arguments)
            for arguments in zip(self._by_thread[1:], self._scratch[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        read(self._by_thread[0], self._scratch[0])
        for thread in threads:
            thread.join()


def _digest(piece: Array, _: Array) -> None:
    xxhash.xxh3_128_digest(memoryview(piece))  # type: ignore[arg-type]  # a Buffer from 3.12 on


def _sum(piece: Array, _: Array) -> None:
    words = piece[: piece.nbytes // 8 * 8].view(np.uint64)
    np.bitwise_or.reduce(words)


def _copy(piece: Array, scratch: Array) -> None:
    np.copyto(scratch[: piece.nbytes], piece)  # into memory that the caches hold


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=7, has_tiny=True)
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    arguments = parser.parse_args()
    load = MachineLoad()
    training = partly_frozen(16 if arguments.tiny else WIDTH)
    num_bytes = training.num_bytes()
    frozen_tensors = [each for each in training.model.parameters() if not each.requires_grad]
    frozen = sum(each.nbytes for each in frozen_tensors)
    saves: list[Saves] = []

    def measure() -> float:
        saves.append(save_three_times(training, directory))
        return 0.0

    with tempfile.TemporaryDirectory(prefix="frozen-", dir=arguments.directory or ".") as name:
        directory = Path(name).absolute()
        limits = RawLimits(directory, num_bytes)
        others = RawLimits(Path(tempfile.mkdtemp(dir=directory)), num_bytes - frozen)
        contenders = {
            "raw write": limits.write,
            "others": others.write,
            "one pass": OnePass(frozen_tensors, num_threads(1)).seconds,
            "saves": measure,
        }
        found = interleaved(contenders, arguments.rounds)
    raw, kept = found["raw write"], saves[1:]
    first, third = ([each.seconds[index] for each in kept] for index in (0, 2))
    is_linked = all(each.is_linked for each in kept)
    everything = sum(each.nbytes for each in training.model.parameters())
    num_used = num_threads(1)
    one_pass = f"raw pass over the frozen bytes, {num_used} thread{'s' if num_used > 1 else ''}"
    write_of_others = f"raw write of the other {(num_bytes - frozen) / 1e6:.0f} MB + fsync"
    share = f"{frozen / everything:.1%} of the parameters frozen"
    Findings(
        "frozen-saves",
        heading="Saves of frozen parameters",
        before=[
            f"`python benchmarks/frozen_saves.py --record`: linear layers, {share},",
            f"{num_bytes / 1e9:.2f} GB with AdamW's moments for the others; {arguments.rounds}",
            "rounds, each a new run that saves three times. Saves: from the end of a step to the",
            "next batch, durable and digested. The raw pass: by the fastest of xxh3-128, an OR of",
            "all words and a copy into the cache.",
        ],
        title=f"{num_bytes / 1e9:.2f} GB, {share}, {arguments.rounds} rounds",
        headings=HEADINGS[:-1],
        rows=[
            stated("raw write + fsync", raw)[:-1],
            compared(FIRST, first, "raw write + fsync", raw, None)[:-1],
            compared(THIRD, third, "raw write + fsync", raw, None)[:-1],
            compared(one_pass, found["one pass"], FIRST, first, None)[:-1],
            compared(write_of_others, found["others"], FIRST, first, None)[:-1],
            compared(f"{THIRD}, linked", third if is_linked else [], FIRST, first, TARGET)[:-1],
        ],
        packages=("torch", "numpy"),
        load=load,
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
