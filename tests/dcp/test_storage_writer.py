"""``dcp.save`` into a run directory in one process; what was saved is what a load gives."""

from __future__ import annotations

import copy
import json
import pickle
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.testing._internal.distributed.fake_pg import FakeStore

from resumekit.adapters.torch import Checkpointer
from resumekit.cli.views import inspect_checkpoint, verify_directory
from resumekit.dcp import StorageReader, StorageWriter
from resumekit.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    DirectoryInUseError,
    LoopError,
    RankFailedError,
    ResumekitError,
    SaveError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.serialization.digests import leaves_of
from resumekit.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Unknown:
    """A class that no codec knows, and whose pickle must never be loaded."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


def save(state: Any, directory: Path, name: str | None = "step-1", **options: Any) -> StorageWriter:
    planner = options.pop("planner", None)
    writer = StorageWriter(directory, **options)
    dcp.save(state, storage_writer=writer, checkpoint_id=name, planner=planner)
    return writer


def failure(state: Any, directory: Path, name: str | None = "step-1", **options: Any) -> Any:
    """Why a save fails; nothing is left of it."""
    before = steps(directory)
    with pytest.raises(CheckpointException) as raised:
        save(state, directory, name, **options)
    assert steps(directory) == before
    staging = directory / ".staging"
    assert not staging.exists() or list(staging.iterdir()) == []
    (failed,) = raised.value.failures.values()
    return failed[0]


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


def weights(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    whole = torch.randn(6, 4)
    return {
        "a.b": torch.randn(5, 3),
        "half": torch.randn(3).bfloat16(),
        "eighth": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "number": torch.tensor(1.5 + seed),
        "count": torch.tensor(seed),
        "complex": torch.randn(2, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(4, 3).t(),
        "column": whole[:, 1],
        "bits": torch.randn(7) > 0,
        "again": {"a": {"b": torch.randn(2)}},
    }


def objects(seed: int) -> dict[str, Any]:
    return {
        "int": seed,
        "large": 10**30 + seed,
        "text": f"\u00e4 {seed}",
        "none": None,
        "float": float("-inf"),
        "tuple": (seed, ("x", None), [1, (2, 3)]),
        "with tensors": (torch.ones(2) * seed, {"inside": torch.arange(3) + seed}),
        "keys": (Counter({1: seed}), {(1, 2): "x"}),
        "scalar": np.float32(seed),
        "array": np.arange(4.0) + seed,
        "bytes": bytes(3000) + bytes([seed]),
        "numbers": list(range(2000 + seed)),
        "rng": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.RandomState(seed).get_state(),
        },
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.99)}, {"lr": 2}],
    }


def assert_same(found: Any, expected: Any) -> None:
    """The same structure, types and bits."""
    mine = {str(path): leaf for path, leaf in leaves_of(found)}
    others = {str(path): leaf for path, leaf in leaves_of(expected)}
    assert mine.keys() == others.keys()
    for path, one in mine.items():
        other = others[path]
        assert type(one) is type(other), path
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), path
            bits = [bytes(each.contiguous().view(-1).view(torch.uint8)) for each in (one, other)]
            assert bits[0] == bits[1], path
        else:
            assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other, path


# ---------------------------------------------------------------- what is restored


def test_every_value_is_restored_with_equal_bits(tmp_path: Path) -> None:
    expected = {"model": weights(1), "objects": objects(1), "top": 1}
    save(expected, tmp_path, "some/name-120")
    assert steps(tmp_path) == ["step-00000120"]
    state = {"model": weights(2), "objects": objects(2), "top": 2}
    with pytest.raises(AssertionError):
        assert_same(state, expected)  # the control
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert_same(state, expected)


def test_a_program_without_a_state_gets_the_nested_one(tmp_path: Path) -> None:
    expected = {"model": weights(1), "objects": objects(1)}
    save(expected, tmp_path)
    state = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path))
    assert state["objects"]["groups"] == expected["objects"]["groups"]
    assert_same(state["model"], expected["model"])
    (part,) = _load_state_dict_from_keys({"model.a.b"}, storage_reader=StorageReader(tmp_path))
    assert part == "model"


def test_a_planner_that_does_not_flatten_is_kept(tmp_path: Path) -> None:
    expected = {"a.b": torch.ones(2), "c": {"d": (1, torch.arange(2))}}
    save(expected, tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    state = {"a.b": torch.zeros(2), "c": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=StorageReader(tmp_path), planner=planner)
    assert_same(state, expected)


class Rounded(DefaultSavePlanner):
    """Saves bfloat16, as in torch's documentation of planners."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.bfloat16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        return self.lookup_object(write_item.index).bfloat16()


