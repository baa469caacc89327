"""How long does it take from the kill of a training to its first step after the restart?

A small model is trained under each framework, in a process of its own. It is killed after some
steps, and the same command is started at once: it resumes. Both starts are timed up to the end of
the first step that they train; a third figure is a verified read of the checkpoint from which the
second one resumes, in this process. One more row has a shuffled map-style loader of ten million
samples that is killed in the middle of its epoch.

    python benchmarks/restart.py [--only torch ...] [--rounds 7] [--record]

A round of all takes one to two minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from judging import Target, judge
from measuring import Findings, MachineLoad, interleaved, parser_for, timed
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAVE_EVERY, KILL_AFTER = 5, 8
NUM_SAMPLES, BATCH_SIZE = 1_000, 10
LARGE, LARGE_BATCH = 10_000_000, 1_000_000  # it resumes in the middle of the epoch
STEP = "trained a step"
LIMIT = Target(0.5, unit=" s")


class Samples(Dataset[torch.Tensor]):
    """As cheap as a dataset can be.

    Args:
        length: the number of samples.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """A batch, which is made at once: a few rows, however many indices there are."""
        return list(torch.tensor(indices[:8], dtype=torch.float32).unsqueeze(1) / self._length)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]


def make_loader(length: int = NUM_SAMPLES, batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    """A shuffled map-style loader."""
    return DataLoader(Samples(length), batch_size=batch_size, shuffle=True)


def report_step() -> None:
    """Prints the CPU time so far, for the process that measures."""
    print(f"{STEP} {time.process_time()}", flush=True)


class Model(nn.Module):
    """Small, with the loss as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        return {"loss": self.linear(x).pow(2).mean()}


def run_torch(directory: str, loader: Callable[[], DataLoader[Any]] = make_loader) -> None:
    """A plain loop."""
    from resumekit.adapters.torch import Checkpointer

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    saving = Checkpointer(directory, model=model, optimizer=optimizer, save_every=SAVE_EVERY)
    for x in saving.batches(loader(), epochs=1):
        loss = model(x)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saving.step(loss=loss)
        report_step()


def run_accelerate(directory: str) -> None:
    """A loop with an Accelerator."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), make_loader()
    )
    saving = Checkpointer(accelerator, directory, save_every=SAVE_EVERY)
    for x in saving.batches(loader, epochs=1):
        accelerator.backward(model(x)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        saving.step()
        report_step()


def run_trainer(directory: str) -> None:
    """A Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    class Reports(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report_step()

    arguments = TrainingArguments(
        output_dir=f"{directory}-trainer",
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=Samples(NUM_SAMPLES),
        data_collator=lambda samples: {"x": torch.stack(samples)},
        callbacks=[Reports()],
    )
    ResumeCallback(trainer, directory, save_every=SAVE_EVERY)
    trainer.train()


def run_lightning(directory: str) -> None:
    """A Trainer of Lightning."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from resumekit.adapters.lightning import ResumeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Reports(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            report_step()

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Reports(), ResumeCallback(directory, save_every=SAVE_EVERY)],
    )
    trainer.fit(Module(), make_loader())


def run_deepspeed(directory: str) -> None:
    """A DeepSpeed engine, on one rank."""
    import deepspeed

    from resumekit.adapters.deepspeed import Checkpointer

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    deepspeed.init_distributed("gloo")
    model: Any = Model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]
    saving = Checkpointer(engine, directory, save_every=SAVE_EVERY)
    for x in saving.batches(make_loader(), epochs=1):
        engine.backward(engine(x)["loss"])
        engine.step()
        saving.step()
        report_step()


RUNS: Mapping[str, Callable[[str], None]] = {
    "torch": run_torch,
    f"torch, {LARGE:,} samples": partial(
        run_torch, loader=partial(make_loader, LARGE, LARGE_BATCH)
    ),
    "transformers": run_trainer,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
    "deepspeed": run_deepspeed,
}


