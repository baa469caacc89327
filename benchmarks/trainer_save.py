"""What does the ResumeCallback cost a Trainer? A step without a save, and a save, side by side.

Two Trainers of the same tiny GPT-2 train in one process and take turns, some steps each: a stock
one, and one with the callback. Two stock ones differ by some percent of a step for as long as they
live, so the places are timed at which the callback is met: where the Trainer asks for the batches
of a step, and where a step ends. Then a larger one saves at every step, by itself and through the
callback.

    python benchmarks/trainer.py [--turns 60] [--saves 8] [--record]

Prints what a step takes with and without the callback and their ratio, and the same for a save.
The Trainer's own files may be lost in a power cut: it does not ask for them to be on the disk, and
takes no digests. Ours are, and have; so its save is timed with an ``fsync`` too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from findings import Findings, machine
from rich.console import Console
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from resumekit.adapters.transformers import ResumeCallback

STEPS_PER_TURN = 10
WARM_UP = 3  # turns
BLOCK_SIZE = 64
BATCH_SIZE = 16
AIM = 0.01
TINY = {"n_embd": 64, "n_layer": 2, "n_head": 2}
LARGER = {"n_embd": 512, "n_layer": 8, "n_head": 8}


class Tokens(Dataset[Any]):
    """Samples that are there, and cost nothing."""

    def __init__(self, length: int) -> None:
        self.tokens = torch.randint(256, (length, BLOCK_SIZE))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_trainer(
    directory: str, sizes: dict[str, int], num_steps: int, *callbacks: Any, **settings: Any
) -> Trainer:
    """A Trainer of a GPT-2 for so many steps."""
    set_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=BLOCK_SIZE, **ends, **sizes)
    arguments = TrainingArguments(
        output_dir=f"{directory}/output",
        max_steps=num_steps,
        per_device_train_batch_size=BATCH_SIZE,
        logging_steps=10**9,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        **{"save_strategy": "no", **settings},
    )
    data = Tokens(num_steps * BATCH_SIZE)
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[*callbacks])


class Timed:
    """Calls a function, and keeps how long it took."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = self._call(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        return result


class Turns(TrainerCallback):
    """Lets two Trainers take turns."""

    def __init__(self, switch: threading.Condition, order: list[int], own: int) -> None:
        self.switch = switch
        self.order = order  # whose turn it is
        self.own = own
        self.steps: list[float] = []  # what a step took, by turns
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % STEPS_PER_TURN == 0:
            self.steps.append((time.perf_counter() - self._began) / STEPS_PER_TURN)
            self._pass_on()
            self._wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self.switch:
            self.order[0] = 1 - self.own
            self.switch.notify_all()

    def _wait(self) -> None:
        with self.switch:
            self.switch.wait_for(lambda: self.order[0] == self.own)
        self._began = time.perf_counter()


class Places(NamedTuple):
    """Seconds by steps or, of whole steps, by turns."""

    step: list[float]
    fetch: list[float]
    end: list[float]


def step_times(num_turns: int, directory: str) -> tuple[Places, Places]:
    """Of the stock Trainer, and of ours."""
    num_steps = (num_turns + WARM_UP) * STEPS_PER_TURN
    switch, order = threading.Condition(), [0]
    turns = [Turns(switch, order, own) for own in (0, 1)]
    fetches, ends, threads = [], [], []
    for own, name in enumerate(("stock", "ours")):
        trainer = make_trainer(f"{directory}/{name}", TINY, num_steps, turns[own])
        # Signals are for the main thread.
        callback = ResumeCallback(trainer, f"{directory}/run", leave_on=()) if own else None
        end = Timed(callback.on_step_end if callback else lambda *args, **kwargs: None)
        if callback is not None:
            callback.on_step_end = end  # type: ignore[method-assign]
            trainer.add_callback(callback)
        trainer.get_batch_samples = fetch = Timed(trainer.get_batch_samples)  # type: ignore[method-assign]
        fetches.append(fetch)
        ends.append(end)
        threads.append(threading.Thread(target=trainer.train))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    warm = WARM_UP * STEPS_PER_TURN
    stock, ours = (
        Places(turns[own].steps[WARM_UP:], fetches[own].seconds[warm:], ends[own].seconds[warm:])
        for own in (0, 1)
    )
    return stock, ours


