"""Whatever the loader, the ranks and the kill: a run continues as if it had not been killed.

A kill is a launch that ends after some batches: its Checkpointer and its loader are abandoned, all
is built again by the same function, with all global generators in another state, and resumed
from the newest checkpoint. Ranks are launches of one process here that are passed their number;
the integration tests have real ones.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from resumekit import Progress
from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler, ResumableSampler
from resumekit.data.keyed import Repeats
from resumekit.data.seeking import OrderDigest


@pytest.fixture(autouse=True)
def _quick_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of launches are made here, and none is about the git commit."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)


class KilledError(Exception):
    """Stands for whatever ends a process."""


# ---------------------------------------------------------------- what is trained

# Python's and NumPy's draw normal numbers in pairs, and keep the second one.
DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.randn()),
    "torch": lambda: torch.randn(()).item(),
}


class Augmented(Dataset[torch.Tensor]):
    """Each sample is its index, and what the augmentation drew for it."""

    def __init__(self, length: int, draws: Sequence[str]) -> None:
        self.length = length
        self.draws = draws

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = sum(DRAWS[name]() for name in self.draws)
        return torch.tensor([float(index), noise], dtype=torch.float64)


class UserSampler(Sampler[int]):
    """A user's sampler, with a generator of its own; a generator function, as most are."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = random.Random(5)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        self.rng.shuffle(order)
        yield from order


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(9)


Settings = dict[str, Any]
ALONE: dict[str, Callable[[Any], Settings]] = {
    "shuffle": lambda data: {"shuffle": True},
    "generator": lambda data: {"shuffle": True, "generator": seeded()},
    "in order": lambda data: {},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True)},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0, 2.0] * len(data), len(data))},
    "own": lambda data: {"sampler": UserSampler(len(data))},
    "resumable": lambda data: {"sampler": ResumableSampler(data, seed=3)},
}
SHARED: dict[str, Callable[..., Settings]] = {
    "distributed": lambda data, **ranks: {"sampler": DistributedSampler(data, **ranks)},
    "distributed in order": lambda data, **ranks: {
        "sampler": DistributedSampler(data, shuffle=False, **ranks)
    },
    "distributed resumable": lambda data, **ranks: {
        "sampler": DistributedResumableSampler(data, seed=3, **ranks)
    },
}


