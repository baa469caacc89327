"""How long does a save take when 98 % of the parameters are frozen, beside the first save?

Layers of 1.3 GB; 98 % of their parameters are in no optimizer. A run saves three times, with a step
of the trained ones between, and in every round that is a new run. From the third save on, the
frozen ones need not be written again: their file is a link to that of an earlier checkpoint. As
long as there is no such link, the row says that this is not built.

    python benchmarks/frozen_saves.py [--rounds 7] [--directory DIR] [--record]
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from judging import HEADINGS, Target, compared, stated
from measuring import Findings, MachineLoad, interleaved, parser_for, timed
from raw_limits import RawLimits
from torch import nn
from workload import SavingRun, Training

TARGET = Target(0.10)
NUM_FROZEN, NUM_TRAINED = 147, 3
WIDTH = 1448  # 8.4 MB a layer
FIRST, THIRD = "first save", "third save"


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


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=7, has_tiny=True)
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    arguments = parser.parse_args()
    load = MachineLoad()
    training = partly_frozen(16 if arguments.tiny else WIDTH)
    num_bytes = training.num_bytes()
    saves: list[Saves] = []

    def measure() -> float:
        saves.append(save_three_times(training, directory))
        return 0.0

    with tempfile.TemporaryDirectory(prefix="frozen-", dir=arguments.directory or ".") as name:
        directory = Path(name).absolute()
        limits = RawLimits(directory, num_bytes)
        found = interleaved({"raw write": limits.write, "saves": measure}, arguments.rounds)
    raw, kept = found["raw write"], saves[1:]
    first, third = ([each.seconds[index] for each in kept] for index in (0, 2))
    is_linked = all(each.is_linked for each in kept)
    frozen = sum(each.nbytes for each in training.model.parameters() if not each.requires_grad)
    everything = sum(each.nbytes for each in training.model.parameters())
    share = f"{frozen / everything:.1%} of the parameters frozen"
    Findings(
        "frozen-saves",
        heading="Saves of frozen parameters",
        before=[
            f"`python benchmarks/frozen_saves.py --record`: linear layers, {share},",
            f"{num_bytes / 1e9:.2f} GB with AdamW's moments for the others; {arguments.rounds}",
            "rounds, each a new run that saves three times. Saves: from the end of a step to the",
            "next batch, durable and digested.",
        ],
        title=f"{num_bytes / 1e9:.2f} GB, {share}, {arguments.rounds} rounds",
        headings=HEADINGS[:-1],
        rows=[
            stated("raw write + fsync", raw)[:-1],
            compared(FIRST, first, "raw write + fsync", raw, None)[:-1],
            compared(THIRD, third, "raw write + fsync", raw, None)[:-1],
            compared(f"{THIRD}, linked", third if is_linked else [], FIRST, first, TARGET)[:-1],
        ],
        packages=("torch", "numpy"),
        load=load,
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
