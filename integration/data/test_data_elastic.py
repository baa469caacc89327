"""Killed by SIGKILL, launched again with other ranks and batches: each sample is used once."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from digits import Digits
from preloads import TORCH
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from used_samples import counts, ledger

from resumekit import SharingPattern, StateComponent
from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler
from resumekit.record.moments import CHECKPOINT, RESUMED, STEP, read_trace
from resumekit.state import ComponentState, WorldChange
from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = TORCH

ALLOWED = ["batch_size", "world_size"]


class OwnSum:
    """What each rank sums up by itself."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total = state["total"]


class SharedSum(OwnSum, ComponentState):
    """The same, and no share of it is lost with a rank."""

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, int]], change: WorldChange
    ) -> tuple[dict[str, int], list[str]]:
        return {"total": sum(states[rank]["total"] for rank in change.inherited)}, []


def train(
    directory: str,
    *,
    sampler: str = "distributed",
    batch_size: int = 4,
    accumulate: int = 1,
    epochs: int = 3,
    save_every: int = 3,
    num_samples: int = 95,
    allow: Sequence[str] = ALLOWED,
    sum_kind: str | None = None,
    schedule: bool = False,
) -> None:
    """Trains a small classifier, whatever the number of ranks; each rank draws its own dropout."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    data = Digits(num_samples, augment=False)
    make: Any = {
        "distributed": DistributedSampler,
        "changing": DistributedSampler,
        "resumable": DistributedResumableSampler,
    }
    if sampler == "shuffle" or (sampler == "changing" and world_size == 1):
        loader = DataLoader(data, batch_size, shuffle=True)
    else:
        sharded = make[sampler](data, num_replicas=world_size, rank=rank, seed=3)
        loader = DataLoader(data, batch_size, sampler=sharded)
    bare = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 10))
    model = nn.parallel.DistributedDataParallel(bare) if world_size > 1 else bare
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    num_steps = epochs * len(loader)
    make_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
    scheduler = make_scheduler(optimizer, num_steps) if schedule else None
    counted = {"own": OwnSum, "shared": SharedSum}[sum_kind]() if sum_kind else None
    checkpointer = _checkpointer(
        directory,
        model,
        optimizer,
        scheduler,
        counted,
        save_every=save_every,
        allow_changes=set(allow),
    )
    print(f"the report: {checkpointer.resume().changes}")
    for micro_step, (images, labels) in enumerate(checkpointer.batches(loader, epochs=epochs), 1):
        loss = nn.functional.cross_entropy(model(images), labels) / accumulate
        loss.backward()
        if counted is not None:
            counted.total += len(labels)
        if micro_step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            checkpointer.step(loss=loss, own=counted.total if counted else 0)
    checkpointer.close()
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _checkpointer(
    directory: str, model: Any, optimizer: Any, scheduler: Any, counted: Any, **options: Any
) -> Any:
    if counted is None:
        return Checkpointer(
            directory, model=model, optimizer=optimizer, lr_scheduler=scheduler, **options
        )
    from resumekit import Checkpointer as Core
    from resumekit.capture.slots import state_components

    components = state_components(model=model, optimizer=optimizer)
    summed = StateComponent("callbacks/sum", counted, SharingPattern.PER_RANK)
    return Core(directory, components=[*components, summed], **options)


class Launch(NamedTuple):
    """One launch: its ranks, its options, and where it is killed."""

    num_ranks: int
    options: dict[str, Any]
    kill: KillPoint | None = None


def launched(kit: Kit, plan: Sequence[Launch], *, inject: str | None = None, **common: Any) -> Run:
    """A run whose launches have what the plan says; they may fail."""
    run = kit.new_run(Cell(train), inject=inject)
    for launch in plan:
        options = {**common, **launch.options}
        cell = Cell(train, options, world_size=launch.num_ranks)
        run = kit.run_again(replace(run, cell=cell), kill=launch.kill)
        if run.failure:
            break
    return run


def details(run: Run) -> dict[str, Any]:
    """The newest manifest's details."""
    newest = max((run.directory / "training").glob("step-*"))
    found: dict[str, Any] = json.loads((newest / "manifest.json").read_text())["details"]
    return found


# 95 samples. Where the ranks change, 47 are left of epoch 0, 71 of epoch 1 and 77 of epoch 2.
GEOMETRIES = [
    Launch(2, {"batch_size": 4}, KillPoint.step(8)),
    Launch(1, {"batch_size": 8}, KillPoint.checkpoint(15)),
    Launch(3, {"batch_size": 2}, KillPoint.step(32)),
    Launch(2, {"batch_size": 4}),
]


@pytest.mark.quick("resumable")
@pytest.mark.parametrize("sampler", ["distributed", "resumable", "changing"])
def test_over_four_geometries_each_sample_comes_once_in_each_epoch(kit: Kit, sampler: str) -> None:
    run = launched(kit, GEOMETRIES, sampler=sampler)
    used = ledger(run)
    assert {(each.launch, each.epoch) for each in used} == {
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 2),
    }
    padding = {epoch: count.total() - 95 for epoch, count in counts(used).items()}
    assert all(set(count) == set(range(95)) for count in counts(used).values())
    assert padding == {0: 0, 1: 1, 2: 1}  # 71 for three ranks, 77 for two
    log = (run.directory / "launch-00002-rank-00000.log").read_text()
    for line in (
        "number of ranks was 1, now 3",
        "rng: rank 2 is new, its python, numpy, torch derived from the random state of rank 0",
        "every rank begins with the buffers that were saved with the module",
        "train: batch_size was 8, this run's 2 is used from sample 24 of epoch 1 on",
        "the report: ('number of ranks was 1, now 3', 'rng: rank 1 is new, ",
    ):
        assert line in log
    _require_same_state_at_each_resume(run)
    changes = details(run)["changes"]
    assert [entry["step"] for entry in changes] == [6, 15, 30]
    assert [entry["changes"][0] for entry in changes] == [
        "number of ranks was 2, now 1",
        "number of ranks was 1, now 3",
        "number of ranks was 3, now 2",
    ]


