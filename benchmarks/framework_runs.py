"""One training of GPT-2 under each framework with saves of both kinds, for ``framework_savers.py``.

What happens from the end of an optimizer step to the beginning of the next one holds training up.
There the framework's own saver is called, or a save of ours is asked for, which is made before the
next batch. Neither has an old checkpoint to delete then.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from measuring import bytes_of, fsync_all, shuffled
from raw_limits import RawLimits
from torch import distributed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel
from workload import Tokens, gpt2

OURS, STOCK, FLUSHED = "resumekit", "framework's own saver", "framework's own saver + fsync"
WRITE, COPY = "raw write + fsync", "one warm copy in memory"
LEARNING_RATE = 1e-5
DEEPSPEED = "deepspeed"
DEEPSPEED_LAYERS = 2  # with 12, its own saver took 9 s a save on a busy machine


def model_of(name: str, *, tiny: bool) -> GPT2LMHeadModel:
    """What is trained under a framework.

    Args:
        name: of the framework.
        tiny: to try the script.
    """
    if name.startswith(DEEPSPEED):
        return gpt2(tiny=tiny, num_layers=DEEPSPEED_LAYERS)
    return gpt2(tiny=tiny)


@dataclass(frozen=True)
class Task:
    """What a child process measures.

    Args:
        directory: where it writes.
        num_rounds: that count; one more warms up.
        is_async: whether our saves are.
        is_tiny: whether the model is.
        state_bytes: of the training state, for the limits of the machine.
    """

    directory: Path
    num_rounds: int
    is_async: bool
    is_tiny: bool
    state_bytes: int

    @property
    def names(self) -> list[str]:
        """The contenders: what a durable save is compared with, or what an async save is."""
        return [OURS, STOCK, COPY] if self.is_async else [OURS, FLUSHED, WRITE]

    @property
    def num_steps(self) -> int:
        """Of the training: a turn follows each, but for the last one."""
        return (self.num_rounds + 1) * 2 + 1

    @property
    def options(self) -> dict[str, Any]:
        """Of our Checkpointer or callback: it saves where it is asked to, and deletes nothing."""
        given = {"save_every": 10**9, "keep_latest": None, "leave_on": ()}
        return {**given, "async_save": True} if self.is_async else given


@dataclass
class SaveSchedule:
    """Which save follows a step, and how long each one took.

    Args:
        task: what is measured.
        save: asks our Checkpointer for a save.
        wait: for our save to be durable.
        save_stock: calls the framework's saver with a new path.
    """

    task: Task
    save: Callable[[], Any]
    wait: Callable[[], Any]
    save_stock: Callable[[Path], Any]
    seconds: dict[str, list[float]] = field(init=False)
    num_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = {name: [] for name in self.task.names}
        rounds = shuffled(self.task.names, self.task.num_rounds + 1)
        self._plan = [(number, name) for number, names in enumerate(rounds) for name in names]
        self._stock = self.task.directory / "stock"
        self._numbers = count()
        self._limits = RawLimits(self.task.directory, self.task.state_bytes) if _first() else None
        self._current: tuple[int, str] | None = None
        self._began = 0.0

    def begin(self) -> None:
        """A step has ended."""
        while self._plan and self._plan[0][1] in (WRITE, COPY):
            number, name = self._plan.pop(0)
            self._note(number, name, self._limit(name))
        if not self._plan:
            return
        self._current = self._plan.pop(0)
        path = self._stock / f"{next(self._numbers)}"
        if _first():
            self._stock.mkdir(exist_ok=True)
            os.sync()
        _barrier()
        self._began = time.perf_counter()
        if self._current[1] == OURS:
            self.save()
            return
        self.save_stock(path)
        if self._current[1] == FLUSHED:
            _barrier()
            if _first():
                fsync_all(path if path.exists() else self._stock)

    def end(self) -> None:
        """The next step begins."""
        if self._current is None:
            return
        _barrier()
        number, name = self._current
        self._note(number, name, time.perf_counter() - self._began)
        self._current = None
        self.wait()
        if _first():
            folder = self._ours() if name == OURS else self._stock
            self.num_bytes[name] = bytes_of(folder)
            shutil.rmtree(self._stock)
            os.sync()
        _barrier()

    def _limit(self, name: str) -> float:
        if self._limits is None:
            return 0.0
        return self._limits.write() if name == WRITE else self._limits.copy()

    def _note(self, number: int, name: str, seconds: float) -> None:
        if number:
            self.seconds[name].append(seconds)

    def _ours(self) -> Path:
        """The newest of our checkpoints; those before the last two are removed."""
        steps = sorted((self.task.directory / "run").glob("step-*"))
        for old in steps[:-2]:
            shutil.rmtree(old)
        return steps[-1]

    def record(self) -> None:
        """Writes what was found, for the parent process."""
        if _first():
            found = {"seconds": self.seconds, "bytes": self.num_bytes}
            (self.task.directory / "found.json").write_text(json.dumps(found))


def _first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def _barrier() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def run_trainer(task: Task) -> None:
    """A transformers Trainer; its own saver is what it calls itself to save."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    class SavedTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            schedule.end()
            return super().training_step(*args, **kwargs)

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            schedule.begin()

    def save_stock(path: Path) -> None:
        before, trainer.args.output_dir = trainer.args.output_dir, str(path)
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.args.output_dir = before

    arguments = TrainingArguments(
        output_dir=str(task.directory / "stock"),
        max_steps=task.num_steps,
        per_device_train_batch_size=1,
        learning_rate=LEARNING_RATE,
        logging_steps=10**9,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    data = Tokens(task.num_steps)
    trainer = SavedTrainer(gpt2(tiny=task.is_tiny), arguments, train_dataset=data)
    callback = ResumeCallback(trainer, task.directory / "run", **task.options)
    schedule = SaveSchedule(
        task,
        save=lambda: callback._checkpointer.save(),
        wait=lambda: callback._checkpointer.wait(),
        save_stock=save_stock,
    )
    trainer.add_callback(callback)
    trainer.add_callback(Watch())
    trainer.train()
    schedule.record()


def run_accelerate(task: Task) -> None:
    """A loop of its own with an Accelerator."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator: Any = Accelerator(cpu=True)
    model = gpt2(tiny=task.is_tiny)
    parts = accelerator.prepare(
        model, AdamW(model.parameters(), LEARNING_RATE), DataLoader(Tokens(task.num_steps))
    )
    model, optimizer, loader = parts
    checkpointer = Checkpointer(accelerator, task.directory / "run", **task.options)
    schedule = SaveSchedule(
        task,
        save=checkpointer.save,
        wait=checkpointer.wait,
        save_stock=lambda path: accelerator.save_state(str(path)),
    )
    for batch in checkpointer.batches(loader, epochs=1):
        schedule.end()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        schedule.begin()
    checkpointer.close()
    schedule.record()


def run_lightning(task: Task) -> None:
    """A Lightning Trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from resumekit.adapters.lightning import ResumeCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2(tiny=task.is_tiny)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            schedule.end()
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), LEARNING_RATE)

    class Watch(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            schedule.begin()

    callback = ResumeCallback(task.directory / "run", **task.options)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch(), callback],
    )

    def wait() -> None:
        if callback._checkpointer is not None:
            callback._checkpointer.wait()

    schedule = SaveSchedule(task, save=callback.save, wait=wait, save_stock=trainer.save_checkpoint)
    trainer.fit(Module(), DataLoader(Tokens(task.num_steps)))
    schedule.record()


