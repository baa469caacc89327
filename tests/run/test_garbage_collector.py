"""The garbage collector pauses while a save and a resume make their many objects, and only then."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.run.garbage_collector import collector_paused
from resumekit.serialization.planning import encode_local
from resumekit.serialization.writing import Payload


class Watching:
    """State that notes whether the collector is enabled when it is read and loaded."""

    def __init__(self) -> None:
        self.saves: list[bool] = []
        self.loads: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        self.saves.append(gc.isenabled())
        return {"a": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        self.loads.append(gc.isenabled())


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def train(
    directory: Path, watching: Watching, *, num_steps: int = 4, leave_at: int = 4
) -> list[bool]:
    """Whether the collector is enabled in each step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    seen = []
    ckpt = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        extras={"watching": watching},
        save_every=1,
        transient={"seen"},  # the judge's, of each launch
    )
    with ckpt:
        for _ in ckpt.batches(loader, steps=num_steps):
            seen.append(gc.isenabled())
            ckpt.step()
            if ckpt.progress.step == leave_at:
                break
    return seen


def test_the_collector_pauses_for_saves_and_resumes_only(tmp_path: Path) -> None:
    first, second = Watching(), Watching()
    assert train(tmp_path / "run", first, leave_at=2) == [True, True]
    assert train(tmp_path / "run", second) == [True, True]
    assert not any(first.saves[1:]), "the first time, its state is read before the training"
    assert second.loads == [False]
    assert gc.isenabled()


class OfWorkers(Dataset[float]):
    """Gives whether the collector is enabled where an item is made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(gc.isenabled())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_collector_runs_in_workers(tmp_path: Path, num_workers: int) -> None:
    with Checkpointer(tmp_path, model=nn.Linear(1, 1)) as ckpt:
        for batch in ckpt.batches(DataLoader(OfWorkers(), num_workers=num_workers), epochs=2):
            ckpt.step()
            assert batch == 1


def test_a_process_that_is_forked_while_the_collector_pauses_has_one() -> None:
    with collector_paused(), collector_paused():
        child = os.fork()
        if child == 0:
            os._exit(gc.isenabled())
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        assert not gc.isenabled()


def test_a_collector_that_the_script_has_disabled_stays_disabled(tmp_path: Path) -> None:
    gc.disable()
    assert train(tmp_path / "run", Watching(), leave_at=2) == [False, False]
    assert not gc.isenabled()


def test_the_collector_runs_again_after_a_save_that_failed(tmp_path: Path) -> None:
    class Failing(Watching):
        def state_dict(self) -> dict[str, Any]:
            if not gc.isenabled():
                raise ZeroDivisionError
            return super().state_dict()

    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", Failing(), leave_at=2)
    assert gc.isenabled()


@pytest.mark.parametrize(
    "encode",
    [
        lambda state: Payload.of_states("model", 0, {"model": state}),
        lambda state: encode_local("model", state),
    ],
    ids=["whole", "sharded"],
)
def test_an_encoded_state_refers_to_its_tensors_only_as_long_as_it_is_needed(encode: Any) -> None:
    tensor = torch.arange(3)
    gone = weakref.ref(tensor)
    encoded = encode({"a": tensor, "b": [tensor[:2]]})
    gc.disable()
    del tensor
    assert gone() is not None
    del encoded
    assert gone() is None, "a cycle of references waits for the collector"
