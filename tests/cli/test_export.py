"""``resumekit export``: files by name that stock readers open."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from schedulefree import (
    AdamWScheduleFree,
    AdamWScheduleFreeClosure,
    RAdamScheduleFree,
    SGDScheduleFree,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main


def saved(directory: Path, model: Any) -> None:
    no_optimizer: Any = None
    with Checkpointer(directory, model=model, optimizer=no_optimizer) as checkpointer:
        checkpointer.save()


def export(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_every_name_has_the_bits_of_the_model_in_fp32(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16))
    model.append(nn.Linear(3, 3))
    model[3].weight = model[0].weight
    saved(tmp_path / "run", model)
    file = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", file) == 0
    found = load_file(file)
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        expected = value.float() if value.dtype == torch.bfloat16 else value
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


@pytest.mark.parametrize(
    ("dtype", "of_fp32", "of_bf16"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
        ("as-trained", torch.float32, torch.bfloat16),
    ],
)
def test_another_type_is_what_torch_rounds_to(
    tmp_path: Path, dtype: str, of_fp32: torch.dtype, of_bf16: torch.dtype
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16))
    saved(tmp_path / "run", model)
    file = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", file, "--dtype", dtype) == 0
    found = load_file(file)
    kinds = {torch.float32: of_fp32, torch.bfloat16: of_bf16, torch.int64: torch.int64}
    for name, value in model.state_dict().items():
        assert found[name].dtype == kinds[value.dtype]
        assert torch.equal(found[name], value.to(kinds[value.dtype]))


def test_a_type_that_is_unknown_or_too_small_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.bias, 1e6)
    saved(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "new", "--dtype", "int8") == 2
    assert "dtype: 'int8', expected one of fp32, bf16, fp16" in capsys.readouterr().err
    assert export(tmp_path / "run", tmp_path / "new", "--dtype", "fp16") == 2
    assert "bias: values too large for torch.float16" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_one_step_and_one_of_several_models_can_be_chosen(tmp_path: Path) -> None:
    models = {"first": nn.Linear(1, 1), "second": nn.Linear(2, 2)}
    saved(tmp_path / "run", models)
    (step,) = (tmp_path / "run").glob("step-*")
    file = tmp_path / "second.safetensors"
    assert export(step, file, "--component", "model/second") == 0
    assert torch.equal(load_file(file)["weight"], models["second"].weight)


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", {"first": nn.Linear(1, 1), "second": nn.Linear(2, 2)})
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert "no model to export (it has model/first, model/second)" in capsys.readouterr().err
    (tmp_path / "old").write_text("kept")
    assert export(tmp_path / "run", tmp_path / "old", "--component", "model/first") == 2
    assert "it exists" in capsys.readouterr().err
    assert export(tmp_path / "run", tmp_path / "no" / "folder", "--component", "model/first") == 2
    assert (tmp_path / "old").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "run"]


def test_damage_is_reported_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", nn.Linear(3, 3))
    (path,) = (tmp_path / "run").glob("step-*/model/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert "rank-00000.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("make", [True, False], ids=["empty", "not there"])
def test_a_directory_without_a_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: bool
) -> None:
    if make:
        (tmp_path / "run").mkdir()
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert str(tmp_path / "run") in capsys.readouterr().err.replace("\n", "")


# ---------------------------------------------------------------- other formats


def a_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(1, 1))
    model[2].weight = model[0].weight
    return model


def assert_has(found: Any, model: nn.Module) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name], value)


def test_a_torch_file_is_loaded_with_weights_only(tmp_path: Path) -> None:
    model = a_model()
    saved(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "model.pt", "--to", "torch") == 0
    assert_has(torch.load(tmp_path / "model.pt", weights_only=True), model)
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "run"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_dcp_directory(tmp_path: Path) -> None:
    model = a_model()
    saved(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "model", "--to", "dcp") == 0
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "model", no_dist=True)
    assert_has(state, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


@pytest.mark.parametrize("size", ["17KB", "1B"])
def test_the_index_of_shards_has_the_file_of_every_name(tmp_path: Path, size: str) -> None:
    model = a_model()
    saved(tmp_path / "run", model)
    out = tmp_path / "model"
    assert export(tmp_path / "run", out, "--max-shard-size", size) == 0
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    files = sorted(out.glob("*.safetensors"))
    assert {*index["weight_map"].values()} == {path.name for path in files}
    found: dict[str, torch.Tensor] = {}
    for path in files:
        shard = load_file(path)
        num_bytes = sum(value.nbytes for value in shard.values())
        assert len(shard) == 1 or num_bytes <= 17_000
        assert all(index["weight_map"][name] == path.name for name in shard)
        found |= shard
    assert_has(found, model)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert len(files) == (len(found) if size == "1B" else 3)


def test_averaged_weights_have_the_names_of_the_model(tmp_path: Path) -> None:
    model = a_model()
    average = AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(1)
    no_optimizer: Any = None
    with Checkpointer(tmp_path / "run", model=model, optimizer=no_optimizer, ema=average) as each:
        each.save()
    assert export(tmp_path / "run", tmp_path / "model", "--weights", "ema") == 0
    assert_has(load_file(tmp_path / "model"), average.module)


@pytest.mark.parametrize(
    "kind", [AdamWScheduleFree, SGDScheduleFree, RAdamScheduleFree, AdamWScheduleFreeClosure]
)
def test_weights_are_those_of_the_evaluation(tmp_path: Path, kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().sum()
        loss.backward()
        return loss

    train = getattr(optimizer, "train", lambda: None)
    train()
    for _ in range(9):  # RAdam begins to move the weights with the sixth
        if kind is AdamWScheduleFreeClosure:
            optimizer.step(step)
        else:
            step()
            optimizer.step()
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save()
    trained = {name: each.clone() for name, each in model.state_dict().items()}
    getattr(optimizer, "eval", lambda: None)()
    evaluated = model.state_dict()
    has_both = kind is not AdamWScheduleFreeClosure  # it has the evaluated ones between its steps
    assert torch.equal(trained["0.weight"], evaluated["0.weight"]) is not has_both
    for weights, expected in (("model", evaluated), ("train", trained)):
        assert export(tmp_path / "run", tmp_path / weights, "--weights", weights) == 0
        found = load_file(tmp_path / weights)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_averages_of_other_names_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_optimizer: Any = None
    model, other = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    with Checkpointer(tmp_path / "run", model=model, optimizer=no_optimizer, ema=other) as each:
        each.save()
    assert export(tmp_path / "run", tmp_path / "model", "--weights", "ema") == 2
    assert "ema: no average of weight" in capsys.readouterr().err
    saved(tmp_path / "other", nn.Linear(1, 1))
    assert export(tmp_path / "other", tmp_path / "model", "--weights", "ema") == 2
    assert "no ema to export" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--to", "onnx"], "to: 'onnx', expected one of safetensors, pretrained, torch, dcp"),
        (["--weights", "all"], "weights: 'all', expected one of model, train, ema"),
        (["--to", "torch", "--max-shard-size", "1GB"], "expected one of safetensors, pretrained"),
        (["--max-shard-size", "0"], "'0': no size"),
        (["--max-shard-size", "big"], "'big': no size"),
        (["--to", "pretrained"], "no config.json"),
    ],
)
def test_what_cannot_be_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    saved(tmp_path / "run", nn.Linear(1, 1))
    assert export(tmp_path / "run", tmp_path / "new", *options) == 2
    assert error in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_nothing_is_written_into_a_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    saved(tmp_path / "run", nn.Linear(1, 1))
    (step,) = (tmp_path / "run").glob("step-*")
    before = sorted((tmp_path / "run").rglob("*"))
    for out in (tmp_path / "run" / "model", step / "model.pt"):
        assert export(tmp_path / "run", out, "--to", to) == 2
        assert "in the run directory" in " ".join(capsys.readouterr().err.split())
    assert sorted((tmp_path / "run").rglob("*")) == before


EXPORT = """
import sys
from pathlib import Path
from resumekit.export import export_model
from resumekit.storage.store import Store
step = Store(Path(sys.argv[1])).open_step(Store(Path(sys.argv[1])).step_names()[0])
def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0])
import threading, time
begin, most, over = peak(), [0], threading.Event()
def watch():
    while not over.wait(0.002):
        most[0] = max(most[0], peak())
thread = threading.Thread(target=watch)
thread.start()
export_model(step, Path(sys.argv[2]), to=sys.argv[3])
over.set()
thread.join()
print((most[0] - begin) >> 10)
"""


@pytest.mark.quick("dcp-384")
@pytest.mark.parametrize("megabytes", [2048, 384])
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_an_export_holds_few_tensors_at_once(
    tmp_path: Path, to: str, megabytes: int, record_property: Callable[[str, object], None]
) -> None:
    model = nn.Module()
    for number in range(24):
        weight = nn.Parameter(torch.ones((megabytes << 18) // 24))
        model.register_parameter(f"weight{number}", weight)
    saved(tmp_path / "run", model)
    command = [sys.executable, "-c", EXPORT, str(tmp_path / "run"), str(tmp_path / to), to]
    used = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    record_property(f"MB beyond the imports, {megabytes} MB as {to}", used)
    assert used < (500 if megabytes == 2048 else 250)