JOBS = ("model", "optimizer", "progress", "best_metric", "extras")


def _require_same_state_at_each_resume(run: Run) -> None:
    """Whatever the ranks, the job takes up the model and the counts that it had."""
    saved: dict[int, Any] = {}
    num_resumed = 0
    for attempt in read_trace(run.trace)[0]:
        for record in attempt.records:
            if record.kind not in (CHECKPOINT, RESUMED):
                continue
            shared = {key: dict(record.components[key]) for key in JOBS}
            del shared["progress"]["progress.batch"]  # it is counted in batches of another size
            if record.kind == CHECKPOINT:
                saved[record.step] = shared
            else:
                num_resumed += 1
                assert shared == saved[record.step]
    assert num_resumed == len(run.launches) - 1


def test_on_one_rank_a_shuffled_loader_follows_other_batch_sizes(kit: Kit) -> None:
    plan = [
        Launch(1, {"batch_size": 4}, KillPoint.step(8)),  # 24 samples are used
        Launch(1, {"batch_size": 8}, KillPoint.checkpoint(9)),  # 48
        Launch(1, {"batch_size": 2}, KillPoint.checkpoint(60)),  # 24 steps, and 54 of epoch 1
        Launch(1, {"batch_size": 4}),
    ]
    used = ledger(launched(kit, plan, sampler="shuffle", epochs=2, num_samples=96))
    assert counts(used) == {epoch: Counter(range(96)) for epoch in (0, 1)}


def test_the_ledger_shows_a_position_that_was_not_restored(kit: Kit) -> None:
    used = ledger(launched(kit, GEOMETRIES[:1] + GEOMETRIES[3:], inject="data"))
    assert any(count.total() > 96 for count in counts(used).values())


@pytest.mark.full
def test_with_the_global_batch_kept_by_accumulation_its_sequence_is_the_same(kit: Kit) -> None:
    plan = [
        Launch(2, {"batch_size": 4, "accumulate": 3}, KillPoint.checkpoint(2)),
        Launch(1, {"batch_size": 8, "accumulate": 3}, KillPoint.step(7)),
        Launch(3, {"batch_size": 4, "accumulate": 2}, KillPoint.checkpoint(9)),
        Launch(2, {"batch_size": 2, "accumulate": 6}),
    ]
    common: dict[str, Any] = {"num_samples": 96, "save_every": 1}
    whole = launched(kit, [plan[0]._replace(kill=None)], **common)
    assert global_batches(launched(kit, plan, **common)) == global_batches(whole)
    assert len(global_batches(whole)) == 12


def global_batches(run: Run) -> list[list[int]]:
    """The samples of each step on all ranks together, in no order."""
    steps: dict[int, list[int]] = defaultdict(list)
    for each in ledger(run):
        steps[each.step] += each.samples
    return [sorted(steps[step]) for step in sorted(steps)]


@pytest.mark.full
def test_ranks_that_are_new_draw_numbers_of_their_own_and_the_same_each_time(kit: Kit) -> None:
    def states() -> dict[int, str]:
        run = launched(kit, plan, epochs=1)
        return {
            rank: record.parts["rng"]["torch"]
            for rank, attempts in read_trace(run.trace).items()
            for record in attempts[-1].records
            if record.kind == STEP and record.step == 4
        }

    plan = [
        Launch(2, {"batch_size": 4}, KillPoint.checkpoint(3)),
        Launch(3, {"batch_size": 2}, KillPoint.step(4)),
    ]
    first = states()
    assert len(set(first.values())) == 3
    assert states() == first


def test_a_change_that_is_not_allowed_is_refused_and_named(kit: Kit) -> None:
    begun = [Launch(2, {"batch_size": 4}, KillPoint.checkpoint(3))]
    others = {
        "world_size": Launch(1, {"batch_size": 4, "allow": ["batch_size"]}),
        "batch_size": Launch(2, {"batch_size": 8, "allow": ["world_size"]}),
    }
    for change, launch in others.items():
        run = launched(kit, [*begun, launch])
        assert f"allow_changes={{'{change}'}}" in run.failure


def test_a_state_of_each_rank_must_say_how_other_ranks_take_it_up(kit: Kit) -> None:
    plan = [
        Launch(2, {"batch_size": 4}, KillPoint.checkpoint(3)),
        Launch(1, {"batch_size": 4}, KillPoint.step(4)),
    ]
    refused = launched(kit, plan, sum_kind="own")
    assert "callbacks/sum: one state for each of 2 ranks" in refused.failure
    followed = launched(kit, plan, sum_kind="shared")
    assert not followed.failure
    last = read_trace(followed.trace)[0][-1].records[-1]
    assert (last.step, last.fields["values"]["own"]) == (4, 3 * 4 * 2 + 4)


def test_a_schedule_of_another_length_stays_a_change_of_the_horizon(kit: Kit) -> None:
    plan = [
        Launch(2, {"batch_size": 4}, KillPoint.checkpoint(3)),
        Launch(1, {"batch_size": 4}, KillPoint.step(4)),
    ]
    refused = launched(kit, plan, schedule=True)
    assert "lr_scheduler.horizon.T_max: was 36, now 72" in refused.failure
    assert "allow_changes={'horizon'}" in refused.failure
    followed = launched(kit, plan, schedule=True, allow=[*ALLOWED, "horizon"])
    assert not followed.failure
