"""Nobody calls ``set_epoch``: under each adapter every part of a loader hears of its epochs.

A sampler, a batch sampler and a dataset note which epoch they believe it is when they are used. A
run of three epochs is interrupted inside the second one; the launch that resumes must begin there,
and not at epoch 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import DEPRECATIONS, one_rank
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from resumekit.adapters.torch import Checkpointer

NUM_EPOCHS, NUM_BATCHES = 3, 4
INTERRUPTED_AT = NUM_BATCHES + 2  # in the second epoch, one batch after the newest checkpoint

pytestmark = [
    # lightning 2.6 advises more workers; its class for advice that may not apply
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # lightning 2.6 utilities/_pytree.py and utilities/combined_loader.py with torch 2.13
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    *DEPRECATIONS,
]


class StoppedError(Exception):
    """Raised by the training step."""


class Heard:
    """The epochs that each part of a loader was used in, one after the other.

    A file keeps them: attributes, also those of the class, are state, which a resume restores.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("{}", encoding="utf-8")

    @property
    def epochs(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = json.loads(self._path.read_text(encoding="utf-8"))
        return found

    def note(self, who: str, epoch: int) -> None:
        found = self.epochs
        epochs = found.setdefault(who, [])
        if epochs[-1:] != [epoch]:
            epochs.append(epoch)
            self._path.write_text(json.dumps(found), encoding="utf-8")


class EpochSampler(Sampler[int]):
    def __init__(self, data: Any, heard: Heard) -> None:
        self._data = data
        self._heard, self._epoch = heard, -1

    def __len__(self) -> int:
        return len(self._data)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._heard.note("sampler", self._epoch)
        yield from torch.randperm(len(self)).tolist()


class EpochBatchSampler(BatchSampler):
    def __init__(self, sampler: Any, heard: Heard) -> None:
        super().__init__(sampler, batch_size=2, drop_last=True)
        self._heard, self._epoch = heard, -1

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self._heard.note("batch sampler", self._epoch)
        yield from super().__iter__()


class EpochData(Dataset[Any]):
    def __init__(self, heard: Heard, num_ranks: int) -> None:
        self._heard, self._epoch = heard, -1
        self._length = 2 * NUM_BATCHES * num_ranks

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._heard.note("dataset", self._epoch)
        return {"inputs": torch.tensor([index / self._length])}


def make_loader(heard: Heard, *, num_ranks: int = 1) -> DataLoader[Any]:
    data = EpochData(heard, num_ranks)
    return DataLoader(data, batch_sampler=EpochBatchSampler(EpochSampler(data, heard), heard))


class Model(nn.Module):
    """Interrupts its training in a forward pass, if ``interrupt_at`` is set."""

    def __init__(self, interrupt_at: int | None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self._left = interrupt_at

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise StoppedError
        return {"loss": self.layer(inputs).square().mean()}


# ---------------------------------------------------------------- one launch under each adapter

Launch = Callable[[Path, Model, Heard], None]


def train(checkpointer: Any, loader: Any, step: Callable[[torch.Tensor], None]) -> None:
    with checkpointer:
        for batch in checkpointer.batches(loader, epochs=NUM_EPOCHS):
            step(batch["inputs"])
            checkpointer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_torch(directory: Path, model: Model, heard: Heard) -> None:
    optimizer = optimizer_of(model)

    def step(inputs: torch.Tensor) -> None:
        model(inputs)["loss"].backward()
        optimizer.step()

    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, save_every=1)
    train(checkpointer, make_loader(heard), step)


def with_accelerate(directory: Path, model: Model, heard: Heard, *, num_ranks: int = 1) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = accelerate.Accelerator(cpu=True)
    loader = prepare_data_loader(
        make_loader(heard, num_ranks=num_ranks), num_processes=num_ranks, process_index=0
    )
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))

    def step(inputs: torch.Tensor) -> None:
        accelerator.backward(prepared(inputs)["loss"])
        optimizer.step()

    train(Checkpointer(accelerator, directory, save_every=1), loader, step)


def with_accelerate_as_one_of_two(directory: Path, model: Model, heard: Heard) -> None:
    with_accelerate(directory, model, heard, num_ranks=2)


def with_transformers(directory: Path, model: Model, heard: Heard) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from resumekit.adapters.transformers import ResumeCallback

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make_loader(heard))

    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "output"),
        num_train_epochs=NUM_EPOCHS,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model, arguments, train_dataset=EpochData(heard, 1))
    trainer.add_callback(ResumeCallback(trainer, directory / "run", save_every=1))
    trainer.train()


def with_lightning(directory: Path, model: Model, heard: Heard) -> None:
    lightning: Any = pytest.importorskip("lightning")
    from lightning_workloads import QUIET

    from resumekit.adapters.lightning import ResumeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch["inputs"])["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    saving = ResumeCallback(directory, save_every=1)
    trainer = lightning.Trainer(
        max_epochs=NUM_EPOCHS, callbacks=[saving], enable_checkpointing=False, **QUIET
    )
    trainer.fit(Module(), make_loader(heard))


def with_deepspeed(directory: Path, model: Model, heard: Heard) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    from resumekit.adapters.deepspeed import Checkpointer

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]

    def step(inputs: torch.Tensor) -> None:
        engine.backward(engine(inputs)["loss"])
        engine.step()

    train(Checkpointer(engine, directory, save_every=1), make_loader(heard), step)


# ---------------------------------------------------------------- the check


@pytest.fixture
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is all of its job, and a framework that keeps a state for it starts afresh."""
    launch = request.getfixturevalue("launch")
    if launch is with_deepspeed:
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("LOCAL_RANK", "0")
    with one_rank() if launch is with_deepspeed else nullcontext():
        yield
    if launch in (with_accelerate, with_accelerate_as_one_of_two, with_transformers):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.mark.parametrize(
    "launch",
    [
        with_torch,
        with_accelerate,
        with_accelerate_as_one_of_two,
        with_transformers,
        with_lightning,
        with_deepspeed,
    ],
    ids=lambda launch: launch.__name__,
)
def test_sampler_batch_sampler_and_dataset_hear_of_each_epoch_also_after_a_resume(
    tmp_path: Path, alone: None, launch: Launch
) -> None:
    for interrupt_at, epochs in ((INTERRUPTED_AT, [0, 1]), (None, [1, 2])):
        heard = Heard(tmp_path / "heard.json")
        with suppress(StoppedError):
            launch(tmp_path, Model(interrupt_at), heard)
        assert heard.epochs == dict.fromkeys(("batch sampler", "sampler", "dataset"), epochs)