def run_deepspeed(task: Task, stage: int) -> None:
    """One rank of a DeepSpeed engine."""
    import deepspeed

    from resumekit.adapters.deepspeed import Checkpointer

    deepspeed.init_distributed("gloo")
    model = model_of(DEEPSPEED, tiny=task.is_tiny)
    parameters = {"lr": LEARNING_RATE, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": {"stage": stage},
    }
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]
    loader = DataLoader(Tokens(task.num_steps))  # of each rank: the samples do not matter
    checkpointer = Checkpointer(engine, task.directory / "run", **task.options)
    schedule = SaveSchedule(
        task,
        save=checkpointer.save,
        wait=checkpointer.wait,
        save_stock=lambda path: engine.save_checkpoint(str(path), tag="saved"),
    )
    for batch in checkpointer.batches(loader, epochs=1):
        schedule.end()
        engine.backward(engine(**batch).loss)
        engine.step()
        checkpointer.step()
        schedule.begin()
    checkpointer.close()
    schedule.record()
    distributed.barrier()
    distributed.destroy_process_group()


RUNS: Mapping[str, Callable[[Task], None]] = {
    "transformers": run_trainer,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
    "deepspeed-1": lambda task: run_deepspeed(task, 1),
    "deepspeed-2": lambda task: run_deepspeed(task, 2),
    "deepspeed-3": lambda task: run_deepspeed(task, 3),
}
