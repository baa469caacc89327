"""A stream whose objects training changes gives the same batches again after a resume."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import InexactError
from resumekit.record.comparison import verdicts
from resumekit.record.journal import DIRECTORY

EPOCHS, SIZE, BATCH_SIZE, SAVE_EVERY = 4, 8, 2, 3
NUM_STEPS = EPOCHS * SIZE // BATCH_SIZE


class ReplayBuffer:
    """What training fills."""

    def __init__(self) -> None:
        self.items = [random.random() for _ in range(4)]

    def sample(self, size: int) -> list[float]:
        return random.choices(self.items, k=size)


class Sampled(IterableDataset[float]):
    """Draws all samples of an epoch before it gives the first one."""

    def __init__(self) -> None:
        self.buffer = ReplayBuffer()

    def __iter__(self) -> Iterator[float]:
        yield from self.buffer.sample(SIZE)


class Counting(Sampled):
    """Leaves a counter and a list behind, of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_given = 0
        self.given: list[float] = []

    def __iter__(self) -> Iterator[float]:
        samples = self.buffer.sample(SIZE)
        for sample in samples:
            self.num_given += 1
            self.given.append(sample)
            yield sample + self.num_given + sum(self.given)


class Compared(Sampled):
    """Its rest reads a list of its own, by a comprehension and a loop."""

    def __iter__(self) -> Iterator[float]:
        indices = random.choices(range(4), k=SIZE)
        samples = [self.buffer.items[i] for i in indices]
        for sample in samples:
            yield sample * 2


class Late(Sampled):
    """Draws each sample when it is asked for; what it gives depends on the samples before."""

    def __iter__(self) -> Iterator[float]:
        total = 0.0
        for _ in range(SIZE):
            total += self.buffer.sample(1)[0]
            yield total


