"""What the Accelerate adapter finds and counts, and the private attributes that it relies on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytest.importorskip("accelerate")

import accelerate
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

from resumekit.adapters.accelerate import Checkpointer
from resumekit.errors import ConfigurationError, InexactError
from resumekit.prove.variables import KILL_VARIABLE, TRACE_VARIABLE
from resumekit.storage import Store

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "integration" / "scripts"
PINNED = f"read from accelerate 1.15, installed is {accelerate.__version__}"


class Counting:
    """A user's object for ``register_for_checkpointing``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Weighing(Counting):
    """Another class with the same state."""


@pytest.fixture
def accelerator() -> Iterator[Any]:
    yield fresh_accelerator()
    _forget()


def fresh_accelerator(**settings: Any) -> Any:
    """As in a new process: accelerate keeps its state for the whole process."""
    _forget()
    return accelerate.Accelerator(cpu=True, **settings)


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def saved_keys(directory: Path) -> list[str]:
    store = Store(directory)
    manifest = store.open_step(store.step_names()[0]).manifest
    return [record.key for record in manifest.components]


def test_the_private_attributes_are_where_the_adapter_looks(accelerator: Any) -> None:
    model, counting = nn.Linear(2, 2), Counting(1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.register_for_checkpointing(counting)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    assert accelerator._models == [prepared[0]], PINNED
    assert accelerator._optimizers == [prepared[1]], PINNED
    assert accelerator._schedulers == [prepared[2]], PINNED
    assert accelerator._custom_objects == [counting], PINNED
    assert prepared[1].optimizer is optimizer, PINNED
    assert prepared[2].scheduler is scheduler, PINNED
    assert (accelerator.scaler, accelerator.step) == (None, 0), PINNED


def test_a_prepared_loader_is_one_batch_ahead_of_what_it_holds_as_base_dataloader(
    accelerator: Any,
) -> None:
    reads: list[int] = []

    class Read(list[int]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    loader = accelerator.prepare(DataLoader(Read(range(6)), batch_size=2))
    assert type(loader.base_dataloader) is DataLoader, PINNED
    next(iter(loader))
    assert reads == [0, 1, 2, 3], PINNED


def test_single_objects_get_the_slot_and_several_their_class_and_ordinal(
    accelerator: Any, tmp_path: Path
) -> None:
    models = [nn.Linear(2, 2), nn.Bilinear(2, 2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    accelerator.prepare(*models, *optimizers, scheduler)
    accelerator.register_for_checkpointing(Counting(1), Weighing(2), Counting(3))
    with Checkpointer(accelerator, tmp_path) as checkpointer:
        checkpointer.save()
    found = [key for key in saved_keys(tmp_path) if key.split("/")[0] not in ("data", "rng")]
    assert found == [
        "model/Linear-0",
        "model/Bilinear-0",
        "model/Linear-1",
        "optimizer/SGD-0",
        "optimizer/SGD-1",
        "optimizer/SGD-2",
        "lr_scheduler",
        "callbacks/accelerator",
        "callbacks/Counting-0",
        "callbacks/Weighing-0",
        "callbacks/Counting-1",
        "progress",
        "best_metric",
        "extras",
    ]


def test_what_was_given_by_name_or_prepared_is_not_taken_twice(
    accelerator: Any, tmp_path: Path
) -> None:
    model, counting = nn.Linear(2, 2), Counting(1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    _, _, prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(prepared, average, counting)
    extras = {"counting": counting}
    with Checkpointer(accelerator, tmp_path, ema=average, extras=extras) as checkpointer:
        checkpointer.save()
    keys = saved_keys(tmp_path)
    assert [key for key in keys if key.startswith(("callbacks", "lr_scheduler", "ema"))] == [
        "lr_scheduler",
        "ema",
        "callbacks/accelerator",
    ]


def test_objects_registered_in_another_order_come_back_by_class(tmp_path: Path) -> None:
    def run(*objects: Counting) -> None:
        accelerator = fresh_accelerator()
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.register_for_checkpointing(*objects)
        with Checkpointer(accelerator, tmp_path) as checkpointer:
            if not checkpointer.resume().resumed:
                checkpointer.save()

    run(Counting(1), Weighing(2))
    counting, weighing = Counting(0), Weighing(0)
    run(weighing, counting)
    _forget()
    assert (counting.count, weighing.count) == (1, 2)


def test_step_counts_only_when_the_gradients_are_synchronised(tmp_path: Path) -> None:
    accelerator = fresh_accelerator(gradient_accumulation_steps=3)
    model = nn.Linear(2, 2)
    loader = DataLoader([torch.ones(2)] * 8)
    model, loader = accelerator.prepare(model, loader)
    steps = []
    with Checkpointer(accelerator, tmp_path) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=1):
            with accelerator.accumulate(model):
                model(batch)
            checkpointer.step(tokens=10)
            steps.append(checkpointer.progress.step)
    _forget()
    assert steps == [0, 0, 1, 1, 1, 2, 2, 3]  # the last window ends with the epoch
    assert (checkpointer.progress.micro_step, checkpointer.progress.tokens) == (8, 80)


def test_a_checkpointer_before_prepare_is_refused_with_the_remedy(
    accelerator: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"no model was prepared.*accelerator\.prepare"):
        Checkpointer(accelerator, tmp_path)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.eye(4)


def test_a_stream_is_exact_and_refused_when_strict_if_it_comes_out_of_order(
    accelerator: Any, tmp_path: Path
) -> None:
    exact = DataLoader(Stream(), batch_size=2)
    inexact = DataLoader(Stream(), batch_size=2, num_workers=1, in_order=False)
    _, exact, inexact = accelerator.prepare(nn.Linear(4, 4), exact, inexact)
    with Checkpointer(accelerator, tmp_path / "exact", strict=True) as checkpointer:
        assert next(checkpointer.batches(exact, epochs=1)).shape == (2, 4)
    with (
        Checkpointer(accelerator, tmp_path / "inexact", strict=True) as checkpointer,
        pytest.raises(InexactError, match=r"data: lost .*in_order"),
    ):
        next(checkpointer.batches(inexact, epochs=1))


def test_accelerates_own_saving_goes_on_beside_the_checkpointer(tmp_path: Path) -> None:
    def run(*, save_state: bool) -> list[float]:
        accelerator = fresh_accelerator()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.rand(16, 2)), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        with Checkpointer(accelerator, tmp_path / str(save_state), save_every=1) as checkpointer:
            for (batch,) in checkpointer.batches(loader, epochs=2):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if save_state:
                    accelerator.save_state(str(tmp_path / "native"))
                checkpointer.step()
                losses.append(loss.item())
        if save_state:
            accelerator.load_state(str(tmp_path / "native"))
        return losses

    assert run(save_state=True) == run(save_state=False)
    _forget()


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (
            {
                "distributed_type": DistributedType.FSDP,
                "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1),
            },
            r"FSDP version 1, .*fsdp_version=2",
        ),
        ({"distributed_type": DistributedType.MEGATRON_LM}, "distributed type MEGATRON_LM"),
        ({"distributed_type": DistributedType.XLA}, "distributed type XLA"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, r"tensor .*tp_size=2"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, r"context .*cp_size=2"),
    ],
    ids=["FSDP1", "Megatron", "XLA", "tensor", "context"],
)
def test_a_way_to_share_the_model_that_cannot_be_resumed_is_refused_by_name(
    accelerator: Any, tmp_path: Path, state: dict[str, Any], found: str
) -> None:
    accelerator.prepare(nn.Linear(2, 2))
    for name, value in state.items():
        setattr(accelerator.state, name, value)
    with pytest.raises(ConfigurationError, match=f"{found}.*"):
        Checkpointer(accelerator, tmp_path)


class Launch:
    """One run of a script with ``--epochs 2``, and the lines that it printed for its epochs."""

    def __init__(self, script: str, directory: Path, **variables: str) -> None:
        command = [sys.executable, str(SCRIPTS / script), "--directory", str(directory)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.update(ACCELERATE_USE_CPU="true", **variables)
        done = subprocess.run(
            [*command, "--epochs", "2"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status, self.told = done.returncode, done.stderr
        self.epochs = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]


def test_the_identical_command_starts_continues_and_is_done(tmp_path: Path) -> None:
    stock = Launch("stock_accelerate.py", tmp_path / "unused")
    assert len(stock.epochs) == 2, stock.told
    started = Launch("train_accelerate.py", tmp_path / "undisturbed")
    assert started.epochs == stock.epochs, started.told

    directory = tmp_path / "killed"
    at_step_45 = {TRACE_VARIABLE: str(tmp_path / "trace"), KILL_VARIABLE: "step:45"}
    killed = Launch("train_accelerate.py", directory, **at_step_45)
    assert killed.status == -signal.SIGKILL, killed.told
    continued = Launch("train_accelerate.py", directory)
    assert "resuming at step 40" in continued.told
    assert continued.epochs == stock.epochs[1:]

    finished = Launch("train_accelerate.py", directory)
    assert "nothing to do" in finished.told
    assert (finished.status, finished.epochs) == (0, [])


def test_the_script_differs_from_its_stock_twin_by_the_adapters_lines_alone() -> None:
    stock, ours = (
        (SCRIPTS / name).read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for name in ("stock_accelerate.py", "train_accelerate.py")
    )
    assert [line.strip() for line in ours if line and line not in stock] == [
        "from resumekit.adapters.accelerate import Checkpointer",
        "checkpointer = Checkpointer(",
        "accelerator, arguments.directory, ema=ema, save_every=arguments.save_every",
        "for epoch in checkpointer.epochs(arguments.epochs):",
        "for inputs, targets in checkpointer.batches(loader):",
        "checkpointer.step(loss=loss)",
    ]
    assert [line.strip() for line in stock if line and line not in ours] == [
        "from pathlib import Path",
        "import resumekit",
        "accelerator.register_for_checkpointing(ema)",
        "folder = Path(arguments.directory)",
        'step = max((int(path.name.removeprefix("step_")) for path in folder.glob("step_*")), '
        "default=0)",
        "if step:",
        'accelerator.load_state(str(folder / f"step_{step}"))',
        "first_epoch, num_used = divmod(step, len(loader))",
        "for epoch in range(first_epoch, arguments.epochs):",
        "batches = loader",
        "if epoch == first_epoch and num_used:",
        "batches = accelerator.skip_first_batches(loader, num_used)",
        "for inputs, targets in batches:",
        "step += 1",
        "resumekit.trace(",
        "step, samples=inputs, loss=loss, model=model, optimizer=optimizer, ema=ema",
        ")",
        "if step % arguments.save_every == 0:",
        'accelerator.save_state(str(folder / f"step_{step}"))',
    ]
