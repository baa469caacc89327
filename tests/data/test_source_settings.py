"""What all sources have in common: nothing keeps one alive but its user."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from resumekit.data.keyed import RunSeed
from resumekit.data.position import DataPosition
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.serialization.digests import state_digest


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Outer(DataLoader[Any]):
    """As accelerate's: it draws from a loader of its own."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        super().__init__(inner.dataset)
        self.base_dataloader = inner

    def __iter__(self) -> Any:
        yield from self.base_dataloader


def over(data: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=2, **settings)


SAMPLES = TensorDataset(torch.arange(8))
LOADERS: dict[str, Callable[[], Any]] = {
    "map-style": lambda: over(SAMPLES, shuffle=True),
    "a stream": lambda: over(Stream()),
    "one loader around another": lambda: Outer(over(SAMPLES, shuffle=True)),
    "asked ahead": lambda: PrefetchedLoader(over(Stream())),
    "workers that stay": lambda: over(SAMPLES, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("keyed", [False, True], ids=["tape", "keyed"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_source_goes_with_its_last_reference(kind: str, keyed: bool) -> None:
    """In a cycle it would take its loader's workers along: torch then waits 5 seconds for each."""
    seed = RunSeed(()) if keyed else None
    if seed is not None:
        seed.value = 1
    source = DataPosition(seed).feed(LOADERS[kind](), "train")
    source.begin(0)
    source.next_batch()
    alive = weakref.ref(source)
    gc.disable()
    try:
        del source
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("data", [SAMPLES, Stream()], ids=["map-style", "a stream"])
def test_a_generator_removed_between_epochs_is_left_out(data: Any, workers: dict[str, Any]) -> None:
    former = DataPosition()
    source = former.open(over(data, generator=torch.Generator(), **workers), "train")
    source.begin(0)
    for _ in range(4):
        source.next_batch()
    with pytest.raises(StopIteration):
        source.next_batch()
    source.end_epoch()
    position = DataPosition()
    position.load_state_dict(copy.deepcopy(former.state_dict()))
    source = position.open(over(data, **workers), "train")
    source.begin(1)
    assert source.next_batch() is not None


def test_before_its_first_batch_a_resumed_loader_is_at_the_saved_position() -> None:
    """Accelerate asks for the last batch ahead: its sampler draws once more where it ends."""
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader

    def opened(state: Any = None) -> Any:
        loader = over(TensorDataset(torch.arange(10)), shuffle=True)  # of two ranks one has less
        prepared = prepare(loader, num_processes=2, process_index=0, put_on_device=False)
        source = DataPosition().open(prepared, "train")
        if state is not None:
            source.load_state_dict(state)
        source.begin(0)
        source.restore_generators()
        return source

    source = opened()
    for _ in range(2):
        source.next_batch()
    state = source.state_dict()
    assert state_digest(opened(state).state_dict()) == state_digest(state)
