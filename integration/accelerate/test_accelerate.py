"""What the Accelerate adapter finds and counts, and the private attributes that it relies on."""

from __future__ import annotations

import os
import re
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
from resumekit.adapters.accelerate._private import accelerator_faults
from resumekit.errors import ConfigurationError, InexactError, StateMismatchError
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE
from resumekit.storage.store import Store

ROOT = Path(__file__).resolve().parents[2]
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
    assert not list(accelerator_faults(accelerator)), PINNED
    assert accelerator._models == [prepared[0]], PINNED
    assert accelerator._optimizers == [prepared[1]], PINNED
    assert accelerator._schedulers == [prepared[2]], PINNED
    assert accelerator._custom_objects == [counting], PINNED
    assert prepared[1].optimizer is optimizer, PINNED
    assert prepared[2].scheduler is scheduler, PINNED
    assert (accelerator.scaler, accelerator.step) == (None, 0), PINNED


def test_saving_and_loading_by_itself_is_what_the_adapter_adds_to(
    accelerator: Any, tmp_path: Path
) -> None:
    project = accelerator.project_configuration
    assert (project.automatic_checkpoint_naming, project.iteration) == (False, 0), PINNED
    assert getattr(accelerator, "deepspeed_engine_wrapped", None) is None, PINNED
    accelerator.prepare(nn.Linear(2, 2))
    seen: list[list[str]] = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append(os.listdir(folder))
    )
    accelerator.save_state(str(tmp_path))
    assert (seen, project.iteration) == ([[]], 1), PINNED  # the hook comes before the files
    dispatching = accelerate.data_loader.DataLoaderDispatcher([0])
    assert dispatching.state.num_processes == 1, PINNED
    # A later accelerate keeps the sampler's state in save_state. Nothing here is in its way; what
    # the page says about save_state's own files is then no longer so.
    assert not hasattr(accelerate.data_loader.DataLoaderShard, "_checkpoint_sampler_state"), PINNED


def test_a_prepared_loader_is_one_batch_ahead_of_what_it_holds_as_base_dataloader(
    accelerator: Any,
) -> None:
    reads: list[int] = []

    class Read(list[int]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    loader = accelerator.prepare(DataLoader(Read(range(6)), batch_size=2))  # type: ignore[arg-type]
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
    of_the_run = ("data", "rng", "variables")
    found = [key for key in saved_keys(tmp_path) if key.split("/")[0] not in of_the_run]
    assert found == [
        "model/Linear-0",
        "model/Bilinear-0",
        "model/Linear-1",
        "optimizer/SGD-0",
        "optimizer/SGD-1",
        "optimizer/SGD-2",
        "lr_scheduler",
        "model/Linear-0/attributes",
        "model/Bilinear-0/attributes",
        "model/Linear-1/attributes",
        "callbacks/accelerator",
        "callbacks/loaders",
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
        "callbacks/loaders",
    ]


class EMAModel(Counting):
    """Averaged weights, by its name."""


def test_a_schedule_or_an_average_that_nobody_gave_is_named_in_the_report(
    accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    warmup, rest = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, rest], [1])
    given, forgotten = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
    follower, average = EMAModel(1), torch.optim.swa_utils.AveragedModel(model)
    second = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    model, optimizer, loader, prepared = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.rand(4, 2))), both
    )
    assert prepared.scheduler is both
    assert all(each.state_dict() for each in (forgotten, follower, average, second))
    options: dict[str, Any] = {"lr_scheduler": {"second": given}}
    with Checkpointer(accelerator, tmp_path / "warned", **options) as checkpointer:
        next(checkpointer.batches(loader, epochs=1))
    log = capsys.readouterr().err
    lost = re.findall(r"^resumekit: WARNING: (\S+: lost) \(", log, re.MULTILINE)
    assert lost == []  # what the loop still uses of them is saved as variables
    with (
        Checkpointer(accelerator, tmp_path / "strict", strict=True) as checkpointer,
    ):
        next(checkpointer.batches(loader, epochs=1))


def test_a_registered_object_too_few_or_too_many_is_refused_and_named(tmp_path: Path) -> None:
    def run(*objects: Counting, **options: Any) -> None:
        accelerator = fresh_accelerator()
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.register_for_checkpointing(*objects)
        with Checkpointer(accelerator, tmp_path, **options) as checkpointer:
            if not checkpointer.resume().resumed:
                checkpointer.save()

    run(Counting(1), Weighing(2))
    with pytest.raises(StateMismatchError, match=r"callbacks/Weighing-0: .*this run has none"):
        run(Counting(1))
    with pytest.raises(StateMismatchError, match=r"has no callbacks/Counting-1"):
        run(Counting(1), Counting(1), Weighing(2))
    run(Counting(1), exclude={"callbacks/Weighing-0"})
    _forget()


def test_objects_registered_in_another_order_are_restored_by_class(tmp_path: Path) -> None:
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
    loader = DataLoader([torch.ones(2)] * 8)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    steps = []
    with Checkpointer(accelerator, tmp_path) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=1):
            with accelerator.accumulate(model):
                model(batch)
            checkpointer.step(tokens=10)
            steps.append(checkpointer.progress.step)
    _forget()
    assert steps == [0, 0, 1, 1, 1, 2, 2, 3]  # the last accumulation window ends with the epoch
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