class Start(NamedTuple):
    """A process up to the end of the first step that it trained.

    Args:
        seconds: from its start, or from the kill of the one before.
        cpu_seconds: of the process.
        killed: when it was killed, by the clock of ``time.perf_counter``.
    """

    seconds: float
    cpu_seconds: float
    killed: float


class Restart(NamedTuple):
    """One round under a framework.

    Args:
        fresh: the first start.
        resumed: the start after the kill.
        read: seconds of a verified read of the checkpoint.
    """

    fresh: Start
    resumed: Start
    read: float

    @property
    def added(self) -> float:
        """The seconds of a resume above a fresh start and the read."""
        return self.resumed.seconds - self.fresh.seconds - self.read

    @property
    def added_cpu(self) -> float:
        """The CPU seconds of a resume above a fresh start."""
        return self.resumed.cpu_seconds - self.fresh.cpu_seconds


def restart(name: str) -> Restart:
    """Starts, kills and starts again.

    Raises:
        SystemExit: a process ended by itself.
    """
    from resumekit.storage.store import Store

    with tempfile.TemporaryDirectory(dir=".") as folder:
        run = Path(folder, "run").absolute()
        command = [sys.executable, __file__, "--child", name, "--directory", str(run)]
        fresh = first_step(command, time.perf_counter(), num_steps=KILL_AFTER)
        (newest, *_) = Store(run).step_names()
        resumed = first_step(command, fresh.killed, num_steps=1)
        seconds, _ = timed(Store(run).open_step(newest).verify)
        return Restart(fresh, resumed, seconds)


def first_step(command: list[str], begun: float, *, num_steps: int) -> Start:
    """A start of a process, which is killed after some steps.

    Args:
        command: of the process.
        begun: the instant from which its seconds count.
        num_steps: after this one it is killed.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with process:
            assert process.stdout is not None
            found = []
            for line in process.stdout:
                if line.startswith(STEP):
                    found.append((time.perf_counter(), float(line.split()[-1])))
                if len(found) == num_steps:
                    break
            killed = time.perf_counter()
            process.kill()
        if process.returncode != -signal.SIGKILL:
            errors.seek(0)
            raise SystemExit(errors.read()[-4000:].decode(errors="replace"))
    return Start(found[0][0] - begun, found[0][1], killed)


def row_of(name: str, rounds: list[Restart]) -> tuple[str, ...]:
    """Medians, and the judgement of what a resume adds."""
    columns = (
        [each.fresh.seconds for each in rounds],
        [each.resumed.seconds for each in rounds],
        [each.read for each in rounds],
        [each.added_cpu for each in rounds],
    )
    judged = judge([each.added for each in rounds], LIMIT)
    return (name, *(f"{statistics.median(each):.2f} s" for each in columns), *judged.cells())


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=7, has_tiny=True)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="these rows")
    parser.add_argument("--child", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        torch.manual_seed(0)
        RUNS[given.child](given.directory)
        return
    load = MachineLoad()
    names = given.only or list(RUNS)
    contenders = {name: partial(restart, name) for name in names}
    found = interleaved(contenders, given.rounds, warms_up=not given.tiny)
    Findings(
        "restart",
        heading="From a kill to the next trained step",
        before=[
            "`python benchmarks/restart.py --record`: a model of two numbers under each framework,",
            f"saved every {SAVE_EVERY} steps and killed after step {KILL_AFTER}; the same command",
            "resumes it. From the start, or from the kill, to the end of the first trained step,",
            "with the start of Python and all imports. The read is a verified one of the",
            "checkpoint's files, in the page cache. Added: resumed less fresh less read; CPU:",
            "resumed less fresh. Medians of rounds, each in random order; the interval is a",
            "bootstrap's over the rounds.",
        ],
        title="restarts",
        headings=(
            *("under", "fresh start", "resumed start", "verified read", "added CPU"),
            *("added", "90 % interval", "target", "verdict"),
        ),
        rows=[row_of(name, rounds) for name, rounds in found.items()],
        packages=("torch", "transformers", "accelerate", "lightning", "deepspeed"),
        load=load,
    ).publish(given.record)


if __name__ == "__main__":
    main()
