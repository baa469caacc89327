"""Stock trainings in four frameworks that save by their own means, and the same under resumekit.

Each run notes the loss and the samples of every step, and the weights after it. ``how`` is what a
launch does: ``"stock"`` trains without resumekit and saves, ``"own"`` resumes the framework's way,
``"resumekit"`` trains with resumekit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.lightning import ResumeCallback as LightningCallback
from resumekit.adapters.torch import Checkpointer
from resumekit.adapters.transformers import ResumeCallback

RECORDS = "records-{}.pt"
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 40, 4, 3
PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
EPOCH, BATCH = 1, 4  # where Accelerate saves: in the middle of an epoch


class Records:
    """What each step of a launch has used and made."""

    def __init__(self, directory: str, rank: int = 0) -> None:
        self.file = Path(directory) / RECORDS.format(rank)
        self.losses: list[float] = []
        self.samples: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def note_batch(self, loss: Any, samples: torch.Tensor) -> None:
        """A batch was used."""
        self.losses.append(float(loss.detach()))
        self.samples.append(samples.clone())

    def note_weights(self, model: nn.Module) -> None:
        """A step was taken."""
        self.weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))

    def write(self) -> None:
        """Leaves all that for the test."""
        torch.save({name: each for name, each in vars(self).items() if name != "file"}, self.file)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Tokens that follow from the index, some of them replaced at random."""

    def __init__(self, *, augment: bool = False) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index + 3)) % 64
        if self.augment:
            tokens[torch.randint(8, ())] = 0
        return {"input_ids": tokens, "labels": tokens}


