"""Loads into live tensors: through a buffer, or by two passes over the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.model import ModelState
from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import IncompleteLoadError, NoUsableCheckpointError
from resumekit.run.resuming.loading import Loading
from resumekit.serialization.deferral import LoadMemory, live_targets
from resumekit.serialization.digests import state_digest
from resumekit.storage.files import BLOCK_BYTES
from resumekit.storage.io.pipeline import HostBuffer

WAYS = ["buffer", "two passes"]
OPTIMIZERS = ["restarted", "live"]


class Job:
    """A model of two blocks with its optimizer."""

    def __init__(self, directory: Path, *, has_moments: bool = True, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.directory = directory
        self.model = nn.Sequential(nn.Linear(1100, 1000), nn.LayerNorm(1000))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if has_moments:
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])

    def begin(self, **options: Any) -> tuple[Checkpointer, Any]:
        """Resumes, up to the first batch."""
        checkpointer = Checkpointer(
            self.directory,
            model=self.model,
            optimizer=self.optimizer,
            save_every=None,
            leave_on=(),
            loop_variables="off",  # another line requests the batch after the save
            **options,
        )
        loader = DataLoader(TensorDataset(torch.arange(8)))
        batches = iter(checkpointer.batches(loader, steps=100))
        next(batches)
        return checkpointer, batches

    def resume(self, **options: Any) -> None:
        leave(self.begin(**options)[0])


def leave(checkpointer: Checkpointer) -> None:
    checkpointer.wait()
    checkpointer.__exit__(KeyboardInterrupt, None, None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run directory with one checkpoint, and the digest of what is in it."""
    job = Job(tmp_path_factory.mktemp("saved") / "run", seed=0)
    checkpointer, batches = job.begin()
    checkpointer.step()
    checkpointer.save()
    next(batches)
    leave(checkpointer)
    return job.directory, job.digest()


@pytest.fixture
def directory(saved: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, monkeypatch)
    return str(request.param)


