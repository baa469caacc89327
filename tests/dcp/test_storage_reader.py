"""``dcp.load`` of checkpoints of resumekit in one process; training says what is expected."""

from __future__ import annotations

import copy
import logging
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from resumekit.adapters.torch import Checkpointer
from resumekit.dcp import StorageReader
from resumekit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidStateError,
    NoUsableCheckpointError,
    StateMismatchError,
)
from resumekit.serialization.writing import Payload
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Network(nn.Module):
    """Tied weights, a buffer, a parameter without elements, and one of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.second(self.first(rows))) * self.scale
        return hidden + self.empty.sum()


def make(seed: int, *, named: bool = False) -> tuple[Network, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Network()
    parameters: Any = [p for n, p in model.named_parameters() if n != "first.bias"]
    if named:
        parameters = [(n, p) for n, p in model.named_parameters() if n != "first.bias"]
    groups: Any = [{"params": parameters}, {"params": [model.first.bias], "lr": 0.3}]
    if named:
        groups[1]["params"] = [("first.bias", model.first.bias)]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1) if seed % 2 else 0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(directory: Path, *, num_steps: int = 2, **options: Any) -> dict[str, Any]:
    """Saves each step; gives what training itself has at the end."""
    seed = options.pop("seed", 0)
    model, optimizer, scheduler = make(seed)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        save_every=1,
        loop_variables="off",
        **options,
    )
    for rows in checkpointer.batches([torch.randn(3, 4) for _ in range(num_steps)], epochs=1):
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        checkpointer.step()
    checkpointer.close()
    names = {id(p): n for n, p in model.named_parameters()}
    state = {names[id(p)]: values for p, values in optimizer.state.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    found = {
        "model": model.state_dict(),
        "state": state,
        "lr": rates,
        "epoch": scheduler.last_epoch,
    }
    return copy.deepcopy(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run directory, and the values at its last step."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    numbers = torch.arange(4.0)
    extras = {"pair": (torch.ones(2), 3), "gamma": 7, "all": numbers, "last": numbers[2:]}
    return directory, train(directory, extras=extras)


@pytest.fixture
def damaged(run: tuple[Path, Any], tmp_path: Path) -> Callable[[str], Path]:
    """Copies the run and flips the last byte of a file of its last step."""

    def make_copy(file: str) -> Path:
        directory = tmp_path / "damaged"
        shutil.copytree(run[0], directory)
        path = directory / "step-00000002" / file
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return directory

    return make_copy


def weights(seed: int) -> dict[str, Any]:
    """The state dict of another model."""
    return get_model_state_dict(make(seed)[0])


def same_bits(mine: Any, other: Any) -> bool:
    is_same_kind = mine.dtype == other.dtype and mine.shape == other.shape
    return is_same_kind and bytes(mine.flatten().view(torch.uint8)) == bytes(
        other.flatten().view(torch.uint8)
    )


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not same_bits(found[name], expected[name])] == []


def failure(state: Any, reader: StorageReader, planner: Any = None) -> BaseException:
    """Why a load fails."""
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=reader, planner=planner)
    return raised.value.failures[0][0]


# ---------------------------------------------------------------- what is loaded


def test_a_program_loads_model_optimizer_scheduler_and_extras(run: Any) -> None:
    directory, expected = run
    model, optimizer, scheduler = make(2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "lr_scheduler": scheduler.state_dict(),
        "extras": {
            "pair": (torch.zeros(2), 0),
            "gamma": 0,
            "all": torch.zeros(4),
            "last": torch.zeros(2),
        },
    }
    assert not same_bits(model.scale, expected["model"]["scale"])  # the control
    reader = StorageReader(str(directory))
    dcp.load(state, storage_reader=reader)
    assert reader.step_directory == directory / "step-00000002"
    assert_equal(state["model"], expected["model"])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert_equal(dict(model.state_dict()), expected["model"])
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[id(p)]: values for p, values in optimizer.state.items()}
    assert found.keys() == expected["state"].keys()
    for name, values in found.items():
        assert_equal(values, expected["state"][name])
    assert [group["lr"] for group in optimizer.param_groups] == expected["lr"]
    assert state["lr_scheduler"]["last_epoch"] == expected["epoch"] == 2
    assert state["extras"]["gamma"] == 7
    assert state["extras"]["all"].tolist() == [0, 1, 2, 3]
    assert state["extras"]["last"].tolist() == [2, 3]  # it shares memory with the other
    pair, number = state["extras"]["pair"]
    assert number == 3
    assert same_bits(pair, torch.ones(2))


def test_a_program_without_a_model_loads_all_that_there_is(run: Any) -> None:
    reader = StorageReader(run[0])
    state = _load_state_dict_from_keys({"model", "optimizer.state"}, storage_reader=reader)
    assert_equal(state["model"], run[1]["model"])
    for name, values in run[1]["state"].items():
        assert_equal(state["optimizer"]["state"][name], values)


@pytest.mark.parametrize("prefix", ["", "app.net"])
def test_the_keys_of_a_component_may_begin_with_something_else(run: Any, prefix: str) -> None:
    directory, expected = run
    found = weights(3)
    nested = {"app": {"net": found}} if prefix else found
    dcp.load(nested, storage_reader=StorageReader(directory, prefixes={"model": prefix}))
    assert_equal(found, expected["model"])


def test_an_unknown_component_is_refused(run: Any) -> None:
    reader = StorageReader(run[0], prefixes={"modle": ""})
    error = failure({}, reader)
    assert isinstance(error, StateMismatchError)
    assert "prefixes['modle']" in str(error)
    assert "model, optimizer" in str(error)


def test_the_flat_form_of_an_optimizer_and_named_parameters_are_loaded(run: Any) -> None:
    directory, expected = run
    model, optimizer, _ = make(4, named=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat: Any = get_optimizer_state_dict(model, optimizer, options=options)
    nested: Any = get_optimizer_state_dict(model, optimizer)
    assert "param_names" in nested["param_groups"][0]
    for state in (flat, nested):
        dcp.load({"optimizer": state}, storage_reader=StorageReader(directory))
    assert flat["param_groups.first.bias.lr"] == expected["lr"][1]
    assert flat["param_groups.scale.lr"] == expected["lr"][0]
    assert same_bits(flat["state.scale.exp_avg"], expected["state"]["scale"]["exp_avg"])
    assert nested["param_groups"][1]["lr"] == expected["lr"][1]


def test_a_learning_rate_that_is_a_tensor_is_loaded(tmp_path: Path) -> None:
    expected = train(tmp_path / "a", seed=1)
    model, optimizer, _ = make(5)
    state: Any = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": state}, storage_reader=StorageReader(tmp_path / "a"))
    rate = state["param_groups"][0]["lr"]
    assert same_bits(rate, expected["lr"][0])


def test_named_models_are_nested(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    with Checkpointer(tmp_path / "a", model=models, optimizer={}) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    state = {"model": {name: nn.Linear(2, 2).state_dict() for name in models}}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "a"))
    for name, module in models.items():
        assert_equal(state["model"][name], dict(module.state_dict()))


GOLDEN = Path(__file__).resolve().parents[2] / "integration" / "golden" / "checkpoints"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_checkpoints_of_every_adapter_and_of_former_formats_are_read(name: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    reader = StorageReader(GOLDEN / name)
    state = _load_state_dict_from_keys(storage_reader=reader)
    assert reader.step_directory is not None
    files = sorted((reader.step_directory / "model").glob("*.safetensors"))
    stored = [safetensors.load_file(file) for file in files]
    names = {key for each in stored for key in each}
    parts = {key: [each[key] for each in stored if key in each] for key in names}
    expected = {k: torch.cat(each) if len(each) > 1 else each[0] for k, each in parts.items()}
    assert len(expected) >= 1
    assert_equal({key: state["model"][key] for key in names}, expected)
    assert {"state", "param_groups"} <= state["optimizer"].keys()


# ---------------------------------------------------------------- which checkpoint


def test_a_step_directory_is_loaded_and_a_run_directory_gives_its_newest(run: Any) -> None:
    directory, _ = run
    states = []
    for path in (directory / "step-00000001", directory):
        states.append(weights(6))
        dcp.load({"model": states[-1]}, storage_reader=StorageReader(path))
    assert [int(state["norm.num_batches_tracked"]) for state in states] == [1, 2]
    reader = StorageReader(directory)
    dcp.load({"model": states[1]}, storage_reader=reader, checkpoint_id=directory / "step-00000001")
    assert int(states[1]["norm.num_batches_tracked"]) == 1


def test_a_checkpoint_that_cannot_be_opened_is_passed_over(
    damaged: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = damaged("manifest.json")
    reader = StorageReader(directory)
    dcp.load({"model": weights(7)}, storage_reader=reader)
    assert reader.step_directory == directory / "step-00000001"
    assert "passed over: step-00000002/manifest.json" in caplog.text
    (directory / "step-00000001/manifest.json").write_bytes(b"{}")
    assert isinstance(failure({}, StorageReader(directory)), NoUsableCheckpointError)


def test_a_directory_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    reader = StorageReader(tmp_path)
    assert isinstance(failure({}, reader), CheckpointNotFoundError)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        reader.read_metadata().state_dict_metadata  # noqa: B018
    assert StorageReader.validate_checkpoint_id(tmp_path)
    assert not StorageReader.validate_checkpoint_id(tmp_path / "none")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("file", ["model/rank-00000.safetensors", "model/rank-00000.json"])
def test_damage_changes_no_tensor(damaged: Callable[[str], Path], file: str) -> None:
    directory = damaged(file)
    state = {"model": weights(8)}
    before = copy.deepcopy(state["model"])
    error = failure(state, StorageReader(directory))
    assert isinstance(error, CorruptCheckpointError)
    assert f"step-00000002/{file}" in str(error)
    assert_equal(state["model"], before)


def test_only_what_is_loaded_is_verified(damaged: Callable[[str], Path], run: Any) -> None:
    state = {"model": weights(8)}
    reader = StorageReader(damaged("optimizer/rank-00000.safetensors"))
    dcp.load(state, storage_reader=reader)
    assert_equal(state["model"], run[1]["model"])


def test_a_key_that_the_checkpoint_lacks_is_refused_or_left_as_it_is(run: Any) -> None:
    directory, expected = run
    state = {**weights(9), "extra": torch.full((2,), 5.0)}
    before = copy.deepcopy(state)
    error = failure({"model": state}, StorageReader(directory))
    assert "model.extra" in str(error)
    assert_equal(state, before)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": state}, storage_reader=StorageReader(directory), planner=planner)
    assert same_bits(state.pop("extra"), before["extra"])
    assert_equal(state, expected["model"])


@pytest.mark.parametrize("is_partial", [False, True])
def test_another_dtype_is_refused_whatever_the_planner_allows(run: Any, is_partial: bool) -> None:
    state = weights(9)
    state["scale"] = state["scale"].bfloat16()
    before = copy.deepcopy(state)
    planner = DefaultLoadPlanner(allow_partial_load=is_partial)
    error = failure({"model": state}, StorageReader(run[0]), planner)
    assert isinstance(error, StateMismatchError)
    assert "model.scale: torch.float32 () in the checkpoint, expected torch.bfloat16" in str(error)
    assert_equal(state, before)


class Cutting(DefaultLoadPlanner):
    """Reads each tensor row by row, without some rows; or asks for another key, or as bytes."""

    def __init__(self, left_out: int, **changes: Any) -> None:
        super().__init__(allow_partial_load=True)
        self.left_out = left_out
        self.changes = changes

    def create_local_plan(self) -> LoadPlan:
        items = []
        for item in super().create_local_plan().items:
            for row in range(item.lengths[0] if len(item.lengths) == 2 else 1):
                if len(item.lengths) == 2 and row != self.left_out:
                    offsets, lengths = torch.Size((row, 0)), torch.Size((1, item.lengths[1]))
                    places: Any = {"dest_offsets": offsets, "storage_offsets": offsets}
                    items.append(replace(item, lengths=lengths, **places, **self.changes))
                elif len(item.lengths) != 2:
                    items.append(item)
        return LoadPlan(items)


def test_a_plan_that_leaves_elements_out_is_refused(run: Any) -> None:
    directory, expected = run
    state = weights(9)
    before = copy.deepcopy(state)
    error = failure({"model": state}, StorageReader(directory), Cutting(left_out=2))
    assert isinstance(error, StateMismatchError)
    assert "model.first.weight: the plan reads [0:1, 0:4], [1:2, 0:4], [3:4, 0:4]" in str(error)
    assert_equal(state, before)
    dcp.load({"model": state}, storage_reader=StorageReader(directory), planner=Cutting(-1))
    assert_equal(state, expected["model"])  # the control: cut, and complete


def test_a_plan_for_another_key_or_kind_of_value_is_refused(run: Any) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType

    for changes, words in (
        ({"storage_index": MetadataIndex("model.no", (0, 0))}, "model.no: not in the checkpoint"),
        ({"type": LoadItemType.BYTE_IO}, "model.first.weight: a tensor in the checkpoint"),
    ):
        state = {"model": weights(9)}
        error = failure(state, StorageReader(run[0]), Cutting(-1, **changes))
        assert isinstance(error, StateMismatchError)
        assert words in str(error)


def test_keys_that_collide_are_refused(run: Any) -> None:
    error = failure({}, StorageReader(run[0], prefixes={"lr_scheduler": "extras"}))
    assert isinstance(error, StateMismatchError)
    assert "extras.gamma: a key of both lr_scheduler and extras" in str(error)


def test_a_state_that_no_optimizer_writes_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    store.acquire()
    staging = store.stage(name := store.next_name(1), num_bytes=0, num_files=2, directories=["s"])
    wrong = {"class": "torch.optim.SGD", "state": {}, "param_groups": [{"params": 3}]}
    with staging.writing():
        files = Payload.of_states("s", 0, {"optimizer": wrong}).write(staging)
    record = ComponentRecord("optimizer", "global", "exact", "", "s", (0,))
    created = "2026-01-31T12:00:00+00:00"
    of_step: Any = (store.run_id, store.attempt, 1, created, 1, {}, (record,), tuple(files))
    store.commit(staging, Manifest(*of_step))
    store.release()
    assert isinstance(failure({}, StorageReader(tmp_path / "a" / str(name))), InvalidStateError)


def test_what_nobody_loads_is_logged_in_one_line(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resumekit")
    state = weights(9)
    dcp.load({"model": state}, storage_reader=StorageReader(run[0]))
    assert [record.getMessage() for record in caplog.records] == [
        "step-00000002: components that are not loaded: optimizer, lr_scheduler, extras"
    ]
    caplog.clear()
    for name in [name for name in state if name.startswith("norm.")]:
        del state[name]
    dcp.load({"model": state}, storage_reader=StorageReader(run[0]))
    record = caplog.records[0]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "step-00000002: not loaded: model.norm.weight, model.norm.bias, model.norm.running_mean "
        "and 2 more [RK-833]"
    )


# ---------------------------------------------------------------- no unpickler


class Bomb:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_in_a_checkpoint_never_reaches_an_unpickler(tmp_path: Path) -> None:
    made = tmp_path / "made"
    payload = pickle.dumps(Bomb(made))
    train(tmp_path / "a", extras={"payload": payload, "text": payload.decode("latin1")})
    step = tmp_path / "a/step-00000002"
    (step / ".metadata").write_bytes(payload)  # where torch's own reader looks
    state = {"extras": {"payload": None, "text": None}, "model": weights(9)}
    dcp.load(state, storage_reader=StorageReader(step))
    assert state["extras"] == {"payload": payload, "text": payload.decode("latin1")}
    (step / "model/rank-00000.safetensors").write_bytes(payload)
    assert isinstance(failure(state, StorageReader(step)), CorruptCheckpointError)
    (step / "manifest.json").write_bytes(payload)
    assert isinstance(failure(state, StorageReader(step)), CorruptCheckpointError)
    assert not made.exists()
    with pytest.raises(AttributeError):  # the control: torch's reader runs it
        dcp.FileSystemReader(step).read_metadata()
    assert made.exists()