@dataclass(frozen=True)
class Plan:
    """A training run, as its script would say it."""

    kind: str
    length: int
    batch_size: int
    num_ranks: int = 1
    drop_last: bool = False
    batch_sampler: bool = False  # torch's, handed over as such
    draws: tuple[str, ...] = tuple(DRAWS)
    num_epochs: int = 2
    loop: str = "batches"
    save_every: int = 1
    randomness: Literal["tape", "keyed"] = "tape"
    persistent: bool = False

    @property
    def num_batches(self) -> int:
        """Of one epoch on one rank."""
        each = -(-self.length // self.num_ranks)
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def make_loader(self, rank: int, num_workers: int) -> DataLoader[Any]:
        data = Augmented(self.length, self.draws)
        if self.kind in SHARED:
            chosen = SHARED[self.kind](data, num_replicas=self.num_ranks, rank=rank)
        else:
            chosen = ALONE[self.kind](data)
        if num_workers:
            chosen.update(num_workers=num_workers, persistent_workers=self.persistent)
        if not self.batch_sampler or "sampler" not in chosen:
            return DataLoader(data, self.batch_size, drop_last=self.drop_last, **chosen)
        batching = BatchSampler(chosen.pop("sampler"), self.batch_size, self.drop_last)
        return DataLoader(data, batch_sampler=batching, **chosen)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kind = draw(st.sampled_from([*ALONE, *SHARED]))
    plan = Plan(
        kind,
        length=draw(st.integers(1, 30)),
        batch_size=draw(st.integers(1, 7)),
        num_ranks=draw(st.integers(1, 3)) if kind in SHARED else 1,
        drop_last=draw(st.booleans()),
        batch_sampler=draw(st.booleans()),
        draws=tuple(sorted(draw(st.sets(st.sampled_from([*DRAWS]))))),
        num_epochs=draw(st.integers(1, 3)),
        loop=draw(st.sampled_from(["batches", "epochs"])),
        save_every=draw(st.integers(1, 3)),
        randomness=draw(st.sampled_from(["tape", "keyed"])),
        persistent=draw(st.booleans()),
    )
    assume(plan.num_batches)
    return plan


# ---------------------------------------------------------------- launches


class Launch:
    """One launch on one rank: where it began, what it was fed and drew, and how it ended."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        directory: Path,
        *,
        seed: int = 0,
        num_workers: int = 0,
        kill_after: int | None = None,
    ) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._model = nn.Linear(2, 1, dtype=torch.float64)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._kill_after = kill_after
        self.seen: dict[int, Any] = {}  # by the number of the batch in the run
        self._train(plan, directory, plan.make_loader(rank, num_workers))

    def _train(self, plan: Plan, directory: Path, loader: DataLoader[Any]) -> None:
        checkpointer = Checkpointer(
            directory,
            model=self._model,
            optimizer=self._optimizer,
            # Nothing resumes from the checkpoints of a launch that is not killed.
            save_every=None if self._kill_after is None else plan.save_every,
            keep_latest=None,
            randomness=plan.randomness,
        )
        with suppress(KilledError), checkpointer:
            checkpointer.resume()
            self.begun_at = checkpointer.progress
            if plan.loop == "batches":
                for batch in checkpointer.batches(loader, epochs=plan.num_epochs):
                    self._on(batch, checkpointer)
            else:
                for _ in checkpointer.epochs(plan.num_epochs):
                    torch.rand(1)  # a line of the user's own in each epoch
                    for batch in checkpointer.batches(loader):
                        self._on(batch, checkpointer)
        self.finished = checkpointer.finished
        self.progress = checkpointer.progress
        self.random_state = random_state()
        self.weights = [p.detach().numpy().tobytes() for p in self._model.parameters()]

    def _on(self, batch: torch.Tensor, checkpointer: Checkpointer) -> None:
        drawn = [draw() for draw in DRAWS.values()]
        self.seen[checkpointer.progress.micro_step] = (batch.numpy().tobytes(), drawn)
        loss = self._model(batch + 0.1 * torch.randn(batch.shape)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        checkpointer.step(loss=loss)
        if len(self.seen) == self._kill_after:
            raise KilledError


def random_state() -> str:
    """A digest of the three global generators' states, their halves of pairs too."""
    state: Any = np.random.get_state()
    _, keys, *rest = state
    states = random.getstate(), bytes(keys), rest, bytes(torch.get_rng_state().numpy())
    return hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()


def launched_again(
    plan: Plan, rank: int, directory: Path, kills: Sequence[int], num_workers: Sequence[int]
) -> list[Launch]:
    """A launch for each kill, and one that nobody kills."""
    launches = []
    for number, kill in enumerate([*kills, None]):
        # Without a checkpoint it starts as the first one did: nothing is there to be brought back.
        seed = 100 + number if any(directory.glob("step-*")) else 0
        workers = num_workers[number % len(num_workers)]
        launches.append(
            Launch(plan, rank, directory, seed=seed, num_workers=workers, kill_after=kill)
        )
    return launches


def assert_continues(plan: Plan, kills: Sequence[int], num_workers: Sequence[int] = (0,)) -> None:
    """On each rank, the killed launches together did what one does that nobody kills.

    Args:
        plan: what is trained.
        kills: after how many of its batches each launch is killed, but the last one.
        num_workers: of each launch; what is not killed has as many as the first.
    """
    for rank in range(plan.num_ranks):
        with tempfile.TemporaryDirectory() as folder:
            whole = Launch(plan, rank, Path(folder) / "whole", num_workers=num_workers[0])
            assert len(whole.seen) == plan.num_epochs * plan.num_batches
            launches = launched_again(plan, rank, Path(folder) / "run", kills, num_workers)
        for launch in launches:
            for number, seen in launch.seen.items():
                assert seen == whole.seen.get(number), f"rank {rank}, batch {number}"
            assert_counted(plan, whole, launch.begun_at)
        last, used = launches[-1], set[int]().union(*(each.seen for each in launches))
        assert used == whole.seen.keys()
        assert last.random_state == whole.random_state
        assert last.weights == whole.weights
        assert last.progress == whole.progress
        assert last.finished == whole.finished == f"epochs={plan.num_epochs}"


def assert_counted(plan: Plan, whole: Launch, progress: Progress) -> None:
    """Epoch and batch are quotient and remainder; the samples are those of the batches before."""
    assert progress.step == progress.micro_step
    assert (progress.epoch, progress.batch) == divmod(progress.step, plan.num_batches)
    sizes = [len(batch) // 16 for batch, _ in whole.seen.values()]  # two float64 a sample
    assert progress.samples == sum(sizes[: progress.step])


kills = st.lists(st.integers(1, 12), min_size=1, max_size=2)


@settings(max_examples=5, deadline=None)
@given(plan=plans(), kills=kills)
@example(plan=Plan("shuffle", 7, 2, loop="epochs"), kills=[5, 2])
@example(plan=Plan("replacement", 9, 2, drop_last=True, save_every=2), kills=[6])
@example(plan=Plan("own", 5, 2, batch_sampler=True), kills=[2, 3])
@example(plan=Plan("weighted", 6, 2, randomness="keyed"), kills=[3, 2])
@example(plan=Plan("distributed", 11, 2, num_ranks=3), kills=[2, 2])
@example(plan=Plan("distributed resumable", 9, 2, num_ranks=2, drop_last=True), kills=[4])
def test_killed_anywhere_a_run_is_fed_draws_and_ends_as_if_nobody_had_killed_it(
    plan: Plan, kills: list[int]
) -> None:
    assert_continues(plan, kills)


@pytest.mark.parametrize("num_workers", [1, 2])
@settings(max_examples=2, deadline=None)
@given(plan=plans(), kills=kills)
@example(plan=Plan("shuffle", 7, 2, persistent=True), kills=[3, 3])
def test_with_workers_too(num_workers: int, plan: Plan, kills: list[int]) -> None:
    assert_continues(replace(plan, randomness="tape"), kills, [num_workers])


@settings(max_examples=2, deadline=None)
@given(plan=plans(), kills=kills, num_workers=st.permutations([0, 1, 2]))
def test_with_keys_each_launch_may_have_workers_of_its_own_number(
    plan: Plan, kills: list[int], num_workers: list[int]
) -> None:
    assert_continues(replace(plan, randomness="keyed"), kills, num_workers)


@st.composite
def plans_left_inside_an_epoch(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan, and a kill after which the newest checkpoint stands inside an epoch."""
    plan = replace(draw(plans()), save_every=1)
    assume(plan.num_batches > 1)
    num_saved = draw(st.integers(0, plan.num_epochs - 1)) * plan.num_batches
    num_saved += draw(st.integers(1, plan.num_batches - 1))
    return plan, num_saved + 1  # the last step of a launch is not saved any more


@pytest.mark.parametrize("left_out", ["data", "rng"])
@settings(max_examples=3, deadline=None)
@given(planned=plans_left_inside_an_epoch())
def test_without_the_position_or_the_random_state_the_same_check_fails(
    left_out: str, planned: tuple[Plan, int]
) -> None:
    plan, kill = planned
    with pytest.MonkeyPatch.context() as context:
        context.setenv("RESUMEKIT_INJECT", left_out)
        with pytest.raises(AssertionError):
            assert_continues(plan, [kill])


# ---------------------------------------------------------------- the arithmetic below

indices = st.lists(st.integers(0, 2**40), max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=6)


def cut(values: list[int], cuts: list[int]) -> list[list[int]]:
    """The same values, as they come in batches of any sizes."""
    ends = sorted(min(cut, len(values)) for cut in cuts)
    return [values[a:b] for a, b in zip([0, *ends], [*ends, len(values)], strict=True)]


def digest(parts: list[list[int]]) -> str:
    order = OrderDigest()
    for part in parts:
        order.add(part)
    return order.hexdigest()


@given(used=indices, cuts=cuts)
def test_the_digest_of_what_was_used_does_not_know_the_batches_it_came_in(
    used: list[int], cuts: list[int]
) -> None:
    assert digest(cut(used, cuts)) == digest([used])


@given(used=indices, others=indices, position=st.integers(0, 39), change=st.integers(1, 2**20))
def test_the_digest_of_any_other_order_is_another_one(
    used: list[int], others: list[int], position: int, change: int
) -> None:
    assert (digest([used]) == digest([others])) == (used == others)
    if position < len(used):
        changed = [*used[:position], used[position] + change, *used[position + 1 :]]
        assert digest([changed]) != digest([used])


@given(
    length=st.integers(0, 8),
    used=st.lists(st.integers(0, 12), max_size=40),
    cuts=cuts,
    as_numpy=st.booleans(),
)
def test_an_index_is_counted_however_it_comes_and_whether_the_dataset_has_it_or_not(
    length: int, used: list[int], cuts: list[int], as_numpy: bool
) -> None:
    repeats, so_far = Repeats(length), Counter[int]()
    for part in cut(used, cuts):
        counted = repeats.count(np.asarray(part) if as_numpy else part)
        for offset, index in enumerate(part):
            assert counted.get(offset, 0) == so_far[index]
            so_far[index] += 1