class _TimesSaves(TrainerCallback):
    """Watches the callback's saves, once it has something to save with."""

    def __init__(self, callback: ResumeCallback) -> None:
        self.callback = callback
        self.save: Timed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.callback._checkpointer._run
        self.save = run.save = Timed(run.save)  # type: ignore[method-assign, assignment]


def flush(folder: Path) -> None:
    """Waits until every file in it is on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


class SaveTimes(NamedTuple):
    """Seconds of each save, by the Trainer itself, with an ``fsync``, and by the callback.

    Attributes:
        num_bytes: of one of ours.
    """

    stock: list[float]
    flushed: list[float]
    ours: list[float]
    num_bytes: int


def save_times(num_saves: int, directory: str) -> SaveTimes:
    """The Trainer's own saves, and ours."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = make_trainer(directory, LARGER, num_saves + 1, **settings)
    callback = ResumeCallback(trainer, f"{directory}/run")
    watch = _TimesSaves(callback)
    for each in (callback, watch):
        trainer.add_callback(each)
    own = Timed(trainer._save_checkpoint)

    def save_and_flush(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        flush(Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}"))

    both = trainer._save_checkpoint = Timed(save_and_flush)  # type: ignore[method-assign]
    trainer.train()
    newest = max(Path(directory, "run").glob("step-*"))
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    ours = watch.save.seconds[1 : num_saves + 1]
    return SaveTimes(own.seconds[1:], both.seconds[1:], ours, size)


def ms(seconds: float) -> str:
    """In milliseconds."""
    return f"{seconds * 1e3:,.3f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def step_row(stock: Places, ours: Places) -> tuple[str, ...]:
    """Medians: a stock step, and what the callback adds at its places."""
    median = statistics.median
    step = median(stock.step)
    added = median(ours.fetch) - median(stock.fetch) + median(ours.end)
    return ("a step", ms(step), ms(step + added), ms(added), f"{1 + added / step:.4f}x")


def save_row(what: str, stock: Sequence[float], ours: Sequence[float]) -> tuple[str, ...]:
    """Medians of the saves, of what ours adds and of the ratios of pairs."""
    pairs = list(zip(stock, ours, strict=True))
    added = statistics.median([b - a for a, b in pairs])
    ratio = statistics.median([b / a for a, b in pairs])
    medians = (ms(statistics.median(each)) for each in (stock, ours))
    return (what, *medians, ms(added), f"{ratio:.2f}x")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=60, help="measured turns (default 60)")
    parser.add_argument("--saves", type=int, default=8, help="measured saves (default 8)")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    console = Console()
    with (
        tempfile.TemporaryDirectory() as directory,
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        stock, ours = step_times(arguments.turns, directory)
        saves = save_times(arguments.saves, f"{directory}/saves")
    size = f"{saves.num_bytes / 2**20:,.0f} MiB"
    found = Findings(
        f"a Trainer, stock and with the callback, {arguments.turns} turns, {arguments.saves} saves",
        ("what", "stock ms", "with the callback ms", "added ms", "ratio"),
        [
            step_row(stock, ours),
            save_row(f"a save of {size}", saves.stock, saves.ours),
            save_row("the same, the stock one with fsync", saves.flushed, saves.ours),
        ],
        machine("torch", "transformers", "accelerate"),
    )
    found.show(console)
    if arguments.record:
        path = found.record(
            "trainer",
            heading="What the callback costs a Trainer",
            before=[
                "`python benchmarks/trainer.py --record`: two Trainers of a GPT-2 of 2 layers and",
                f"64 dimensions, {BATCH_SIZE} blocks of {BLOCK_SIZE} tokens, in one process, by",
                f"turns of {STEPS_PER_TURN} steps without a save. Added is what asking for the",
                "batches of a step takes longer, and the callback at the step's end; medians.",
                "Saves: one Trainer of a GPT-2 of 8 layers and 512 dimensions with AdamW saves",
                "every step twice, by itself (`_save_checkpoint`) and through the callback, which",
                "returns when all is on the disk and has a digest. The stock save asks for no",
                "`fsync`; the last row adds one. Medians, also of differences and ratios.",
                f"The aim is to add less than {AIM:.0%} to a step.",
            ],
        )
        console.print(f"written to {path}")


if __name__ == "__main__":
    main()