def choose(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    available = 1 << 40 if way == "buffer" else 1000
    monkeypatch.setattr("resumekit.run.saving.snapshot.available_memory", lambda root: available)


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*/*/*.safetensors"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_value_is_restored_in_the_live_tensors(
    saved: tuple[Path, str], directory: Path, way: str, optimizer: str
) -> None:
    job = Job(directory, has_moments=optimizer == "live")
    assert job.digest() != saved[1]
    live = [*job.model.parameters()]
    live += [m for each in job.optimizer.state.values() for m in each.values()]
    addresses = [each.data_ptr() for each in live]
    job.resume()
    assert job.digest() == saved[1]
    assert [each.data_ptr() for each in live] == addresses
    kept = [m for each in job.optimizer.state.values() for m in each.values()]
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept)
    if optimizer == "live":
        assert {id(each) for each in kept} <= {id(each) for each in live}


def blocks() -> list[tuple[str, int]]:
    """A byte of each block of the large files."""
    sizes = {"model": 2, "optimizer": 3}
    return [(name, at * BLOCK_BYTES + 99) for name, num in sizes.items() for at in range(num)]


@pytest.mark.parametrize(("component", "offset"), blocks())
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_damage_in_any_block_is_found_before_anything_live_changes(
    directory: Path, way: str, optimizer: str, component: str, offset: int
) -> None:
    (path,) = (each for each in data_files(directory) if each.parent.name == component)
    flip(path, offset)
    job = Job(directory, has_moments=optimizer == "live")
    before = job.digest()
    with pytest.raises(NoUsableCheckpointError, match=f"digest of its block {offset >> 22} is"):
        job.resume()
    assert job.digest() == before


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Calls it when all bytes are verified and nothing live has changed."""
    check = Loading._check_states

    def check_states(loading: Loading) -> None:
        check(loading)
        change()

    monkeypatch.setattr(Loading, "_check_states", check_states)


@pytest.mark.parametrize(("component", "offset"), blocks())
def test_a_change_between_the_passes_is_found_in_the_second(
    directory: Path, monkeypatch: pytest.MonkeyPatch, component: str, offset: int
) -> None:
    choose("two passes", monkeypatch)
    (path,) = (each for each in data_files(directory) if each.parent.name == component)
    changing(monkeypatch, lambda: flip(path, offset))
    with pytest.raises(
        IncompleteLoadError, match=rf"(?s)changed after it was verified.*block {offset >> 22} is"
    ) as caught:
        Job(directory).resume()
    assert "End this process" in str(caught.value)


@pytest.mark.parametrize("changed", ["nothing", "a file that was read"])
def test_without_a_change_or_a_second_pass_nothing_is_found(
    saved: tuple[Path, str], directory: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    choose("two passes" if changed == "nothing" else "buffer", monkeypatch)
    path = data_files(directory)[0]
    changing(monkeypatch, lambda: None if changed == "nothing" else flip(path, 5000))
    job = Job(directory)
    job.resume()
    assert job.digest() == saved[1]


@pytest.mark.parametrize("async_save", [True, False])
def test_the_memory_is_kept_for_async_saves_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    choose("buffer", monkeypatch)
    job = Job(directory)
    checkpointer, batches = job.begin(async_save=async_save)
    snapshot = checkpointer._run.in_flight.snapshot
    size = snapshot.num_bytes
    assert (size > 0) == async_save
    expected = job.digest()
    if async_save:
        checkpointer.step()
        checkpointer.save()
        next(batches)
        checkpointer.wait()
        assert snapshot.num_bytes == size
    leave(checkpointer)
    assert job.digest() == expected  # nothing of it shares memory with the copy
    again = Job(directory, seed=2)
    again.resume(exclude={"variables"})  # its first batch is requested in another line
    assert again.digest() == expected


# The memory of a load


def test_memory_that_something_still_uses_is_not_free() -> None:
    buffer = HostBuffer(1 << 20)
    memory = LoadMemory(buffer)
    taken = torch.frombuffer(buffer.view, dtype=torch.float32)[:10]
    del taken
    assert memory.is_free()
    memory = LoadMemory(buffer)
    view = memory._bytes[4096:8192].fill_(7)  # type: ignore[index]
    assert not memory.is_free()
    buffer.release()
    assert int(view.sum()) == 7 * 4096  # it lives as long as its user


# Which tensors are read into live ones


def meta(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.empty(1 << 15, device="meta") for name in names}


def test_tensors_that_are_tied_on_one_side_only_have_memory_of_their_own() -> None:
    first, second = torch.zeros(1 << 15), torch.zeros(1 << 15)
    saved = meta("a", "b")
    apart = live_targets(saved, [(saved["a"], first), (saved["b"], second)], in_place=True)
    assert apart.keys() == {"a", "b"}
    tied_here = [(saved["a"], first), (saved["b"], first)]
    assert not live_targets(saved, tied_here, in_place=True)
    tied_there = [(saved["a"], first), (saved["a"], second)]
    assert not live_targets(saved, tied_there, in_place=True)
    tied_on_both = [(saved["a"], first), (saved["a"], first)]
    assert live_targets(saved, tied_on_both, in_place=True).keys() == {"a"}


def test_only_memory_that_can_take_the_bytes_is_filled_in_place() -> None:
    saved = meta("a")
    turned = torch.zeros(1 << 8, 1 << 7).t()
    assert not live_targets(saved, [(saved["a"], turned)], in_place=True)
    assert live_targets(saved, [(saved["a"], turned)], in_place=False)
    small = {"a": torch.empty(3, device="meta")}
    assert not live_targets(small, [(small["a"], torch.zeros(3))], in_place=False)


class _Halving(nn.Linear):
    """A layer that changes what it loads."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_an_object_that_changes_what_it_loads_is_not_filled_in_place() -> None:
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = ModelState(plain)
    assert len(list(state.live_tensors(state.state_dict()))) == 7
    hooked = nn.Linear(3, 2)
    hooked._register_load_state_dict_pre_hook(lambda *given: None)
    for module in (nn.Sequential(_Halving(3, 2)), hooked):
        state = ModelState(module)
        assert not list(state.live_tensors(state.state_dict()))
    optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9)
    plain(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    moments = OptimizerState(optimizer, {"": plain})
    assert len(list(moments.live_tensors(moments.state_dict()))) == 4
    optimizer.register_load_state_dict_pre_hook(lambda *given: None)
    assert not list(moments.live_tensors(moments.state_dict()))


class _Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, size: int) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (size,))

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        return cls(1 << 15)


def test_tensors_without_memory_are_not_filled_in_place() -> None:
    saved = meta("a")
    freed = torch.zeros(1 << 15)
    freed.untyped_storage().resize_(0)
    for live in (_Wrapper(1 << 15), freed, torch.zeros(1 << 15, device="meta")):
        for in_place in (False, True):
            assert not live_targets(saved, [(saved["a"], live)], in_place=in_place)
    lazy = ModelState(nn.LazyLinear(3))
    assert not list(lazy.live_tensors({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}))


@pytest.mark.parametrize("state", [None, 3, [], {}, {"state": 3}, {"state": {"weight": 3}}])
def test_a_state_of_any_content_has_no_live_tensors(state: Any) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not list(ModelState(layer).live_tensors(state))
    assert not list(OptimizerState(optimizer, {"": layer}).live_tensors(state))