def classifier(dropout: float) -> nn.Module:
    """A small network on tokens, its own loss apart."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """A loss that depends on all of the batch."""
    inputs = batch["input_ids"].float() / 64
    return nn.functional.cross_entropy(model(inputs), batch["input_ids"][:, 1] % 4)


# ---------------------------------------------------------------- the Trainer


def in_trainer(
    directory: str,
    *,
    how: str,
    source: str = "",
    augment: bool = False,
    accumulate: int = 1,
    lora: bool = False,
) -> None:
    """GPT-2 with dropout, tied weights, and groups with and without weight decay; or an adapter."""
    set_seed(0)
    model: Any = small_gpt()
    if lora:
        from peft import LoraConfig, get_peft_model

        targets: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
        more = LoraConfig(r=2, lora_dropout=0.1, modules_to_save=["ln_f"], **targets)
        model = get_peft_model(model, more)
    arguments = arguments_of(directory, how=how, gradient_accumulation_steps=accumulate)
    records = Records(directory, arguments.process_index)
    trainer = Recorded(model, arguments, train_dataset=Numbers(augment=augment))
    run_trainer(trainer, records, directory, how=how, source=source)


def small_gpt() -> GPT2LMHeadModel:
    """With dropout and tied weights."""
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))


def arguments_of(
    directory: str, *, how: str, save_steps: int = 1, **more: Any
) -> TrainingArguments:
    """Only the stock training saves."""
    return TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=4,
        save_strategy="steps" if how == "stock" else "no",
        save_steps=save_steps,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        **more,
    )


def run_trainer(
    trainer: Recorded, records: Records, directory: str, *, how: str, source: str, seed: int = 0
) -> None:
    """Trains, and leaves the records; other random numbers follow with another seed."""
    trainer.records = records
    trainer.add_callback(AfterStep(records))
    if how == "resumekit":
        run = Path(directory) / "run"
        trainer.add_callback(ResumeCallback(trainer, run, import_from=source, save_every=None))
    if seed:
        torch.manual_seed(seed)
    trainer.train(resume_from_checkpoint=source if how == "own" else None)
    records.write()


class Recorded(Trainer):
    records: Records

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *rest)
        self.records.note_batch(loss, inputs["input_ids"])
        return loss


class AfterStep(TrainerCallback):
    def __init__(self, records: Records) -> None:
        self.records = records

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.records.note_weights(kwargs["model"])


# ---------------------------------------------------------------- a plain loop


def in_plain_pytorch(directory: str, *, how: str, source: str = "") -> None:
    """A loop that saves a dict at the end of each epoch; its sampler gets the epoch."""
    torch.manual_seed(0)
    records, model = Records(directory), classifier(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, EPOCHS * PER_EPOCH)
    data = Numbers()
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=5)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler)

    def steps(batches: Any) -> Iterator[torch.Tensor]:
        for batch in batches:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            records.note_batch(loss, batch["input_ids"])
            records.note_weights(model)
            yield loss

    if how == "resumekit":
        given: dict[str, Any] = {"model": model, "optimizer": optimizer}
        checkpointer = Checkpointer(source, **given, lr_scheduler=scheduler, save_every=None)
        for loss in steps(checkpointer.batches(loader, epochs=EPOCHS)):
            checkpointer.step(loss=loss)
        checkpointer.close()
    else:
        first = 0
        if how == "own":
            saved = torch.load(source, weights_only=True)
            model.load_state_dict(saved["model_state_dict"])
            optimizer.load_state_dict(saved["optimizer_state_dict"])
            scheduler.load_state_dict(saved["scheduler"])
            first = saved["epoch"] + 1
        for epoch in range(first, EPOCHS):
            sampler.set_epoch(epoch)
            for _ in steps(loader):
                pass
            state = {
                "epoch": epoch,
                "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "best_accuracy": 0.5,
            }
            torch.save(state, Path(directory) / f"epoch-{epoch}.pt")
    records.write()


def in_shards(directory: str, *, source: str) -> None:
    """Imports the file of a plain loop into a model in shards; leaves what it has then."""
    model = classifier(0.0)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer}
    scheduler = CosineAnnealingLR(optimizer, EPOCHS * PER_EPOCH)
    checkpointer = Checkpointer(source, **given, lr_scheduler=scheduler, save_every=None)
    checkpointer.resume()
    weights = {name: _whole(each) for name, each in model.state_dict().items()}
    states = [optimizer.state[each] for each in model.parameters()]
    moments = [{name: _whole(each) for name, each in state.items()} for state in states]
    if torch.distributed.get_rank() == 0:
        torch.save([weights, moments], Path(directory) / "state.pt")
    checkpointer.close()


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# ---------------------------------------------------------------- Lightning


class Module(LightningModule):
    def __init__(self, records: Records) -> None:
        super().__init__()
        self.layers = classifier(0.0)
        self._note = records.note_batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = loss_of(self.layers, batch)
        self._note(loss, batch["input_ids"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, EPOCHS * PER_EPOCH)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class AfterBatch(Callback):
    def __init__(self, records: Records) -> None:
        self._note = records.note_weights

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(pl_module)


def in_lightning(directory: str, *, how: str, source: str = "") -> None:
    """Samples in order, without dropout: all that a checkpoint of Lightning holds."""
    seed_everything(0, verbose=False)
    records = Records(directory)
    fit(Module(records), records, directory, how=how, source=source)


def fit(
    module: LightningModule,
    records: Records,
    directory: str,
    *,
    how: str,
    source: str,
    every: int = 1,
    **options: Any,
) -> None:
    """Trains with Lightning, and leaves the records; a stock training saves every few steps."""
    callbacks: list[Any] = [AfterBatch(records)]
    if how == "stock":
        files = {"dirpath": directory, "filename": "{step}", "save_top_k": -1}
        callbacks.append(ModelCheckpoint(**files, every_n_train_steps=every))
    if how == "resumekit":
        run = Path(directory) / "run"
        callbacks.append(LightningCallback(run, import_from=source, save_every=None))
    trainer = LightningTrainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=callbacks,
        enable_checkpointing=how == "stock",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    ckpt_path = source if how == "own" else None
    trainer.fit(module, DataLoader(Numbers(), BATCH_SIZE), ckpt_path=ckpt_path)
    records.write()


# ---------------------------------------------------------------- Accelerate


def in_accelerate(directory: str, *, how: str, source: str = "") -> None:
    """A loop with dropout; its own resume skips what was used, as Accelerate documents it."""
    set_seed(0)
    records, config = Records(directory), DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = classifier(0.3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = CosineAnnealingLR(optimizer, EPOCHS * PER_EPOCH)
    loader: Any = DataLoader(Numbers(), BATCH_SIZE, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = step_of(accelerator, records, model, optimizer, scheduler)
    loop(accelerator, loader, step, directory, how=how, source=source)
    records.write()


def step_of(
    accelerator: Accelerator, records: Records, model: Any, optimizer: Any, scheduler: Any
) -> Callable[[Any], torch.Tensor]:
    """What is done with each batch."""

    def step(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        records.note_batch(loss, batch["input_ids"])
        records.note_weights(model)
        return loss

    return step


def loop(
    accelerator: Accelerator,
    loader: Any,
    step: Callable[[Any], torch.Tensor],
    directory: str,
    *,
    how: str,
    source: str,
    saves_at: tuple[int, int] = (EPOCH, BATCH),
    saver: Any = None,
) -> None:
    """Trains with Accelerate; ``saver`` saves and loads in its place."""
    saver = accelerator if saver is None else saver
    if how == "resumekit":
        checkpointer = AccelerateCheckpointer(accelerator, source, save_every=None)
        for batch in checkpointer.batches(loader, epochs=EPOCHS):
            checkpointer.step(loss=step(batch))
        checkpointer.close()
        return
    first, used = 0, 0
    if how == "own":
        saver.load_state(source)
        first, used = saves_at
    for epoch in range(first, EPOCHS):
        skipped = used if epoch == first else 0
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        batches.set_epoch(epoch)
        for number, batch in enumerate(batches, skipped + 1):
            step(batch)
            if (how, epoch, number) == ("stock", *saves_at):
                saver.save_state(str(Path(directory) / "state"))