def test_accelerates_own_saving_still_works_with_the_checkpointer(tmp_path: Path) -> None:
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
                "fsdp_plugin": FullyShardedDataParallelPlugin(
                    fsdp_version=1, use_orig_params=False
                ),
            },
            r"FSDP version 1 with use_orig_params=False, .*use_orig_params=True",
        ),
        ({"distributed_type": DistributedType.MEGATRON_LM}, "distributed type MEGATRON_LM"),
        ({"distributed_type": DistributedType.XLA}, "distributed type XLA"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, r"tensor .*tp_size=2"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, r"context .*cp_size=2"),
    ],
    ids=["FSDP1", "Megatron", "XLA", "tensor", "context"],
)
def test_a_way_to_share_the_model_that_cannot_be_resumed_is_refused_and_named(
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
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.update(ACCELERATE_USE_CPU="true", **variables)
        done = subprocess.run(
            [*command, "--epochs", "2"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status, self.log = done.returncode, done.stderr
        self.epochs = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]


@pytest.mark.full
def test_the_identical_command_starts_continues_and_is_done(tmp_path: Path) -> None:
    plain = Launch("plain_accelerate.py", tmp_path / "unused")
    assert len(plain.epochs) == 2, plain.log
    started = Launch("train_accelerate.py", tmp_path / "undisturbed")
    assert started.epochs == plain.epochs, started.log

    directory = tmp_path / "killed"
    at_step_45 = {TRACE_VARIABLE: str(tmp_path / "trace"), KILL_VARIABLE: "step:45"}
    killed = Launch("train_accelerate.py", directory, **at_step_45)
    assert killed.status == -signal.SIGKILL, killed.log
    continued = Launch("train_accelerate.py", directory)
    assert "resuming at step 40" in continued.log
    assert continued.epochs == plain.epochs[1:]

    finished = Launch("train_accelerate.py", directory)
    assert "nothing to do" in finished.log
    assert (finished.status, finished.epochs) == (0, [])


def test_the_script_differs_from_its_plain_twin_by_four_lines_and_their_import() -> None:
    plain, ours = (
        (SCRIPTS / name).read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for name in ("plain_accelerate.py", "train_accelerate.py")
    )
    assert [line.strip() for line in ours if line and line not in plain] == [
        "from resumekit.adapters.accelerate import Checkpointer",
        "ckpt = Checkpointer("
        "accelerator, arguments.directory, ema=ema, save_every=arguments.save_every)",
        "for epoch in ckpt.epochs(arguments.epochs):",
        "for inputs, targets in ckpt.batches(loader):",
        "ckpt.step(loss=loss)",
    ]
    assert [line.strip() for line in plain if line and line not in ours] == [
        "for epoch in range(arguments.epochs):",
        "for inputs, targets in loader:",
    ]


# ---------------------------------------------------------------- mistakes


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.rand(16, 2)), batch_size=2, shuffle=True)
    found = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    return found[0], found[1], found[2]


def test_swapped_arguments_are_answered_with_the_right_call(
    accelerator: Any, tmp_path: Path
) -> None:
    prepared(accelerator)
    with pytest.raises(ConfigurationError, match=r'Checkpointer\(accelerator, "runs/a"\)'):
        Checkpointer(str(tmp_path), accelerator)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="extras"):
        Checkpointer(accelerator, tmp_path, extras=[1])  # type: ignore[arg-type]


def test_a_loader_that_skips_what_was_used_is_the_prepared_one(
    accelerator: Any, tmp_path: Path
) -> None:
    _, _, loader = prepared(accelerator)
    skip = accelerator.skip_first_batches
    with Checkpointer(accelerator, tmp_path) as checkpointer:
        for _ in checkpointer.epochs(2):
            samples = []
            for batch in checkpointer.batches({"a": skip(loader, 0)}):
                samples.append(batch["a"][0])
                if len(samples) == 5:
                    break
            for batch in checkpointer.batches({"a": skip(skip(loader, 2), 3)}):
                samples.append(batch["a"][0])
            assert len(torch.cat(samples).unique(dim=0)) == 16
            checkpointer.step()


@pytest.mark.parametrize(
    ("kind", "number", "num_prepared"), [("map", 0, 0), ("map", 2, 0), ("stream", 1, 2)]
)
def test_a_loader_that_skips_batches_of_no_prepared_one_is_refused(
    accelerator: Any, tmp_path: Path, kind: str, number: int, num_prepared: int
) -> None:
    prepared(accelerator)
    data: Any = TensorDataset(torch.rand(16, 2)) if kind == "map" else Stream()
    loader: Any = DataLoader(data, batch_size=2)
    for _ in range(num_prepared):
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
    skipped = accelerator.skip_first_batches(loader, number)
    with (
        Checkpointer(accelerator, tmp_path) as checkpointer,
        pytest.raises(ConfigurationError, match=f"fits {num_prepared} prepared ones"),
    ):
        next(checkpointer.batches(skipped, epochs=1))


def test_a_loader_that_was_not_prepared_is_reported_and_named(
    accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, loader = prepared(accelerator)
    plain = DataLoader(TensorDataset(torch.rand(16, 2)), batch_size=2)
    with Checkpointer(accelerator, tmp_path / "run") as checkpointer:
        next(checkpointer.batches({"own": loader, "other": plain}, epochs=1))
    lines = [line for line in capsys.readouterr().err.splitlines() if "not prepared" in line]
    assert len(lines) == 1
    assert "WARNING" in lines[0]
    assert "'other'" in lines[0]
