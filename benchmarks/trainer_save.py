"""What does a save through the ResumeCallback take, next to the Trainer's own?

One Trainer of a GPT-2 with AdamW saves at every step, by itself and through the callback. The
Trainer's own files may be lost in a power cut: it asks for no ``fsync`` and takes no digests. Ours
are durable and digested when the save returns; so a row adds an ``fsync`` to the Trainer's save.

    python benchmarks/trainer_save.py [--saves 8] [--record]

What the callback adds to a step is measured by ``overheads.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import Findings, Timed, bytes_of, fsync_all, paired_row, parser_for, silenced
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

BLOCK_SIZE = 64
BATCH_SIZE = 16
SIZES = {"n_embd": 512, "n_layer": 8, "n_head": 8}


class Tokens(Dataset[Any]):
    """Samples that are there, and cost nothing."""

    def __init__(self, length: int) -> None:
        self.tokens = torch.randint(256, (length, BLOCK_SIZE))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_trainer(directory: str, num_steps: int) -> Trainer:
    """A Trainer of a GPT-2 that saves every one of so many steps."""
    set_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=BLOCK_SIZE, **ends, **SIZES)
    arguments = TrainingArguments(
        output_dir=f"{directory}/output",
        max_steps=num_steps,
        per_device_train_batch_size=BATCH_SIZE,
        logging_steps=10**9,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
    )
    data = Tokens(num_steps * BATCH_SIZE)
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)


class _TimesSaves(TrainerCallback):
    """Watches the callback's saves, once it has something to save with."""

    def __init__(self, callback: ResumeCallback) -> None:
        self.callback = callback
        self.save: Timed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.callback._checkpointer._run
        self.save = run.save = Timed(run.save)  # type: ignore[method-assign, assignment]


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
    trainer = make_trainer(directory, num_saves + 1)
    callback = ResumeCallback(trainer, f"{directory}/run")
    watch = _TimesSaves(callback)
    for each in (callback, watch):
        trainer.add_callback(each)
    saver = Timed(trainer._save_checkpoint)

    def save_and_flush(*args: Any, **kwargs: Any) -> None:
        saver(*args, **kwargs)
        fsync_all(Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}"))

    both = trainer._save_checkpoint = Timed(save_and_flush)  # type: ignore[method-assign]
    trainer.train()
    newest = max(Path(directory, "run").glob("step-*"))
    ours = watch.save.seconds[1 : num_saves + 1]
    return SaveTimes(saver.seconds[1:], both.seconds[1:], ours, bytes_of(newest))


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--saves", type=int, default=8, help="measured saves (default 8)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, silenced():
        saves = save_times(arguments.saves, directory)
    size = f"{saves.num_bytes / 2**20:,.0f} MiB"
    Findings(
        "trainer-save",
        heading="Saves of a Trainer",
        before=[
            "`python benchmarks/trainer_save.py --record`: one Trainer of a GPT-2 of 8 layers",
            "and 512 dimensions with AdamW saves every step twice, by itself",
            "(`_save_checkpoint`) and through the callback, which returns when all is on the",
            "disk and has a digest. The stock save asks for no `fsync`; the last row adds one.",
            "Medians, also of differences and ratios.",
        ],
        title=f"saves of a Trainer, its own and the callback's, {arguments.saves} of each",
        headings=("what", "stock ms", "with the callback ms", "added ms", "ratio"),
        rows=[
            paired_row(f"a save of {size}", saves.stock, saves.ours),
            paired_row("the same, the stock one with fsync", saves.flushed, saves.ours),
        ],
        packages=("torch", "transformers", "accelerate"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
