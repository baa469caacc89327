"""What a script has changed in its loader since the checkpoint is reported with both values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import DataPositionError


def loader(length: int = 8, *, shuffle: bool = False, seed: int | None = None, **kind: Any) -> Any:
    data = TensorDataset(torch.arange(float(length)))
    if "distributed" in kind:
        sampler: Any = DistributedSampler(
            data, num_replicas=1, rank=0, seed=seed or 0, shuffle=shuffle
        )
        return DataLoader(data, batch_size=2, sampler=sampler)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=2, shuffle=shuffle, generator=generator, **kind)


def launch(directory: Path, data: Any, *, stop: int | None = None, **options: Any) -> list[Any]:
    """A launch of two epochs; gives the batches that it used."""
    torch.manual_seed(0)
    model, used = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # The judge's list and the end of a launch are no state of the loop.
    options = {"save_every": 1, "transient": {"used", "stop"}, **options}
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as checkpointer:
        for _ in checkpointer.epochs(2):
            if stop is not None and checkpointer.progress.step >= stop:
                checkpointer.save()
                break
            for (batch,) in checkpointer.batches(data):
                used.append(batch.tolist())
                checkpointer.step()
                if stop is not None and stop % 4 and checkpointer.progress.step == stop:
                    checkpointer.close()
                    return used
    return used


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "length": ({}, {"length": 6}, "dataset length was 8, the script's 6 is used"),
    "shuffle": (
        {},
        {"shuffle": True},
        "order was shuffle=False, the script's shuffle=True is used",
    ),
    "no shuffle": (
        {"shuffle": True},
        {},
        "order was shuffle=True, the script's shuffle=False is used",
    ),
    "seed of a sampler": (
        {"distributed": True, "shuffle": True, "seed": 1},
        {"distributed": True, "shuffle": True, "seed": 2},
        "seed was 1, the script's 2 is used",
    ),
    "drop_last": ({}, {"drop_last": True}, "drop_last was False, the script's True is used"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_between_two_epochs_it_is_a_warning_with_both_values(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    then, now, words = CHANGES[change]
    launch(tmp_path, loader(**then), stop=4)
    capsys.readouterr()
    used = launch(tmp_path, loader(**now))
    lines = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"resumekit: WARNING: train: {words} from epoch 1 on; ")
    assert sorted(chain(*used)) == list(range(now.get("length", 8)))


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "drop_last"])
def test_inside_an_epoch_it_is_refused_with_both_values(tmp_path: Path, change: str) -> None:
    then, now, _ = CHANGES[change]
    launch(tmp_path, loader(**then), stop=2)
    with pytest.raises(DataPositionError) as error:
        launch(tmp_path, loader(**now))
    message = str(error.value)
    found = {"length": ("6", "8"), "seed of a sampler": ("1", "2")}.get(change, ("shuffle",))
    assert all(re.search(rf"\b{word}\b", message) for word in found), message
    assert "Restore" in message


@pytest.mark.parametrize("stop", [2, 4])
def test_another_seed_of_a_generator_is_reported_and_the_checkpoints_is_used(
    tmp_path: Path, stop: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = launch(tmp_path / "whole", loader(shuffle=True, seed=1))
    launch(tmp_path / "run", loader(shuffle=True, seed=1), stop=stop)
    capsys.readouterr()
    rest = launch(tmp_path / "run", loader(shuffle=True, seed=2))
    assert rest == whole[stop:]
    assert (
        "the script says 2, the checkpoint's 1 is used; exclude={'data'}" in capsys.readouterr().err
    )


class SeededByEpoch(BatchSampler):
    """As in sentence-transformers: each epoch seeds the generator of the sampler."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0
        self.generator = torch.Generator().manual_seed(seed)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from torch.randperm(8, generator=self.generator).view(4, 2).tolist()

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_generator_that_set_epoch_decides_on_is_no_message(
    tmp_path: Path, stop: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def seeded(seed: int) -> Any:
        data = TensorDataset(torch.arange(8.0))
        return DataLoader(data, batch_sampler=SeededByEpoch(seed))

    whole = launch(tmp_path / "whole", seeded(42))
    launch(tmp_path / "run", seeded(42), stop=stop)
    copytree(tmp_path / "run", tmp_path / "changed")
    capsys.readouterr()
    assert launch(tmp_path / "run", seeded(42)) == whole[stop:]
    assert "WARNING" not in (logged := capsys.readouterr().err), logged
    assert "seed" not in logged
    with suppress(DataPositionError):  # inside an epoch the order is another one
        launch(tmp_path / "changed", seeded(52))
    if stop == 4:
        assert "the script says 52, the checkpoint's 42 is used" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [2, 4])
@pytest.mark.parametrize("kind", [{}, {"shuffle": True}, {"shuffle": True, "seed": 3}], ids=str)
def test_the_same_loader_is_no_message(
    tmp_path: Path, stop: int, kind: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    launch(tmp_path, loader(**kind), stop=stop)
    capsys.readouterr()
    launch(tmp_path, loader(**kind))
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_loader_that_is_built_in_each_epoch_may_be_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        capsys.readouterr()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, save_every=1) as checkpointer:
            for epoch in checkpointer.epochs(3):
                for _ in checkpointer.batches(loader(8 + 2 * epoch)):
                    checkpointer.step()
                if checkpointer.progress.step == 4:
                    checkpointer.save()
                    break
    assert "WARNING" not in capsys.readouterr().err