class LateAtFirst(Sampled):
    """Reads the buffer late in the first half of the epoch only."""

    def __iter__(self) -> Iterator[float]:
        total = 0.0
        for _ in range(SIZE // 2):
            total += self.buffer.items[-1]
            yield total
        yield from [total] * (SIZE // 2)


class ByGenerator(Sampled):
    """Reads the buffer through a generator that it made at its start."""

    def __iter__(self) -> Iterator[float]:
        samples = (random.choice(self.buffer.items) for _ in range(SIZE))
        yield from accumulate(samples)


class ByFunction(Sampled):
    def __iter__(self) -> Iterator[float]:
        sample = self.buffer.sample
        yield from accumulate(map(first_of(sample), range(SIZE)))


def first_of(sample: Callable[[int], list[float]]) -> Callable[[int], float]:
    return lambda _: sample(1)[0]


class OverTheList(Sampled):
    """Iterates the list that grows."""

    def __iter__(self) -> Iterator[float]:
        items = self.buffer.items
        total = 0.0
        for index in range(SIZE):
            total += items[-1 - index % 4]
            yield total


class Plain(Sampled):
    """Changes itself in all ways, at once and only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"samples": 0}
        self.shard = 0
        self.seen = torch.zeros(3)
        self.sums = np.zeros(3)
        self.latest = (0.0,)

    def __iter__(self) -> Iterator[float]:
        for index in range(SIZE):
            self.count["samples"] += 1
            self.seen[index % 3] += 1
            self.sums = self.sums + index
            self.latest = (float(index),)
            self.shard = index // 4
            yield self.buffer.items[index % 4]


class KilledError(Exception):
    pass


def train(
    directory: Path,
    make: Callable[[], Any],
    *,
    last: int,
    grows: bool = True,
    in_loader: bool = True,
    is_rebuilt: bool = False,
    workers: Mapping[str, Any] = MappingProxyType({}),
    save_every: int = SAVE_EVERY,
    transient: Collection[str] = (),
    **options: Any,
) -> dict[int, Any]:
    """The batches of the steps of one launch, by step; it is killed after ``last``."""
    random.seed(3)
    torch.manual_seed(3)
    dataset = make()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = {}
    with Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        save_every=save_every,
        transient={"batches", "last", *transient},  # of each launch, no state of the loop
        **options,
    ) as checkpointer:
        for batch in batches_of(checkpointer, dataset, in_loader, is_rebuilt, workers):
            step = checkpointer.progress.step + 1
            batches[step] = batch.tolist() if in_loader else batch
            if grows:
                dataset.buffer.items.append(random.random())
            checkpointer.step()
            if step == last:
                raise KilledError
    return batches


def batches_of(
    checkpointer: Checkpointer,
    dataset: Any,
    in_loader: bool,
    is_rebuilt: bool,
    workers: Mapping[str, Any],
) -> Iterator[Any]:
    if is_rebuilt:
        for _ in checkpointer.epochs(EPOCHS):
            yield from checkpointer.batches(DataLoader(copy.copy(dataset), BATCH_SIZE))
    else:
        loader = DataLoader(dataset, BATCH_SIZE, **workers) if in_loader else dataset
        yield from checkpointer.batches(loader, epochs=EPOCHS)


def resumed(
    directory: Path, make: Callable[[], Any], *, kill: int, **options: Any
) -> dict[int, Any]:
    """The batches of a launch after one that was killed."""
    with pytest.raises(KilledError):
        train(directory, make, last=kill, **options)
    return train(directory, make, last=-1, **options)


def is_exact(tmp_path: Path, make: Callable[[], Any], *, kill: int, **options: Any) -> bool:
    expected = train(tmp_path / "reference", make, last=-1, **options)
    found = resumed(tmp_path / "killed", make, kill=kill, **options)
    assert len(found) < len(expected)
    return all(expected[step] == batch for step, batch in found.items())


KILLS = pytest.mark.parametrize("kill", [8, 13])  # a save within an epoch, and between two


@KILLS
@pytest.mark.parametrize("in_loader", [True, False])
@pytest.mark.parametrize("make", [Sampled, Counting])
def test_a_stream_over_a_replay_buffer_is_exact(
    tmp_path: Path, make: Callable[[], Any], kill: int, in_loader: bool
) -> None:
    assert is_exact(tmp_path, make, kill=kill, in_loader=in_loader)


@KILLS
@pytest.mark.parametrize("make", [Sampled, Counting])
def test_a_loader_that_is_built_again_in_each_epoch_is_exact(
    tmp_path: Path, make: Callable[[], Any], kill: int
) -> None:
    assert is_exact(tmp_path, make, kill=kill, is_rebuilt=True)


def test_workers_get_the_buffer_that_they_had(tmp_path: Path) -> None:
    assert is_exact(tmp_path, Sampled, kill=14, workers={"num_workers": 2}, strict=True)


def test_without_the_state_of_its_objects_it_differs(tmp_path: Path) -> None:
    assert not is_exact(tmp_path, Sampled, kill=8, transient={"items"})


@pytest.mark.parametrize("make", [Sampled, Compared])
def test_a_stream_that_reads_at_its_start_is_not_reported(
    tmp_path: Path, make: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_exact(tmp_path, make, kill=8, strict=True)
    assert not warnings_in(capsys)


LATE = pytest.mark.parametrize("make", [Late, LateAtFirst, ByGenerator, ByFunction, OverTheList])


@LATE
def test_a_stream_that_reads_later_differs_and_is_reported(
    tmp_path: Path, make: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_exact(tmp_path, make, kill=8)
    first = warnings_in(capsys)[0]
    assert "training changes train.dataset.buffer.items while the stream may read it" in first


@LATE
@pytest.mark.parametrize("in_loader", [True, False])
def test_strict_refuses_such_a_stream_at_the_first_change(
    tmp_path: Path, make: Callable[[], Any], in_loader: bool
) -> None:
    with pytest.raises(InexactError, match=r"training changes train\.dataset\.buffer\.items"):
        train(tmp_path, make, last=2, in_loader=in_loader, strict=True)


@pytest.mark.parametrize("make", [Late, ByGenerator, OverTheList, Plain, Counting])
def test_a_stream_that_only_changes_itself_is_not_reported(
    tmp_path: Path, make: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_exact(tmp_path, make, kill=6, grows=False, strict=True, save_every=1)
    assert not warnings_in(capsys)


def warnings_in(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [each for each in capsys.readouterr().err.splitlines() if ": WARNING: " in each]


class Rollout(IterableDataset[torch.Tensor]):
    """Gives what a policy makes of its last sample, with the weights of that moment.

    Args:
        policy: a model, or what calls one.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def __iter__(self) -> Iterator[torch.Tensor]:
        sample = torch.ones(1)
        for _ in range(SIZE):
            with torch.no_grad():
                sample = self.act(sample)
            yield sample

    def act(self, sample: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.policy(sample)
        return found


class AtItsStart(Rollout):
    """Makes all samples of an epoch before it gives the first one."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from [*super().__iter__()]


class Generated(IterableDataset[torch.Tensor]):
    """Gives what a function generates, as in Lightning's PPO example."""

    def __init__(self, generate: Callable[[], Iterator[torch.Tensor]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.generate()


class Actor(nn.Linear):
    def trajectory(self) -> Iterator[torch.Tensor]:
        yield from AtItsStart(self)


class Agent:
    def __init__(self, model: nn.Module) -> None:
        self.nets = {"policy": model}

    def __call__(self, sample: torch.Tensor) -> Any:
        return self.nets["policy"](sample)


class ByGlobalName(Rollout):
    """No attribute leads to its policy."""

    def act(self, sample: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = POLICY[0](sample)
        return found


POLICY: list[nn.Module] = []


def by_global_name(model: nn.Module) -> DataLoader[Any]:
    POLICY[:] = [model]
    return loader_of(ByGlobalName(None))


def loader_of(stream: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(stream, BATCH_SIZE, **options)


def acted(model: nn.Module, samples: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor(samples).reshape(-1, 1))


# What leads from the loader to the model.
BY_WHAT_IT_HOLDS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "an attribute": lambda model: loader_of(Rollout(model)),
    "an attribute, read at the start": lambda model: loader_of(AtItsStart(model)),
    "an object": lambda model: loader_of(Rollout(Agent(model))),
    "a method": lambda model: loader_of(Generated(model.trajectory)),
    "a function": lambda model: loader_of(Generated(lambda: iter(Rollout(model)))),
    "a collate function": lambda model: loader_of(Plain(), collate_fn=partial(acted, model)),
    "an attribute, in workers": lambda model: loader_of(AtItsStart(model), num_workers=1),
}


class Launches:
    """Trains on what a stream makes by a policy, and is killed again and again.

    Args:
        directory: of the run.
        make: the loader, of the model that is trained.
    """

    def __init__(self, directory: Path, make: Callable[[Any], DataLoader[Any]]) -> None:
        self._directory = directory
        self._make = make

    def launch(self, capsys: pytest.CaptureFixture[str], *, last: int = -1, **options: Any) -> Any:
        """The warnings with the number of steps before each, and the weights after each step."""
        torch.manual_seed(0)
        random.seed(0)
        model = Actor(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = self._make(model)
        found: list[tuple[int, str]] = []
        weights: dict[int, float] = {}
        # What this function records is no state of the training.
        options = {"save_every": SAVE_EVERY, "loop_variables": "off", **options}
        with Checkpointer(self._directory, model=model, optimizer=optimizer, **options) as ckpt:
            for batch in ckpt.batches(loader, epochs=EPOCHS):
                found += [(len(weights), each) for each in warnings_in(capsys)]
                optimizer.zero_grad()
                (model(batch.float().reshape(-1, 1)) - 2).square().mean().backward()
                optimizer.step()
                ckpt.step()
                weights[ckpt.progress.step] = float(model.weight.detach())
                if ckpt.progress.step == last:
                    break
        return found, weights


# Inside an epoch, where one ends, and inside one that was begun by a resumed launch.
CHAIN = (5, 11, 14, -1)
LOST = "data: lost (the stream uses Actor, which training changes"


@pytest.mark.parametrize("way", BY_WHAT_IT_HOLDS)
def test_a_stream_that_uses_the_trained_model_is_lost_from_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    make = BY_WHAT_IT_HOLDS[way]
    with pytest.raises(InexactError, match="the stream uses Actor, which training changes"):
        Launches(tmp_path / "strict", make).launch(capsys, strict=True)
    assert not list((tmp_path / "strict").glob("step-*"))
    _, expected = Launches(tmp_path / "whole", make).launch(capsys)
    launches = Launches(tmp_path / "run", make)
    differs = []
    for last in CHAIN:
        warnings, weights = launches.launch(capsys, last=last)
        assert any(num == 0 and LOST in text for num, text in warnings), warnings
        differs.append(any(expected[step] != each for step, each in weights.items()))
    # A collate function makes no batch but the next one, and that by the present weights.
    assert differs == [False, *([way != "a collate function"] * 3)]
    words = {each.verdict.word for each in verdicts(tmp_path / "run" / DIRECTORY)}
    assert words <= {"different", "not comparable"}
    assert words


def test_a_stream_that_finds_the_model_otherwise_is_lost_from_its_first_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(tmp_path / "run", by_global_name)
    for last in CHAIN:
        warnings, _ = launches.launch(capsys, last=last)
        assert any(num <= 1 and LOST in text for num, text in warnings), warnings
    with pytest.raises(InexactError, match="the stream uses Actor, which training changes"):
        Launches(tmp_path / "strict", by_global_name).launch(capsys, last=2, strict=True)


def frozen(_: nn.Module) -> DataLoader[Any]:
    torch.manual_seed(1)
    return loader_of(Rollout(nn.Linear(1, 1)))  # no optimizer has its parameters


def without_one(_: nn.Module) -> DataLoader[Any]:
    return loader_of(Sampled())


@pytest.mark.parametrize("make", [frozen, without_one])
def test_a_stream_that_uses_no_trained_model_is_exact_and_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Any], DataLoader[Any]]
) -> None:
    _, expected = Launches(tmp_path / "whole", make).launch(capsys)
    launches = Launches(tmp_path / "run", make)
    for last in CHAIN:
        warnings, weights = launches.launch(capsys, last=last, strict=True)
        assert not warnings
        assert all(expected[step] == each for step, each in weights.items())


def test_saved_where_epochs_end_the_stream_is_exact_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the report recommends."""
    make = BY_WHAT_IT_HOLDS["a method"]
    _, expected = Launches(tmp_path / "whole", make).launch(capsys)
    launches = Launches(tmp_path / "run", make)
    for last in CHAIN:
        _, weights = launches.launch(capsys, last=last, save_every=SIZE // BATCH_SIZE)
        assert all(expected[step] == each for step, each in weights.items())
