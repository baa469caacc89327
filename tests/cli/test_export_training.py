"""``resumekit export --to accelerate | trainer | lightning``: what a run of plain PyTorch has."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel
from torch.serialization import safe_globals
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main

STEPS, PER_EPOCH = 5, 4
FORMATS = ("accelerate", "trainer", "lightning")
# What accelerate and transformers allow for a state of NumPy.
OF_NUMPY: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
]


class Trained(NamedTuple):
    """The objects of a run as they were when it was saved."""

    model: nn.Module
    optimizer: Any
    scheduler: Any
    random: tuple[Any, Any]  # of Python and of NumPy


def train(directory: Path, *, several: bool = False) -> Trained:
    """Five steps of eight; tied weights, a bias that gets no gradient, two param groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    first: Any = [model[0].weight, model[0].bias]
    optimizer: Any = AdamW([{"params": [model[2].bias]}, {"params": first, "lr": 0.1}])
    optimizer.add_param_group({"params": [model[1].bias], "weight_decay": 0.3})
    scheduler = MultiStepLR(optimizer, [2, 4, 4])
    given = {"first": optimizer, "second": SGD([nn.Parameter(torch.ones(2))])}
    average, extras = AveragedModel(model), {"phase": "warm up"}
    loader = DataLoader(TensorDataset(torch.randn(PER_EPOCH, 4)), shuffle=True)
    with Checkpointer(
        directory,
        model=model,
        optimizer=given if several else optimizer,
        lr_scheduler=scheduler,
        ema=average,
        extras=extras,
        save_every=STEPS,
    ) as checkpointer:
        drawn: Any = None
        for (batch,) in checkpointer.batches(loader, epochs=2):
            if checkpointer.progress.step == STEPS:
                break
            loss = model[2](model[0](batch)).square().sum() * random.random() * np.random.random()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            checkpointer.step(loss=loss)
            drawn = random.getstate(), np.random.get_state()
    return Trained(model, optimizer, scheduler, drawn)


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    """The exit code, and the lines that were printed."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, (printed.out + printed.err).splitlines()


def loaded(path: Path) -> Any:
    with safe_globals(OF_NUMPY):
        return torch.load(path, weights_only=True)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield key
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def assert_equal(found: Any, expected: Any) -> None:
    assert [*leaves(found)] == [*leaves(expected)]


@pytest.mark.parametrize("to", FORMATS)
def test_the_files_have_the_states_of_the_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    run, out = train(tmp_path / "run"), tmp_path / "out"
    code, lines = export(capsys, tmp_path / "run", out, "--to", to)
    assert code == 0, lines
    if to == "lightning":
        checkpoint = loaded(out)
        weights, optimizer = checkpoint["state_dict"], checkpoint["optimizer_states"][0]
        (scheduler,) = checkpoint["lr_schedulers"]
        loop = checkpoint["loops"]["fit_loop"]
        assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, STEPS)
        assert loop["epoch_loop.batch_progress"]["current"]["ready"] == STEPS - PER_EPOCH
    else:
        end = "bin" if to == "accelerate" else "pt"
        weights = load_file(out / "model.safetensors")
        optimizer, scheduler = (loaded(out / f"{n}.{end}") for n in ("optimizer", "scheduler"))
        files = {"accelerate": "random_states_0.pkl", "trainer": "rng_state.pth"}
        states = loaded(out / files[to])
        python = states["random_state" if to == "accelerate" else "python"]
        numpy = states["numpy_random_seed" if to == "accelerate" else "numpy"]
        assert_equal((python, numpy), run.random)
    expected = run.model.state_dict()
    if to == "accelerate":
        del expected["2.weight"]  # tied
    assert_equal(weights, expected)
    assert_equal(optimizer, run.optimizer.state_dict())
    assert_equal(scheduler, run.scheduler.state_dict())
    assert [*optimizer["state"]] == [0, 1, 2]  # the last parameter had no gradient
    for name in ("ema", "extras", "variables"):
        assert f"{name}: no file of {to} has it" in lines
    assert not [line for line in lines if line.startswith(("rng: no", "data: no"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_run_of_another_framework_lacks_the_intervals_of_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run")
    _, lines = export(capsys, tmp_path / "run", tmp_path / "out", "--to", "trainer")
    assert any("logging_steps, eval_steps and save_steps" in line for line in lines)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"], state["train_batch_size"]) == (STEPS, 1.0, 1)


class Scaler:
    """Stands for DeepSpeed's, which is not installed here."""


def of_deepspeed(path: Path) -> Any:
    name = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    with safe_globals([(Scaler, name)]):
        return torch.load(path, weights_only=True)


