"""The remedies for states that no other number of ranks can load, followed.

Two ranks save, one rank tries to continue, and two ranks continue.
"""

from __future__ import annotations

import ast
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_remedies import Remedy
from preloads import TORCH
from remedies_on_ranks import NUM_STEPS, Cases, train_with_count
from sharded_workloads import in_a_process_group
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from resumekit import SharingPattern
from resumekit.adapters.torch import Checkpointer
from resumekit.testing import Kit

PRELOAD = TORCH
WORLD_SIZES = (2, 1, 2)

cases = Cases()


@in_a_process_group
def follow(directory: str, *, number: int, layout: str = "") -> None:
    """One launch for all cases."""
    cases.run(Path(directory), number=number)


@pytest.fixture(scope="module")
def failures(kit: Kit) -> dict[str, str]:
    return cases.failures(kit, follow, WORLD_SIZES)


def check_number(text: str) -> None:
    """Checks that a remedy names the number of ranks, or of groups, of this launch."""
    numbers = re.findall(r"Launch with (\d+)", text)
    assert numbers == [str(torch.distributed.get_world_size())]


def options_in(text: str) -> dict[str, Any]:
    """The options that a remedy, or a part of it, spells out."""
    return {name: ast.literal_eval(each) for name, each in re.findall(r"(\w+)=(\{.*?\})", text)}


def launch(directory: Path, pattern: SharingPattern, **arguments: Any) -> tuple[int, int]:
    """The steps of this launch, and the count after them."""
    given: dict[str, Any] = {"allow_changes": {"world_size"}, **arguments}
    num_steps, ends = train_with_count(directory, pattern, **given)
    return num_steps, int(ends[-1])


def keep_on_one_rank(directory: Path, text: str, **arguments: Any) -> None:
    """Follows the part of a remedy that says how one rank may continue, in a copy."""
    copy = Path(shutil.copytree(directory, directory.with_name(f"copy of {directory.name}")))
    options = options_in(text.partition(", or pass ")[2])
    assert options.keys() == {"exclude"}
    assert launch(copy, **arguments, **options) == (2, 2)


@cases.follows("Launch with {} ranks{}, or pass exclude={{}} to keep its live state")
def name_it_per_rank(directory: Path, remedy: Remedy, *, number: int) -> None:
    pattern = SharingPattern.GLOBAL
    noted = directory.with_name("remedy")
    if number == 0:
        launch(directory, pattern, leave_after=2, per_rank={"callbacks/count"})
    elif number == 1:
        noted.write_text(remedy.of(launch, directory, pattern))
        keep_on_one_rank(directory, noted.read_text(), pattern=pattern)
    else:
        remedy.of(launch, directory, pattern)  # the option is missing
        text = noted.read_text()
        check_number(text)
        options = options_in(text.partition(", or pass ")[0])
        rank = torch.distributed.get_rank()
        assert launch(directory, pattern, **options) == (2, NUM_STEPS * (rank + 1))


@cases.follows("Launch with {} {}, or pass exclude={{}} to keep its live state")
def launch_with_as_many(directory: Path, remedy: Remedy, *, number: int) -> None:
    rank = torch.distributed.get_rank()
    for noun, pattern, group in (
        ("ranks", SharingPattern.PER_RANK, None),
        ("groups of ranks", SharingPattern.PER_GROUP, [rank]),
    ):
        arguments: dict[str, Any] = {"pattern": pattern, "process_group": group}
        run, noted = directory / noun, directory / f"remedy of {noun}"
        if number == 0:
            launch(run, **arguments, leave_after=2)
        elif number == 1:
            text = remedy.of(launch, run, **arguments)
            assert f"Launch with 2 {noun}, " in text
            keep_on_one_rank(run, text, **arguments)
            noted.write_text(text)
        else:
            check_number(noted.read_text())
            assert launch(run, **arguments) == (2, NUM_STEPS * (rank + 1))


# ---------------------------------------------------------------- gradients and positions


def launch_plain(
    directory: Path, *, batches_a_step: int, leave_after: int = 0, **options: Any
) -> tuple[list[float], list[float]]:
    """The samples of this launch, and the weights after it.

    Args:
        directory: of the run.
        batches_a_step: of this rank.
        leave_after: the last batch of this launch on this rank.
        **options: of the Checkpointer.
    """
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    used: list[float] = []
    given = {"save_every": None, "loop_variables": "off", "allow_changes": {"world_size"}}
    data: Any = torch.arange(16.0 * batches_a_step)
    sampler: Any = DistributedSampler(data, shuffle=False)
    loader: Any = DataLoader(data, batch_size=2, sampler=sampler)
    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, **{**given, **options})
    with checkpointer:
        for number, batch in enumerate(checkpointer.batches(loader, epochs=1), start=1):
            used += batch.tolist()
            model(batch[:, None]).sum().backward()
            micro_step = number if "save_every" in options else checkpointer.progress.micro_step
            if micro_step % batches_a_step == 0:
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
            if number == leave_after:
                if "save_every" not in options:
                    checkpointer.save()
                break
    return used, [float(each) for each in model.parameters()]


@cases.follows("Launch with {} ranks, or pass exclude={{}}")
def keep_the_gradients(directory: Path, remedy: Remedy, *, number: int) -> None:
    noted = directory.with_name("remedy")
    start = partial(launch_plain, batches_a_step=2, mid_accumulation="gradients")
    whole = directory.with_name("whole")
    if number == 0:
        start(directory, leave_after=3)
        return
    if number == 1:
        text = remedy.of(start, directory)
        noted.write_text(text)
        copy = Path(shutil.copytree(directory, directory.with_name("copy")))
        options = options_in(text)
        assert options.keys() == {"exclude"}
        used, _ = start(copy, **options)
        assert used == [*map(float, range(12, 32))]
        return
    check_number(noted.read_text())
    used, weights = start(directory)
    rank = torch.distributed.get_rank()
    assert used == [*map(float, range(12 + rank, 32, 2))]
    assert weights == start(whole)[1]


@cases.follows("Continue with as many ranks as in the checkpoint")
def continue_at_both_positions(directory: Path, remedy: Remedy, *, number: int) -> None:
    rank = torch.distributed.get_rank()
    start = partial(launch_plain, batches_a_step=rank + 1, save_every=1)
    if number == 0:
        start(directory, leave_after=2 * (rank + 1))
    elif number == 1:
        remedy.of(start, directory)
    else:
        used, weights = start(directory)
        begin = 8 * (rank + 1)
        assert used == [*map(float, range(begin + rank, 2 * begin, 2))]
        assert weights == start(directory.with_name("whole"))[1]


@pytest.mark.parametrize("text", cases)
def test_a_job_follows(failures: dict[str, str], text: str) -> None:
    assert not failures[text], failures[text]