def test_a_planner_that_changes_tensors_saves_what_it_says(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    save({"w": weight}, tmp_path, planner=Rounded())
    state = {"w": torch.zeros(3, 3, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert_same(state["w"], weight.bfloat16())


def test_a_training_continues_with_equal_bits(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make(0)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: Any = {"model": model_state, "optimizer": optimizer_state, "rng": torch.get_rng_state()}
    save(state, tmp_path)
    train(model, optimizer)
    other, its_optimizer = make(1)
    model_state, optimizer_state = get_state_dict(other, its_optimizer)
    found: Any = {
        "model": model_state,
        "optimizer": optimizer_state,
        "rng": torch.zeros_like(state["rng"]),
    }
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    set_state_dict(
        other,
        its_optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    torch.set_rng_state(found["rng"])
    train(other, its_optimizer)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


# ---------------------------------------------------------------- which step


def test_the_step_is_an_argument_or_the_number_at_the_end_of_the_name(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path, None, step=7)
    save({"a": 2}, tmp_path, "epoch2/global_step8/")
    save({"a": 3}, tmp_path, "9", step=9, keep_latest=None)
    assert steps(tmp_path) == ["step-00000007", "step-00000008", "step-00000009"]


@pytest.mark.parametrize(
    ("name", "options"),
    [(None, {}), ("last", {}), ("step-8", {"step": 7}), ("step-8-a", {}), (f"step-{'1' * 19}", {})],
)
def test_a_save_without_one_step_is_refused(
    tmp_path: Path, name: str | None, options: dict[str, Any]
) -> None:
    error = failure({"a": 1}, tmp_path, name, **options)
    assert isinstance(error, ConfigurationError)
    assert "step-{step}" in str(error)
    assert list(tmp_path.iterdir()) == []
    save({"a": 1}, tmp_path, None, step=7)  # the remedy
    save({"a": 1}, tmp_path, f"step-{8}")


def test_an_existing_step_is_never_replaced(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path)
    step = tmp_path / "step-00000001"
    before = {path: path.read_bytes() for path in step.rglob("*") if path.is_file()}
    error = failure({"a": 2}, tmp_path)
    assert isinstance(error, SaveError)
    assert "step-00000001: is there already" in str(error)
    assert "no checkpoint is replaced" in str(error)  # found before anything is written
    assert {path: path.read_bytes() for path in before} == before
    save({"a": 2}, tmp_path, "step-2")  # the remedy


def test_old_steps_are_deleted_as_the_policy_says(tmp_path: Path) -> None:
    for step in range(1, 7):
        save({"a": step}, tmp_path, f"step-{step}", keep_latest=2, keep_every=3)
    assert steps(tmp_path) == [f"step-{step:08d}" for step in (3, 5, 6)]
    assert list((tmp_path / ".staging").iterdir()) == []
    with pytest.raises(ConfigurationError, match="keep_latest"):
        StorageWriter(tmp_path, keep_latest=0)
    with pytest.raises(ConfigurationError, match="step"):
        StorageWriter(tmp_path, step=-1)


# ---------------------------------------------------------------- what is refused


def test_a_value_that_the_codec_does_not_know_fails_the_save(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path, "step-1")
    error = failure({"a": 2, "extra": {"b": (1, Unknown())}}, tmp_path, "step-2")
    assert isinstance(error, UnsupportedValueError)
    assert "rank 0: dcp['extra.b'][1]" in str(error)
    assert "Unknown" in str(error)
    save({"a": 2}, tmp_path, "step-2")


def test_a_tensor_that_cannot_be_stored_fails_the_save(tmp_path: Path) -> None:
    error = failure({"sparse": torch.ones(2).to_sparse()}, tmp_path)
    assert isinstance(error, UnsupportedValueError)
    assert "sparse" in str(error)


@pytest.mark.parametrize("key", ["$tensor", "__metadata__"])
def test_a_key_that_the_format_has_for_itself_is_refused(tmp_path: Path, key: str) -> None:
    for value in (1, torch.ones(1)):
        error = failure({key: value}, tmp_path)
        assert isinstance(error, UnsupportedValueError)
        assert key in str(error)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    error = failure({"a": (torch.ones(2),), "a[0]": torch.ones(2)}, tmp_path)
    assert isinstance(error, UnsupportedValueError)
    assert "a[0]" in str(error)


def test_parts_that_do_not_tile_a_tensor_are_refused(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                data: Any = item.tensor_data
                object.__setattr__(data, "size", torch.Size([4]))
            return plan

    error = failure({"w": torch.ones(2)}, tmp_path, planner=Half())
    assert isinstance(error, UnsupportedValueError)
    assert "its parts miss 2 of its elements" in str(error)


def test_a_planner_that_cannot_look_objects_up_is_refused(tmp_path: Path) -> None:
    class Other(SavePlanner):
        def __init__(self) -> None:
            self._planner = DefaultSavePlanner()

        def set_up_planner(self, *args: Any, storage_meta: Any = None, **options: Any) -> None:
            self._planner.set_up_planner(*args, **options)

        def create_local_plan(self) -> SavePlan:
            return self._planner.create_local_plan()

        def create_global_plan(self, all_plans: Any) -> Any:
            return self._planner.create_global_plan(all_plans)

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return self._planner.finish_plan(new_plan)

        def resolve_data(self, write_item: Any) -> Any:
            return self._planner.resolve_data(write_item)

    error = failure({"a": 1}, tmp_path, planner=Other())
    assert isinstance(error, ConfigurationError)
    assert "DefaultSavePlanner" in str(error)


def test_a_planner_that_repeats_the_last_plan_is_refused(tmp_path: Path) -> None:
    options = {"enable_plan_caching": True}
    save({"a": torch.ones(2)}, tmp_path, "step-1", planner=DefaultSavePlanner(**options))
    planner = DefaultSavePlanner(**options)
    error = failure({"a": torch.ones(2)}, tmp_path, "step-2", planner=planner)
    assert isinstance(error, ConfigurationError)
    assert "enable_plan_caching" in str(error)
    save({"a": torch.ones(2)}, tmp_path, "step-2", planner=DefaultSavePlanner())  # the remedy


def test_a_save_without_collectives_is_refused(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, step=1)
    with pytest.raises(ConfigurationError, match="use_collectives=False"):
        dcp.save({"a": 1}, storage_writer=writer, use_collectives=False)
    dcp.save({"a": 1}, storage_writer=writer)  # the remedy


def test_an_error_of_the_planner_leaves_nothing_that_stops_the_next_save(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            raise KeyError("finish")

        def resolve_data(self, write_item: Any) -> Any:
            raise KeyError("resolve")

    class Resolving(Failing):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return new_plan

    error = failure({"a": torch.ones(2)}, tmp_path, planner=Resolving())
    assert isinstance(error, RankFailedError)
    assert "rank 0: KeyError: 'resolve'" in str(error)
    writer = StorageWriter(tmp_path, step=1)
    with pytest.raises(CheckpointException):
        dcp.save({"a": 1}, storage_writer=writer, planner=Failing())
    assert len(list((tmp_path / ".staging").iterdir())) == 1  # the writer does not know
    dcp.save({"a": 1}, storage_writer=writer)
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_directory_of_a_live_run_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), optimizer={}) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
        assert isinstance(failure({"a": 1}, tmp_path, "step-1"), DirectoryInUseError)
    save({"a": 1}, tmp_path, "step-1")  # the remedy


# ---------------------------------------------------------------- such a step in a run directory


def test_damage_fails_the_load_and_the_check(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    assert verify_directory(tmp_path, step=None, as_json=False)
    path = tmp_path / "step-00000001" / "dcp" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not verify_directory(tmp_path, step=None, as_json=False)
    state = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert isinstance(raised.value.failures[0][0], CorruptCheckpointError)
    assert state["a"].tolist() == [0, 0]


@pytest.mark.parametrize("path", [["a"], "a", [1 << 40], [None]])
def test_a_path_that_does_not_make_up_its_key_is_damage(tmp_path: Path, path: Any) -> None:
    save({"b": [{"c": 1}]}, tmp_path)
    store = Store(tmp_path)
    (name,) = store.step_names()
    manifest = store.open_step(name).manifest
    assert manifest.details["dcp"] == {"flattened": {"b.0.c": ["b", 0, "c"]}}
    manifest.details["dcp"]["flattened"]["b.0.c"] = path
    (tmp_path / str(name) / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"b": [{"c": 2}]}, storage_reader=StorageReader(tmp_path))
    error = raised.value.failures[0][0]
    assert isinstance(error, CorruptCheckpointError)
    assert "b.0.c" in str(error)


def test_the_keys_of_a_large_state_do_not_fill_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({f"key {number}": number for number in range(1000)}, tmp_path)
    inspect_checkpoint(tmp_path, as_json=False)
    shown = capsys.readouterr().out
    assert "key 10" in shown
    assert "--json" in shown
    assert len(shown) < 5000
    inspect_checkpoint(tmp_path, as_json=True)
    assert "key 999" in capsys.readouterr().out


def test_an_adapter_says_what_it_has_found(tmp_path: Path) -> None:
    save({"model": nn.Linear(1, 1).state_dict()}, tmp_path)
    model = nn.Linear(1, 1)
    with (
        pytest.raises(StateMismatchError, match="it has dcp"),
        Checkpointer(tmp_path, model=model, optimizer={}) as checkpointer,
    ):
        checkpointer.resume()
    assert steps(tmp_path) == ["step-00000001"]


def test_steps_of_an_adapter_and_of_dcp_share_a_directory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), optimizer={}) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    save({"model": {"weight": torch.ones(1, 1)}}, tmp_path, "step-1")
    store = Store(tmp_path)
    runs = {store.open_step(name).manifest.run_id for name in store.step_names()}
    assert len(runs) == 1
    assert len(store.step_names()) == 2


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    save({"model": weights(1), "objects": objects(1)}, tmp_path)
    files = [path for path in (tmp_path / "step-00000001").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        content = path.read_bytes()
        assert b"torch._utils" not in content
        size = int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else 0
        json.loads(content[8 : 8 + size] if size else content)


# ---------------------------------------------------------------- in the background


def test_a_background_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": weights(1), "objects": objects(1), "array": np.arange(4)}
    expected = copy.deepcopy(state)
    writer = StorageWriter(tmp_path)
    future: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id="step-3")
    for _, leaf in leaves_of(state):
        if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32:
            leaf.add_(1)
    state["array"][:] = 9
    state["objects"]["groups"][0]["lr"] = 99
    future.result()
    found = {"model": weights(2), "objects": objects(2), "array": np.zeros(1)}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert_same(found, expected)


def test_one_background_save_at_a_time(tmp_path: Path) -> None:
    writer, may_end, has_begun = StorageWriter(tmp_path), threading.Event(), threading.Event()

    class Waiting(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            has_begun.set()
            assert may_end.wait(60)
            return new_plan

    first: Any = dcp.async_save(
        {"a": 1}, storage_writer=writer, checkpoint_id="step-1", planner=Waiting()
    )
    assert has_begun.wait(60)
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": 2}, storage_writer=writer, checkpoint_id="step-2")
    error = raised.value.failures[0][0]
    assert isinstance(error, LoopError)
    assert "step-00000001 is still being saved" in str(error)
    may_end.set()
    first.result()
    dcp.save({"a": 2}, storage_writer=writer, checkpoint_id="step-2")  # the remedy
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def test_an_error_in_the_background_is_in_the_future(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    state = {"a": threading.Event}  # a class
    future: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id="step-1")
    with pytest.raises(CheckpointException) as raised:
        future.result()
    assert isinstance(raised.value.failures[0][0], ResumekitError)
    dcp.save({"a": 1}, storage_writer=writer, checkpoint_id="step-1")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_background_save_on_the_default_group_is_refused(tmp_path: Path) -> None:
    other = StorageWriter(tmp_path, process_group=dist.new_group([0, 1]))
    with ThreadPoolExecutor(1) as thread:
        for group in (None, dist.group.WORLD):
            writer = StorageWriter(tmp_path, process_group=group)
            with pytest.raises(ConfigurationError, match="new_group"):
                writer.stage({"a": 1})
            for call in (
                partial(writer.reset, "step-1"),
                partial(writer.set_up_storage_writer, True),
            ):
                call()  # not in the background
                with pytest.raises(ConfigurationError, match="new_group"):  # with another stager
                    thread.submit(call).result()
        assert other.stage({"a": 1}) == {"a": 1}
        thread.submit(other.reset, "step-1").result()


def sent(writer: StorageWriter) -> StorageWriter:
    """As another process gets it."""
    found: StorageWriter = pickle.loads(pickle.dumps(writer))  # noqa: S301 - made here
    return found


def test_a_writer_reaches_another_process_with_its_options(tmp_path: Path) -> None:
    writer = sent(StorageWriter(tmp_path, step=3, keep_latest=1))
    dcp.save({"a": 1}, storage_writer=writer)
    assert steps(tmp_path) == ["step-00000003"]
    for step in (4, 5):
        other = sent(StorageWriter(tmp_path, keep_latest=1, keep_every=3))
        dcp.save({"a": 1}, storage_writer=other, checkpoint_id=f"step-{step}")
    assert steps(tmp_path) == ["step-00000003", "step-00000005"]