def pieces(flat: Any, sizes: list[int]) -> list[torch.Tensor]:
    return list(flat[: sum(sizes)].split(sizes))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_partitions_of_deepspeed_have_the_states_of_the_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int, ranks: int
) -> None:
    run, out = train(tmp_path / "run"), tmp_path / "out"
    words = ("--to", "deepspeed", "--ranks", ranks, "--stage", stage)
    code, lines = export(capsys, tmp_path / "run", out, *words)
    assert code == 0, lines
    assert any(f"continue in epoch 1 after {STEPS - PER_EPOCH} batches" in line for line in lines)
    assert any("stage 0" in line for line in lines) == (stage == 0)
    folder = out / (out / "latest").read_text()
    assert folder.name == f"global_step{STEPS}"
    begin = "zero_pp_rank_0_" if stage == 3 else ""
    model = of_deepspeed(folder / f"{begin}mp_rank_00_model_states.pt")
    assert (model["dp_world_size"], model["global_steps"]) == (ranks, STEPS)
    assert_equal(model["lr_scheduler"], run.scheduler.state_dict())
    expected = run.optimizer.state_dict()
    if stage == 0:
        assert_equal(model["module"], run.model.state_dict())
        assert_equal(model["optimizer"], expected)
        return
    assert model["shared_params"] == {"2.weight": "0.weight"}
    zeros = [
        of_deepspeed(folder / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt") for r in range(ranks)
    ]
    found = [each["optimizer_state_dict"] for each in zeros]
    flats = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    states = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    weights = run.model.state_dict()
    moment, index = "exp_avg_sq", 0
    for group, shapes in enumerate(model["param_shapes"]):
        sizes = [shape.numel() for shape in shapes.values()]
        several = [each[states]["state"].get(group, {}).get(moment) for each in found]
        values = [each[flats][group] for each in found]
        if stage == 3:
            parts = [-(-size // ranks) for size in sizes]
            whole = [torch.cat(p) for p in zip(*(pieces(v, parts) for v in values), strict=True)]
        else:
            whole = pieces(torch.cat(values), sizes)
        for name, value in zip(shapes, whole, strict=True):
            assert torch.equal(value[: weights[name].numel()], weights[name].flatten()), name
        if several[0] is None:  # never stepped
            assert list(shapes) == ["1.bias"]
            continue
        parts = [-(-size // ranks) for size in sizes]
        whole = (
            [torch.cat(p) for p in zip(*(pieces(v, parts) for v in several), strict=True)]
            if stage == 3
            else pieces(torch.cat(several), sizes)
        )
        for value in whole:
            state = expected["state"][index][moment]
            assert torch.equal(value[: state.numel()], state.flatten())
            index += 1
    assert index == 3
    if stage == 3:
        files = sorted(folder.glob("*_model_states.pt"))
        frozen = [of_deepspeed(each)["frozen_param_fragments"]["1.weight"] for each in files]
        assert torch.equal(torch.cat(frozen)[:16], weights["1.weight"].flatten())
        assert {len(each) for name, each in model["module"].items()} == {0}
    else:
        assert_equal(model["module"], weights)


def test_parameters_of_other_step_counts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = AdamW(model.parameters())
    for unused in (None, model[0].weight):
        model(torch.ones(1, 2)).sum().backward()
        if unused is not None:
            unused.grad = None
        optimizer.step()
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    words = (tmp_path / "run", tmp_path / "out", "--to", "deepspeed", "--stage")
    code, lines = export(capsys, *words, 1)
    assert code == 2
    assert "1.weight: another state or count of steps than '0.weight' has" in " ".join(lines)
    assert export(capsys, *words, 0)[0] == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--to", "trainer", "--dtype", "bf16"], "--to trainer: with dtype, expected one of safe"),
        (["--to", "accelerate", "--weights", "ema"], "--to accelerate: with weights"),
        (["--to", "lightning", "--max-shard-size", "1GB"], "expected one of safetensors"),
        (["--to", "trainer"], "optimizer/first, optimizer/second, expected one optimizer"),
        (["--to", "trainer", "--ranks", "2"], "expected one of deepspeed"),
        (["--stage", "2"], "--to safetensors: with stage, expected one of deepspeed"),
        (["--to", "deepspeed"], "optimizer/first, optimizer/second, expected one optimizer"),
    ],
)
def test_what_a_format_cannot_have_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    train(tmp_path / "run", several=True)
    code, lines = export(capsys, tmp_path / "run", tmp_path / "out", *options)
    assert code == 2
    assert error in " ".join(lines)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("to", [*FORMATS, "deepspeed"])
def test_damage_and_run_directories_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    train(tmp_path / "run")
    code, lines = export(capsys, tmp_path / "run", tmp_path / "run" / "out", "--to", to)
    assert code == 2
    assert "in the run directory" in " ".join(lines)
    (path,) = (tmp_path / "run").glob("step-*/optimizer/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert export(capsys, tmp_path / "run", tmp_path / "out", "--to", to)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_of_weights_alone_only_the_weights_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["fork", str(tmp_path / "run"), str(tmp_path / "new"), "--weights-only"])
    for to in (*FORMATS, "deepspeed"):
        code, lines = export(capsys, tmp_path / "new", tmp_path / "out", "--to", to)
        assert code == 2
        assert "no state but that of models" in " ".join(lines)
    assert export(capsys, tmp_path / "new", tmp_path / "out", "--to", "safetensors")[0] == 0
