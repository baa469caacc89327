"""The remedy for a run that continues under another framework with another sampler, followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_remedies import Remedy
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

pytest.importorskip("accelerate")

from accelerate import Accelerator

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.torch import Checkpointer

PER_EPOCH = 4
DATA = torch.arange(2.0 * PER_EPOCH)


class OddFirst(Sampler[int]):
    """An order without a name."""

    def __iter__(self) -> Iterator[int]:
        return iter([*range(1, len(DATA), 2), *range(0, len(DATA), 2)])

    def __len__(self) -> int:
        return len(DATA)


def train(
    directory: Path, sampler: Sampler[int], *, accelerated: bool, leave_after: int = 2 * PER_EPOCH
) -> list[float]:
    """The samples of a launch that may leave before the end of the second epoch."""
    torch.manual_seed(0)
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(DATA, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    options: dict[str, Any] = {"save_every": 1, "transient": {"seen", "leave_after"}}
    if accelerated:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        checkpointer: Any = AccelerateCheckpointer(accelerator, directory, **options)
    else:
        checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    seen = []
    with checkpointer:
        for batch in checkpointer.batches(loader, epochs=2):
            seen += batch.tolist()
            model(batch[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if checkpointer.progress.step == leave_after:
                break
    return seen


@pytest.mark.remedy(
    "Give the loader the same sampler under both frameworks until the epoch is over"
)
@pytest.mark.parametrize("accelerated", [True, False], ids=["to Accelerate", "from Accelerate"])
def test_an_epoch_keeps_its_sampler_under_another_framework(
    tmp_path: Path, remedy: Remedy, accelerated: bool
) -> None:
    seen = train(tmp_path, OddFirst(), accelerated=not accelerated, leave_after=2)
    shuffled = RandomSampler(range(len(DATA)))
    remedy.of(train, tmp_path, shuffled, accelerated=accelerated)
    seen += train(tmp_path, OddFirst(), accelerated=accelerated, leave_after=PER_EPOCH)
    assert seen == DATA[[*OddFirst()]].tolist()
    seen = train(tmp_path, shuffled, accelerated=accelerated)
    assert sorted(seen) == DATA.tolist()
