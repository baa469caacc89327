"""The remedies for process groups and pipeline stages, followed on two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from digits import Digits
from followed_remedies import Remedy
from pipeline_workloads import Pipeline, gathered
from preloads import TORCH
from remedies_on_ranks import Cases, Count, assert_exact, train_with_count
from sharded_workloads import in_a_process_group
from torch import nn

from resumekit import SharingPattern
from resumekit.adapters.torch import Checkpointer
from resumekit.state import ComponentState
from resumekit.testing import Kit

PRELOAD = TORCH

cases = Cases()


@in_a_process_group
def follow(directory: str, *, layout: str = "") -> None:
    """One launch for all cases."""
    cases.run(Path(directory))


@pytest.fixture(scope="module")
def failures(kit: Kit) -> dict[str, str]:
    return cases.failures(kit, follow)


# ---------------------------------------------------------------- components of a loop


@cases.follows("declare the component per_rank")
def declare_it_per_rank(directory: Path, remedy: Remedy) -> None:
    whole = Remedy(f"Synchronise it, or {remedy.text}")
    text = whole.of(train_with_count, directory / "wrong", SharingPattern.PER_GROUP, [0, 1])
    pattern = SharingPattern(text.split()[-1])
    assert_exact(directory / "declared", partial(train_with_count, pattern=pattern))
    alike = partial(train_with_count, pattern=SharingPattern.PER_GROUP, process_group=[0, 1])
    assert_exact(directory / "synchronised", lambda *a, **k: alike(*a, **k, count=Count(by=1)))


@cases.follows("Give every rank the group that it is in")
def name_the_own_group(directory: Path, remedy: Remedy) -> None:
    rank = torch.distributed.get_rank()
    wrong = [0, 1] if rank == 0 else [1]
    remedy.of(train_with_count, directory / "wrong", SharingPattern.PER_GROUP, wrong)
    grouped = partial(train_with_count, pattern=SharingPattern.PER_GROUP, process_group=[rank])
    assert_exact(directory, grouped)


@cases.follows("Form the groups as when it was saved")
def form_the_same_groups(directory: Path, remedy: Remedy) -> None:
    rank = torch.distributed.get_rank()
    start = partial(train_with_count, directory, SharingPattern.PER_GROUP, [rank])
    start(leave_after=2)
    remedy.of(train_with_count, directory, SharingPattern.PER_GROUP, [0, 1], count=Count(by=1))
    num_steps, ends = start()
    assert num_steps == 2
    assert int(ends[-1]) == 4 * (rank + 1)


class Largest(Count, ComponentState):
    """The count that is largest is that of all stages."""

    def merge_state_dicts(self, states: Any) -> dict[str, int]:
        return {"value": max(state["value"] for state in states)}


@cases.follows("Make the component a ComponentState with the method merge_state_dicts")
def merge_the_states(directory: Path, remedy: Remedy) -> None:
    rank = torch.distributed.get_rank()
    start = partial(train_with_count, directory, SharingPattern.SHARDED, [rank])
    start(leave_after=2)
    remedy.of(start)
    num_steps, ends = start(count=Largest(by=0))
    assert num_steps == 2
    assert int(ends[-1]) == 4


# ---------------------------------------------------------------- pipelines


class OfStage(NamedTuple):
    """The objects of a rank."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer


def make_stage(
    num_stages: int = 2, *, num_layers: int = 4, rates: tuple[float, ...] = (0.01,)
) -> OfStage:
    """A stage of a pipeline; several rates are those of equal parts of the layers."""
    pipeline = Pipeline(num_stages, "alone" if num_stages == 2 else "ddp", num_layers=num_layers)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in pipeline.model.named_parameters():
        home, inner = name.split(".")[:2]
        number = int(inner) if home == "layers" else {"embed": 0, "head": num_layers - 1}[home]
        groups.setdefault(rates[number * len(rates) // num_layers], []).append(parameter)
    given = [{"params": each, "lr": rate} for rate, each in groups.items()]
    return OfStage(pipeline, torch.optim.AdamW(given))


def launch_stage(
    directory: Path, stage: OfStage, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks find together, and what they save after one step."""
    (pipeline, optimizer), model = stage, stage.pipeline.model
    given = {"stage_group": pipeline.mesh["replicas"], "loop_variables": "off", **options}
    with Checkpointer(directory, model=model, optimizer=optimizer, **given) as checkpointer:
        checkpointer.resume()
        found = gathered(model, optimizer)
        digits = Digits(8, augment=False)
        pipeline.backward(digits.images, torch.tensor(digits.labels))
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save()
        return found, gathered(model, optimizer)


@cases.follows("Build the stages from all layers of the saved model")
def build_all_layers(directory: Path, remedy: Remedy) -> None:
    _, saved = launch_stage(directory, make_stage())
    remedy.of(launch_stage, directory, make_stage(num_layers=2))
    found, _ = launch_stage(directory, make_stage())
    assert found == saved


@cases.follows("Give the parameters groups of their own, as when they were saved")
def keep_the_groups(directory: Path, remedy: Remedy) -> None:
    rates = (0.01, 0.02)
    _, saved = launch_stage(directory, make_stage(rates=rates))
    remedy.of(launch_stage, directory, make_stage(1))
    found, _ = launch_stage(directory, make_stage(1, rates=rates))
    assert found == saved
    assert {each for name, each in found.items() if name.endswith(".lr")} == {*rates}


@cases.follows(
    "Give each pipeline stage a process group of its own, or declare it per_rank where "
    "every rank has its own"
)
def separate_the_stages(directory: Path, remedy: Remedy) -> None:
    remedy.of(launch_stage, directory / "wrong", make_stage(), stage_group=[0, 1])
    grouped: dict[str, Any] = {"stage_group": [torch.distributed.get_rank()]}
    declared: dict[str, Any] = {"stage_group": None, "per_rank": {"model", "optimizer"}}
    for name, options in {"group": grouped, "per_rank": declared}.items():
        _, saved = launch_stage(directory / name, make_stage(), **options)
        found, _ = launch_stage(directory / name, make_stage(), **options)
        assert found == saved


@pytest.mark.parametrize("text", cases)
def test_two_ranks_follow(failures: dict[str, str], text: str) -> None:
    assert not failures[text], failures[text]
