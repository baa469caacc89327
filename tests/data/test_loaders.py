"""Several loaders, infinite loaders, loaders that change: killed at every batch, a run continues.

Each loop below is trained once to its end, and then once for each of its batches: killed there by
an exception, and started again from what it had saved, in a process state that has nothing of the
former one. Every batch, every random number that the training drew, the progress at each batch and
the final weights must be those of the run that nobody killed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from resumekit import state
from resumekit.adapters.torch import Checkpointer
from resumekit.data import stateful
from resumekit.data.map_style import MapSource
from resumekit.data.seeking import RecordingSampler
from resumekit.data.stateful import StatefulSource
from resumekit.data.stream_objects import ObjectsAtStart
from resumekit.errors import ConfigurationError, DataPositionError, InexactError, LoopError


@pytest.fixture(autouse=True)
def _quick_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of launches are made here, and none is about a power cut or the git commit."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)


class CrashError(Exception):
    """Stands for whatever ends a process."""


class Noisy(Dataset[Any]):
    """Numbers from ``first`` on; getting one draws from all three global generators."""

    def __init__(self, length: int, *, first: int = 0) -> None:
        self.length = length
        self.first = first
        self.before_read: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.before_read()
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        return torch.tensor([float(self.first + index), noise])


def loader(length: int, *, first: int = 0, batch_size: int = 2, **settings: Any) -> Any:
    return DataLoader(
        Noisy(length, first=first), batch_size, **{"shuffle": True, "drop_last": True, **settings}
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Training:
    """One launch: a model, its checkpointer, and what the training saw and drew.

    It saves at every step, or asks for a save after the batches ``save_at``. What the judge notes
    of a launch, ``seen`` and ``epochs``, is no state of the loop.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        crash_at: int | None = None,
        save_at: range | None = None,
        **options: Any,
    ) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.seed, self.crash_at, self.save_at = seed, crash_at, save_at
        self.seen: dict[int, Any] = {}  # by the number of the batch
        self.epochs: list[int] = []  # of each batch
        self.notes: list[Any] = []
        options = {
            "save_every": 1 if save_at is None else None,
            "transient": {"seen", "epochs"},
            **options,
        }
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, **options
        )

    @property
    def crashed(self) -> bool:
        return self.crash_at is not None and len(self.seen) >= self.crash_at

    def on(self, *batches: Any) -> None:
        """Trains on one batch of each loader; the crash comes before or after the step by turns."""
        progress = self.checkpointer.progress
        drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
        self.seen[progress.micro_step] = ([batch.tolist() for batch in batches], drawn)
        self.epochs.append(progress.epoch)
        if self.crashed and len(self.seen) % 2:
            raise CrashError
        inputs = torch.cat([batch.float() for batch in batches]) / 100  # or it would diverge
        loss = self.model(inputs + 0.1 * torch.randn(inputs.shape)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.checkpointer.step(loss=loss)
        if self.save_at is not None and len(self.seen) in self.save_at:
            self.checkpointer.save()
        if self.crashed:
            raise CrashError

    def weights(self) -> list[float]:
        return [x for p in self.model.parameters() for x in p.detach().flatten().tolist()]


Loop = Callable[[Training], None]


def launch(loop: Loop, directory: Path, **options: Any) -> Training:
    training = Training(directory, **options)
    with suppress(CrashError), training.checkpointer:
        loop(training)
    return training


def kill_points(loop: Loop, whole: Training) -> list[int]:
    """After the end of the first epoch, and anywhere: after how many batches a launch is killed.

    A chain of launches that are killed after two or three batches covers what is between.
    """
    end, num_batches = whole.epochs.count(0), len(whole.seen)
    anywhere = random.Random(loop.__name__).randint(1, num_batches)
    return sorted({end + 1, end + 2, anywhere} & {*range(1, num_batches + 1)})


def assert_kills_are_survived(loop: Loop, directory: Path, *, num_wait: int = 1) -> Training:
    """Kills the loop at chosen batches; returns the launch that was not killed.

    Args:
        loop: what is trained.
        directory: an empty one.
        num_wait: the most batches that a save waits for, once it is due.
    """
    never = range(0)
    whole = launch(loop, directory / "whole", save_at=never)
    assert whole.checkpointer.finished
    num_resumes, kills = 0, kill_points(loop, whole)
    for kill in kills:
        folder = directory / f"killed at {kill}"
        killed = launch(loop, folder, crash_at=kill, save_at=range(kill - num_wait, kill))
        was_saved = any(folder.glob("step-*"))
        again = launch(loop, folder, seed=kill if was_saved else 0, save_at=never)
        assert_same(whole, killed, again)
        num_resumes += was_saved
    num_after_save = max(1, sum(kill > 1 for kill in kills) - num_wait)
    assert num_resumes >= num_after_save, "too few kills came after a save"
    assert_same(whole, *killed_again_and_again(loop, directory / "chain", num_wait + 2))
    return whole


def killed_again_and_again(loop: Loop, directory: Path, crash_at: int) -> Iterator[Training]:
    """Each launch resumes what the one before had saved, and is killed some batches later."""
    for seed in range(20):
        training = launch(loop, directory, seed=seed, crash_at=crash_at)
        yield training
        if training.checkpointer.finished:
            return
    raise AssertionError("the run gets nowhere")


def assert_same(whole: Training, *launches: Training) -> None:
    """All launches together did what the whole one did, and each of them nothing else."""
    for training in launches:
        for number, seen in training.seen.items():
            assert seen == whole.seen[number], number
    last, used = launches[-1], set[int]().union(*(each.seen for each in launches))
    assert used == whole.seen.keys()
    assert last.weights() == whole.weights()
    assert last.checkpointer.progress == whole.checkpointer.progress
    assert last.checkpointer.finished == whole.checkpointer.finished


# ---------------------------------------------------------------- several loaders in one dict


def zipped(training: Training) -> None:
    loaders = {"a": loader(8), "b": loader(6, first=100, generator=seeded(3))}
    for batch in training.checkpointer.batches(loaders, epochs=2):
        assert list(batch) == ["a", "b"]
        training.on(batch["a"], batch["b"])


def zipped_in_epochs(training: Training) -> None:
    loaders = {"a": loader(6), "b": loader(9, first=100), "c": loader(8, first=200)}
    for _ in training.checkpointer.epochs(2):
        torch.rand(1)
        for batch in training.checkpointer.batches(loaders):
            training.on(*batch.values())
        torch.rand(2)  # an evaluation


def zipped_by_steps(training: Training) -> None:
    loaders = {"a": loader(6), "b": loader(8, first=100)}
    for batch in training.checkpointer.batches(loaders, steps=5):
        training.on(*batch.values())


def zipped_over_one_generator(training: Training) -> None:
    shared = seeded(4)
    loaders = {"a": loader(6, generator=shared), "b": loader(8, first=100, generator=shared)}
    for batch in training.checkpointer.batches(loaders, epochs=2):
        training.on(*batch.values())


def zipped_with_one_of_unknown_length(training: Training) -> None:
    loaders: dict[str, Any] = {"a": loader(8), "b": Stream(3)}
    for batch in training.checkpointer.batches(loaders, epochs=2):
        training.on(batch["a"], batch["b"])


class Stream:
    """An iterable that has no length, and draws nothing."""

    def __init__(self, num_batches: int | None) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while number != self.num_batches:
            yield torch.tensor([[1000.0 + number, 0.5]])
            number += 1


@pytest.mark.parametrize(
    "loop",
    [
        zipped,
        zipped_in_epochs,
        zipped_by_steps,
        zipped_over_one_generator,
        zipped_with_one_of_unknown_length,
    ],
    ids=lambda loop: loop.__name__,
)
def test_zipped_loaders_continue_exactly(tmp_path: Path, loop: Loop) -> None:
    assert_kills_are_survived(loop, tmp_path)


def test_zipped_loaders_give_and_draw_what_zip_gives_and_draws(tmp_path: Path) -> None:
    watched = launch(zipped, tmp_path)
    Training(tmp_path / "stock")
    first, second = loader(8), loader(6, first=100, generator=seeded(3))
    seen = []
    for _ in range(2):
        for batches in zip(first, second, strict=False):
            drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
            seen.append(([batch.tolist() for batch in batches], drawn))
            torch.randn(4, 2)
    assert list(watched.seen.values()) == seen


def test_an_epoch_of_zipped_loaders_ends_with_the_shortest_and_all_begin_again(
    tmp_path: Path,
) -> None:
    training = launch(zipped, tmp_path)
    first = [int(x) for batches, _ in training.seen.values() for x, _ in batches[0]]
    assert len(first) == 12
    for epoch in (first[:6], first[6:]):
        assert len(set(epoch)) == 6  # two of the eight are left out in each epoch
    progress = training.checkpointer.progress
    assert (progress.epoch, progress.batch, progress.step, progress.micro_step) == (2, 0, 6, 6)
    assert progress.samples == 24  # of both loaders


def test_a_progress_bar_of_zipped_loaders_is_as_long_as_the_shortest(tmp_path: Path) -> None:
    launch(zipped, tmp_path, crash_at=5)
    training = Training(tmp_path)
    loaders = {"a": loader(8), "b": loader(6, first=100, generator=seeded(3))}
    batches = training.checkpointer.batches(loaders, epochs=2)
    assert (len(batches), batches.initial) == (6, 4)
    training.checkpointer.close()


def test_a_dict_takes_its_names_from_its_keys(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with pytest.raises(TypeError, match="name="):
        training.checkpointer.batches({"a": loader(4)}, epochs=1, name="b")
    with pytest.raises(ConfigurationError, match="no loader"):
        training.checkpointer.batches({}, epochs=1)
    training.checkpointer.close()


# ---------------------------------------------------------------- loaders used by hand


def with_a_repeated_one(training: Training) -> None:
    """The unlabeled loader is shorter than an epoch, and longer than what is left of one."""
    unlabeled = training.checkpointer.batches(
        loader(6, first=100, generator=seeded(5)), name="unlabeled", repeat=True
    )
    for batch in training.checkpointer.batches(loader(8), epochs=2):
        training.on(batch, next(unlabeled))


def with_a_repeated_one_in_epochs(training: Training) -> None:
    unlabeled = training.checkpointer.batches(loader(6, first=100), name="u", repeat=True)
    for _ in training.checkpointer.epochs(2):
        torch.rand(1)
        batches = training.checkpointer.batches(loader_of(training, 8))
        for number, batch in enumerate(batches, start=batches.initial):
            others = [next(unlabeled) for _ in range(1 + number % 2)]
            training.on(batch, *others)


def loader_of(training: Training, length: int) -> Any:
    """One loader for all epochs of a launch."""
    if not training.notes:
        training.notes.append(loader(length))
    return training.notes[0]


def over_one_shared_generator(training: Training) -> None:
    shared = seeded(6)
    unlabeled = training.checkpointer.batches(
        loader(6, first=100, generator=shared), name="unlabeled", repeat=True
    )
    for batch in training.checkpointer.batches(loader(8, generator=shared), epochs=2):
        training.on(batch, next(unlabeled))


def opened_late_over_one_shared_generator(training: Training) -> None:
    """The second loader is opened after the first one has fetched."""
    shared = seeded(6)
    others = loader(4, first=100, generator=shared)
    for batch in training.checkpointer.batches(loader(6, generator=shared), epochs=2):
        unlabeled = training.checkpointer.batches(others, name="unlabeled", repeat=True)
        training.on(batch, next(unlabeled))


def one_after_the_other(training: Training) -> None:
    """Two phases in each epoch, with random code between them."""
    first, second = loader(4), loader(4, first=100, generator=seeded(7))
    for _ in training.checkpointer.epochs(2):
        for batch in training.checkpointer.batches(first, name="first"):
            training.on(batch)
        torch.rand(3)
        for batch in training.checkpointer.batches(second, name="second"):
            training.on(batch)
        torch.rand(1)


def nested(training: Training) -> None:
    """For each batch of the outer loader the whole of the inner one; a step for each pair."""
    outer, inner = loader(6), loader(4, first=100, generator=seeded(8))
    for batch in training.checkpointer.batches(outer, epochs=2):
        for other in training.checkpointer.batches(inner, name="inner"):
            training.on(batch, other)


def nested_in_epochs(training: Training) -> None:
    outer, inner = loader(6), loader(4, first=100, generator=seeded(8))
    for _ in training.checkpointer.epochs(2):
        for batch in training.checkpointer.batches(outer):
            for other in training.checkpointer.batches(inner, name="inner"):
                training.on(batch, other)


def round_robin(training: Training) -> None:
    """Three tasks take turns, each with a step of its own; one after the other runs out."""
    tasks = {"a": loader(2), "b": loader(6, first=100), "c": loader(4, first=200)}
    for _ in training.checkpointer.epochs(2):
        loops = [training.checkpointer.batches(task, name=name) for name, task in tasks.items()]
        while loops:
            for batches in list(loops):
                try:
                    batch = next(batches)
                except StopIteration:
                    loops.remove(batches)
                else:
                    training.on(batch)


def refilled_by_hand(training: Training) -> None:
    """What people write around a loader that is shorter than the other one."""
    first, second = loader(8), loader(4, first=100, generator=seeded(9))
    for _ in training.checkpointer.epochs(2):
        others = iter(training.checkpointer.batches(second, name="second"))
        for batch in training.checkpointer.batches(first, name="first"):
            try:
                other = next(others)
            except StopIteration:
                others = iter(training.checkpointer.batches(second, name="second"))
                other = next(others)
            training.on(batch, other)


def with_a_step_between(training: Training) -> None:
    """The second loader's batch is used after the step, without a step of its own."""
    others = training.checkpointer.batches(loader(4, first=100), name="others", repeat=True)
    for batch in training.checkpointer.batches(loader(6), epochs=2):
        training.on(batch)
        with torch.no_grad():
            training.model(next(others)).sum()


@pytest.mark.parametrize(
    "loop",
    [
        with_a_repeated_one,
        with_a_repeated_one_in_epochs,
        over_one_shared_generator,
        opened_late_over_one_shared_generator,
        one_after_the_other,
        round_robin,
        refilled_by_hand,
        with_a_step_between,
    ],
    ids=lambda loop: getattr(loop, "__name__", None),
)
def test_loaders_used_by_hand_continue_exactly(tmp_path: Path, loop: Loop) -> None:
    assert_kills_are_survived(loop, tmp_path, num_wait=3 if loop is round_robin else 1)


@pytest.mark.parametrize("loop", [nested, nested_in_epochs], ids=lambda loop: loop.__name__)
def test_nested_loops_are_saved_where_the_outer_one_continues(tmp_path: Path, loop: Loop) -> None:
    whole = assert_kills_are_survived(loop, tmp_path, num_wait=2)
    assert len(whole.seen) == 12
    launch(loop, tmp_path / "saves", keep_latest=None)
    saved = sorted(path.name for path in (tmp_path / "saves").glob("step-*"))
    assert saved == [f"step-{step:08}" for step in (2, 4, 6, 8, 10, 12)]  # two for each outer batch


@pytest.mark.parametrize(
    "loop", [zipped, with_a_repeated_one, round_robin], ids=lambda loop: loop.__name__
)
@pytest.mark.parametrize("left_out", ["data", "rng"])
def test_without_the_position_or_the_random_state_the_same_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop, left_out: str
) -> None:
    monkeypatch.setenv("RESUMEKIT_INJECT", left_out)
    with pytest.raises((AssertionError, KeyError)):
        assert_kills_are_survived(loop, tmp_path)


@pytest.mark.parametrize("crash_at", [3, 5])  # inside an epoch, and between two
def test_a_loop_under_a_name_that_the_checkpoint_does_not_know_is_refused(
    tmp_path: Path, crash_at: int
) -> None:
    def under(**name: Any) -> Loop:
        def loop(training: Training) -> None:
            for batch in training.checkpointer.batches(loader(8), epochs=2, **name):
                training.on(batch)

        return loop

    launch(under(name="digits"), tmp_path, crash_at=crash_at)
    with pytest.raises(DataPositionError, match=r"name='train'.*one of 'digits'.*exclude"):
        launch(under(), tmp_path)
    second = launch(under(), tmp_path, exclude={"data"})
    assert second.checkpointer.finished
    assert len(second.seen) == 8


def test_a_repeated_loader_counts_its_own_epochs_and_moves_no_progress(tmp_path: Path) -> None:
    epochs: list[int] = []

    class WithSetEpoch(Noisy):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    training = Training(tmp_path)
    others = DataLoader(WithSetEpoch(4, first=100), batch_size=2, shuffle=True)
    with training.checkpointer as checkpointer:
        unlabeled = checkpointer.batches(others, name="unlabeled", repeat=True)
        with pytest.raises(TypeError):
            len(unlabeled)
        for batch in checkpointer.batches(loader(10), epochs=1):
            training.on(batch, next(unlabeled))
    progress = checkpointer.progress
    assert epochs == [0, 1, 2]
    assert (progress.epoch, progress.batch, progress.micro_step, progress.samples) == (1, 0, 5, 20)


def test_inside_epochs_the_progress_counts_the_batches_of_all_loops(tmp_path: Path) -> None:
    positions = []
    training = Training(tmp_path)
    first, second = loader(4), loader(6, first=100)
    with training.checkpointer as checkpointer:
        for epoch in checkpointer.epochs(2):
            for batches in (
                checkpointer.batches(first, name="first"),
                checkpointer.batches(second, name="second"),
            ):
                for batch in batches:
                    training.on(batch)
                    positions.append((checkpointer.progress.epoch, checkpointer.progress.batch))
            assert checkpointer.progress.epoch == epoch
    # As of the last safe point: an epoch is over when all of its code has run.
    assert positions[:6] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]


def asked_before_the_loop(training: Training) -> None:
    others = training.checkpointer.batches(loader(4), name="others", repeat=True)
    training.checkpointer.batches(loader(4), epochs=1)
    next(others)


def asked_between_two_loops(training: Training) -> None:
    others = training.checkpointer.batches(loader(4), name="others", repeat=True)
    for _ in training.checkpointer.epochs(1):
        for batch in training.checkpointer.batches(loader(4)):
            training.on(batch, next(others))
        next(others)


def gone_through_twice_in_one_epoch(training: Training) -> None:
    only = loader(4)
    for _ in training.checkpointer.epochs(1):
        for _ in range(2):
            for batch in training.checkpointer.batches(only):
                training.on(batch)


def left_for_another_loop(training: Training) -> None:
    for batch in training.checkpointer.batches(loader(4), epochs=2):
        training.on(batch)
        break
    training.checkpointer.batches(loader(4), epochs=2, name="other")


def left_for_epochs(training: Training) -> None:
    for batch in training.checkpointer.batches(loader(4), epochs=2):
        training.on(batch)
        break
    training.checkpointer.epochs(2)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (asked_before_the_loop, r"'others'.*leading loop, 'train'"),
        (asked_between_two_loops, "before any loop has a batch"),
        (gone_through_twice_in_one_epoch, "a second time in one epoch"),
        (left_for_another_loop, "a second loop"),
        (left_for_epochs, "a second loop"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_position_that_no_resume_could_find_is_refused(
    tmp_path: Path, loop: Loop, message: str
) -> None:
    with pytest.raises(LoopError, match=message):
        launch(loop, tmp_path)


@pytest.mark.parametrize(
    "arguments", [{"epochs": 1, "repeat": True}, {"steps": 1, "repeat": True}], ids=str
)
def test_a_repeated_loader_has_no_horizon(tmp_path: Path, arguments: dict[str, Any]) -> None:
    training = Training(tmp_path)
    with pytest.raises(TypeError, match="repeat=True"):
        training.checkpointer.batches(loader(4), **arguments)


def with_an_empty_one(training: Training) -> None:
    others = training.checkpointer.batches([], name="others", repeat=True)
    for _ in training.checkpointer.batches(loader(4), epochs=1):
        next(others)


def test_an_empty_loader_is_not_repeated_for_ever(tmp_path: Path) -> None:
    with pytest.raises(DataPositionError, match="without a batch"):
        launch(with_an_empty_one, tmp_path)


def joined_by_a_stream(training: Training) -> None:
    others = None
    for batch in training.checkpointer.batches(loader(4), epochs=1):
        if others is None:
            others = training.checkpointer.batches(Stream(None), name="stream", repeat=True)
        training.on(batch, next(others))


def test_strict_refuses_a_loader_that_joins_later_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InexactError, match="data: equivalent"):
        launch(joined_by_a_stream, tmp_path / "strict", strict=True)
    launch(joined_by_a_stream, tmp_path / "reported")
    output = capsys.readouterr().err
    assert output.count("starting in") == 2
    assert output.count("WARNING: data: equivalent") == 1


# ---------------------------------------------------------------- loaders without end


class Endless(Sampler[int]):
    """Yields for ever; some say a length all the same, as mmengine's InfiniteSampler does."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        while True:
            order = list(range(self.length))
            self.rng.shuffle(order)
            yield from order


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return self.length


def endless(training: Training) -> None:
    batches = DataLoader(Noisy(6), 4, sampler=Endless(6))
    for batch in training.checkpointer.batches(batches, steps=5):
        training.on(batch)


def endless_with_a_length(training: Training) -> None:
    batches = DataLoader(Noisy(6), 2, sampler=EndlessWithLength(6))
    for batch in training.checkpointer.batches(batches, steps=8):
        training.on(batch)


def endless_with_a_finite_one(training: Training) -> None:
    endless = DataLoader(Noisy(3, first=100), 2, sampler=EndlessWithLength(3))
    others = training.checkpointer.batches(endless, name="others", repeat=True)
    for batch in training.checkpointer.batches(loader(6), epochs=2):
        training.on(batch, next(others))


def endless_zipped(training: Training) -> None:
    endless = DataLoader(Noisy(3, first=100), 2, sampler=Endless(3))
    for batch in training.checkpointer.batches({"a": loader(6), "b": endless}, epochs=2):
        training.on(*batch.values())


def endless_left_after_three_batches(training: Training) -> None:
    batches = DataLoader(Noisy(4), 2, sampler=EndlessWithLength(4))
    for _ in training.checkpointer.epochs(2):
        rest = training.checkpointer.batches(batches)
        for number, batch in enumerate(rest, start=rest.initial):
            training.on(batch)
            if number == 2:
                break


def endless_stream(training: Training) -> None:
    for batch in training.checkpointer.batches(Stream(None), steps=5):
        training.on(batch)


@pytest.mark.parametrize(
    "loop",
    [
        endless,
        endless_with_a_length,
        endless_with_a_finite_one,
        endless_zipped,
        endless_left_after_three_batches,
        endless_stream,
    ],
    ids=lambda loop: loop.__name__,
)
def test_loaders_without_end_continue_exactly(tmp_path: Path, loop: Loop) -> None:
    assert_kills_are_survived(loop, tmp_path)


def endless_in_epochs(training: Training) -> None:
    batches = DataLoader(Noisy(4), 2, sampler=EndlessWithLength(4))
    for batch in training.checkpointer.batches(batches, epochs=2):
        training.on(batch)


def test_a_loader_without_end_cannot_be_counted_in_epochs(tmp_path: Path) -> None:
    with pytest.raises(DataPositionError, match=r"more than 2.*steps="):
        launch(endless_in_epochs, tmp_path)


def test_the_bar_of_a_loader_without_length_begins_at_the_batches_used(tmp_path: Path) -> None:
    launch(endless, tmp_path, crash_at=4)
    training = Training(tmp_path)
    batches = training.checkpointer.batches(DataLoader(Noisy(6), 4, sampler=Endless(6)), steps=5)
    assert batches.initial == 3
    with pytest.raises(TypeError):
        len(batches)
    training.checkpointer.close()


# ---------------------------------------------------------------- steps as the horizon


@pytest.mark.parametrize("num_steps", [3, 4], ids="until step {}".format)
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_a_number_of_steps_ends_the_run_in_the_middle_or_at_the_end_of_an_epoch(
    tmp_path: Path, num_steps: int, length: str
) -> None:
    def by_steps(training: Training) -> None:
        given = loader(6, generator=seeded(2)) if length == "known" else Stream(3)
        for batch in training.checkpointer.batches(given, steps=num_steps):
            training.on(batch)

    whole = assert_kills_are_survived(by_steps, tmp_path)
    progress = whole.checkpointer.progress
    assert len(whole.seen) == progress.step == num_steps
    at_end = (num_steps // 3 - 1, 3) if num_steps % 3 == 0 else divmod(num_steps, 3)
    expected = divmod(num_steps, 3) if length == "known" else at_end
    assert (progress.epoch, progress.batch) == expected
    assert launch(by_steps, tmp_path / "whole").seen == {}


# ---------------------------------------------------------------- orders that training changes


class LossWeighted(Sampler[int]):
    """Draws the order of an epoch by weights that training changes, when the epoch begins."""

    def __init__(self, length: int) -> None:
        self.weights = torch.ones(length, dtype=torch.float64)
        self.generator = seeded(7)

    def __len__(self) -> int:
        return len(self.weights)

    def draw(self) -> list[int]:
        drawn = torch.multinomial(self.weights, len(self), True, generator=self.generator)
        return list(drawn.tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


class LossWeightedLoop(LossWeighted):
    def __iter__(self) -> Iterator[int]:
        for index in self.draw():  # noqa: UP028 - users write it so
            yield index


class LossWeightedBatches(LossWeighted):
    """Gives whole batches, drawn from NumPy's global generator."""

    def __iter__(self) -> Iterator[Any]:
        share = (self.weights / self.weights.sum()).numpy()
        drawn = np.random.choice(len(self), len(self), p=share).tolist()
        yield from [drawn[first : first + 2] for first in range(0, len(self), 2)]


LIBRARY = ModuleType("library")  # with a generator of its own, as pytorch-metric-learning has
vars(LIBRARY).update(NUMPY_RANDOM=np.random.RandomState(5))


class ShuffledLabels(Sampler[int]):
    """Shuffles what it holds in place with a generator of a library."""

    def __init__(self, length: int) -> None:
        self.labels = list(range(length // 2))

    def __len__(self) -> int:
        return 2 * len(self.labels)

    def __iter__(self) -> Iterator[int]:
        LIBRARY.NUMPY_RANDOM.shuffle(self.labels)
        return iter([2 * label + number for label in self.labels for number in (0, 1)])


class WeightedAsItGoes(LossWeighted):
    """Draws each index by the weights of that moment."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield int(torch.multinomial(self.weights, 1, generator=self.generator))


def train_by_losses(training: Training, data: DataLoader[Any], sampler: LossWeighted) -> None:
    for batch in training.checkpointer.batches(data, epochs=2):
        training.on(batch)
        sampler.weights[batch[:, 0].long()] = torch.rand(len(batch), dtype=torch.float64) * 5


def loss_weighted(training: Training) -> None:
    sampler = LossWeighted(12)
    train_by_losses(training, DataLoader(Noisy(12), 2, sampler=sampler), sampler)


def loss_weighted_loop(training: Training) -> None:
    sampler = LossWeightedLoop(13)
    train_by_losses(training, DataLoader(Noisy(13), 2, sampler=sampler), sampler)


def loss_weighted_batches(training: Training) -> None:
    sampler = LossWeightedBatches(12)
    train_by_losses(training, DataLoader(Noisy(12), batch_sampler=sampler), sampler)


def shuffled_labels(training: Training) -> None:
    LIBRARY.NUMPY_RANDOM.seed(training.seed)
    data = DataLoader(Noisy(12), 2, sampler=ShuffledLabels(12))
    for batch in training.checkpointer.batches(data, epochs=2):
        training.on(batch)


def weighted_as_it_goes(training: Training) -> None:
    sampler = WeightedAsItGoes(12)
    train_by_losses(training, DataLoader(Noisy(12), 2, sampler=sampler), sampler)


def loss_weighted_with_workers(training: Training) -> None:
    sampler = LossWeighted(12)
    train_by_losses(training, DataLoader(Noisy(12), 2, sampler=sampler, num_workers=2), sampler)


@pytest.mark.parametrize(
    "loop",
    [loss_weighted, loss_weighted_loop, loss_weighted_batches, shuffled_labels],
    ids=lambda loop: loop.__name__,
)
def test_an_order_that_cannot_be_drawn_again_is_saved(tmp_path: Path, loop: Loop) -> None:
    assert_kills_are_survived(loop, tmp_path)


def test_an_order_that_cannot_be_drawn_again_is_saved_with_workers(tmp_path: Path) -> None:
    assert_kills_are_survived(loss_weighted_with_workers, tmp_path, num_wait=2)


def test_without_the_saved_order_the_same_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingSampler, "drawn_order", lambda self: None)
    monkeypatch.setattr(MapSource, "follow_objects", lambda self, follow: None)
    with pytest.raises(DataPositionError, match="another order"):
        assert_kills_are_survived(loss_weighted, tmp_path)


def test_an_order_that_is_drawn_as_training_goes_is_unknown_and_refused_by_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(weighted_as_it_goes, tmp_path / "warned")
    reports = [record.message for record in caplog.records if "data: unknown" in record.message]
    assert len(reports) == 1
    with pytest.raises(InexactError, match="WeightedAsItGoes gives another order"):
        launch(weighted_as_it_goes, tmp_path / "refused", strict=True, transient={"training"})


@pytest.mark.parametrize(
    "loop",
    [loss_weighted, loss_weighted_batches, weighted_as_it_goes, zipped_over_one_generator],
    ids=lambda loop: loop.__name__,
)
def test_a_run_that_saves_draws_what_one_that_does_not_save_draws(
    tmp_path: Path, loop: Loop
) -> None:
    saves = launch(loop, tmp_path / "saves")
    never = launch(loop, tmp_path / "never", save_at=range(0))
    assert saves.seen == never.seen
    assert saves.weights() == never.weights()


# ---------------------------------------------------------------- orders that last for many epochs


class Spending(Sampler[Any]):
    """Draws batches as it goes, of an order that lasts for several epochs."""

    def __init__(self, length: int) -> None:
        self.order = list(range(length))
        self.used = self.num_given = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        order, first = self.order, self.num_given  # the order is shuffled in place
        for _ in range(5):
            position = self.used + first % 3 + int(np.random.choice(2))
            self.num_given += 1
            yield order[position : position + 2]
            self.used += 2
            if self.used > 6:
                np.random.shuffle(order)
                self.used = 0


class SpendingOneByOne(Spending):
    """The same, of single indices; it refers to the dataset."""

    def __init__(self, data: Any) -> None:
        super().__init__(len(data))
        self.data = data

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        for batch in super().__iter__():
            yield from batch


def spending(training: Training, **workers: Any) -> None:
    data = DataLoader(Noisy(12), batch_sampler=Spending(12), **workers)
    for batch in training.checkpointer.batches(data, epochs=4):
        training.on(batch)


def spending_with_workers(training: Training) -> None:
    spending(training, num_workers=2)


def spending_one_by_one(training: Training) -> None:
    noisy = Noisy(12)
    data = DataLoader(noisy, batch_sampler=BatchSampler(SpendingOneByOne(noisy), 2, True))
    for batch in training.checkpointer.batches(data, epochs=4):
        training.on(batch)


def spending_and_set_back(training: Training) -> None:
    """Training gives an attribute the value that the script made; the next epoch depends on it."""
    sampler = Spending(12)
    data = DataLoader(Noisy(12), batch_sampler=sampler)
    for batch in training.checkpointer.batches(data, epochs=4):
        training.on(batch)
        if training.checkpointer.progress.batch < 4:
            sampler.num_given = 0


SPENDING = [spending, spending_one_by_one, spending_and_set_back]


@pytest.mark.parametrize("loop", SPENDING, ids=lambda loop: loop.__name__)
def test_a_sampler_that_keeps_its_state_is_set_to_the_start_of_the_epoch(
    tmp_path: Path, loop: Loop
) -> None:
    assert_kills_are_survived(loop, tmp_path)
    launch(loop, tmp_path / "strict", strict=True)


def test_a_sampler_that_keeps_its_state_continues_exactly_with_workers(tmp_path: Path) -> None:
    assert_kills_are_survived(spending_with_workers, tmp_path, num_wait=2)


def test_without_the_samplers_at_the_start_of_the_epoch_the_same_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MapSource, "follow_objects", lambda self, follow: None)
    with pytest.raises(InexactError, match="Spending gives another order"):
        launch(spending, tmp_path / "strict", strict=True)
    with pytest.raises(DataPositionError, match="another order"):
        assert_kills_are_survived(spending, tmp_path / "killed")


def test_without_the_values_at_the_safe_point_the_same_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectsAtStart, "set_back", lambda self: None)
    with pytest.raises(AssertionError):
        assert_kills_are_survived(spending_and_set_back, tmp_path)


class SpendingAnIterator(Spending):
    """A part of its state cannot be saved."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.indices = iter(range(10**6))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(5):
            first = next(self.indices) % 10
            yield [first, first + int(np.random.choice(2))]


class SpendingWithState(Spending):
    """User state leaves out objects that have a state of their own."""

    def state_dict(self) -> dict[str, Any]:
        return {"order": [*self.order], "used": self.used, "num_given": self.num_given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.used, self.num_given = state["order"], state["used"], state["num_given"]


def spending_an_iterator(training: Training) -> None:
    data = DataLoader(Noisy(12), batch_sampler=SpendingAnIterator(12))
    for batch in training.checkpointer.batches(data, epochs=4):
        training.on(batch)


def spending_with_state(training: Training) -> None:
    data = DataLoader(Noisy(12), batch_sampler=SpendingWithState(12))
    for batch in training.checkpointer.batches(data, epochs=4):
        training.on(batch)


def spending_rebuilt(training: Training) -> None:
    order = [*range(12)]
    for _ in training.checkpointer.epochs(4):
        sampler = Spending(12)
        sampler.order = order
        data = DataLoader(Noisy(12), batch_sampler=sampler)
        for batch in training.checkpointer.batches(data):
            training.on(batch)


@pytest.mark.parametrize(
    "loop",
    [spending_an_iterator, spending_with_state, spending_rebuilt],
    ids=lambda loop: loop.__name__,
)
def test_a_sampler_whose_start_is_not_saved_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: Loop
) -> None:
    launch(loop, tmp_path)
    assert "gives another order when it is drawn again" in caplog.text


# ---------------------------------------------------------------- loaders with a state of their own


class SeesItsEndAgain:
    """As torchtext's iterators: from its state at the end of an epoch it gives no batch."""

    length = 4

    def __init__(self) -> None:
        self.used, self.start, self.is_restored = 0, random.getstate(), False

    def __len__(self) -> int:
        return self.length

    def draw_order(self) -> list[int]:
        draws: Any = random
        if self.is_restored:
            draws = random.Random()
            draws.setstate(self.start)
        else:
            self.start, self.used = random.getstate(), 0
        self.is_restored = False
        return list(draws.sample(range(8), 8))

    def batches(self, order: list[int]) -> Iterator[torch.Tensor]:
        for number in range(self.length):
            if self.used <= number:
                self.used += 1
                noise = random.random()
                yield torch.tensor([[float(i), noise] for i in order[2 * number :][:2]])

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.batches(self.draw_order())

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used, self.start, self.is_restored = state["used"], state["start"], True


class DrawsAtOnce(SeesItsEndAgain):
    """It draws the order when the iterator is made."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.batches(self.draw_order())


class StartsOver(DrawsAtOnce):
    """Its state at the end of an epoch is that before the next one."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["used"] < self.length:
            super().load_state_dict(state)


class OfOneBatch(SeesItsEndAgain):
    """Each epoch is over when its second batch is asked for."""

    length = 1


class ShufflesByItself(SeesItsEndAgain):
    """It keeps the RNG state for the next epoch, and saves that of the current one only."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.start

    def draw_order(self) -> list[int]:
        if not self.is_restored:
            self.start, self.used = self.current, 0
        draws = random.Random()
        draws.setstate(self.start)
        self.is_restored, order = False, draws.sample(range(8), 8)
        self.current = draws.getstate()
        return order


class NeverStarts(SeesItsEndAgain):
    """From its state at the end of an epoch it gives no batch in the next one either."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not (self.is_restored and self.used == self.length):
            yield from super().__iter__()


def over_own_loader(kind: type[SeesItsEndAgain]) -> Loop:
    def loop(training: Training) -> None:
        data = kind()
        for batch in training.checkpointer.batches(data, epochs=3):
            training.on(batch)

    loop.__name__ = kind.__name__
    return loop


OWN_LOADERS = [SeesItsEndAgain, ShufflesByItself, DrawsAtOnce, StartsOver, OfOneBatch]


@pytest.mark.parametrize("kind", OWN_LOADERS, ids=lambda kind: kind.__name__)
def test_a_loader_with_a_state_of_its_own_continues_exactly(
    tmp_path: Path, kind: type[SeesItsEndAgain]
) -> None:
    loop = over_own_loader(kind)
    assert_kills_are_survived(loop, tmp_path)
    launch(loop, tmp_path / "strict", strict=True)


def test_without_the_end_that_it_sees_again_the_same_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        StatefulSource, "_next_or_end", lambda self: next(self._iterator, stateful._END)
    )
    loop = over_own_loader(SeesItsEndAgain)
    with pytest.raises(InexactError, match="its state at the end of an epoch gives no batch"):
        launch(loop, tmp_path / "strict", strict=True)
    with pytest.raises((AssertionError, LoopError)):
        assert_kills_are_survived(loop, tmp_path / "killed")


def test_a_loader_whose_end_gives_no_batch_at_all_is_refused_by_strict(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match="its state at the end of an epoch gives no batch"):
        launch(over_own_loader(NeverStarts), tmp_path, strict=True)


# ---------------------------------------------------------------- loaders that change


def rebuilt(training: Training) -> None:
    for epoch in training.checkpointer.epochs(3):
        batches = loader(4, first=10 * epoch, generator=seeded(epoch))
        for batch in training.checkpointer.batches(batches):
            training.on(batch)


def rebuilt_over_one_generator(training: Training) -> None:
    kept = seeded(5)
    for epoch in training.checkpointer.epochs(2):
        batches = loader(4, first=10 * epoch, generator=kept)
        for batch in training.checkpointer.batches(batches):
            training.on(batch)


def curriculum(training: Training) -> None:
    """More samples, larger batches, another kind of loader: each epoch has its own."""
    stages: list[Callable[[], Any]] = [
        lambda: loader(4),
        lambda: loader(9, batch_size=3, drop_last=False),
        lambda: Stream(2),
        lambda: loader(6, sampler=Endless(6), shuffle=None),
    ]
    for epoch in training.checkpointer.epochs(4):
        batches = training.checkpointer.batches(stages[epoch]())
        for number, batch in enumerate(batches, start=batches.initial):
            training.on(batch)
            if number == 2:
                break


def rebuilt_and_zipped(training: Training) -> None:
    for epoch in training.checkpointer.epochs(2):
        loaders = {"a": loader(6, generator=seeded(epoch)), "b": loader(4 + 4 * epoch, first=100)}
        for batch in training.checkpointer.batches(loaders):
            training.on(*batch.values())


class Shuffling(Endless):
    """Draws from a generator of its own, which no seed names."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(self.length), self.length))


def loader_of_a_cache(training: Training) -> None:
    """The loader is there before the epochs, but no variable leads to it."""
    cached = lru_cache(lambda: loader(6, sampler=Shuffling(6), shuffle=None))
    cached()
    for _ in training.checkpointer.epochs(3):
        for batch in training.checkpointer.batches(cached()):
            training.on(batch)


def a_dataset_that_grows(training: Training) -> None:
    data = Noisy(4)
    batches = DataLoader(data, 2, shuffle=True, generator=seeded(4))
    for epoch in training.checkpointer.epochs(2):
        data.length = 4 + 4 * epoch
        for batch in training.checkpointer.batches(batches):
            training.on(batch)


class Repeated:
    """Gives the batches of a batch sampler again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class OneIterator(DataLoader[Any]):
    """Makes one iterator for all epochs, as timm's MultiEpochsDataLoader does."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


def one_iterator(training: Training) -> None:
    batches = OneIterator(Noisy(6), 2, shuffle=True)
    for batch in training.checkpointer.batches(batches, epochs=3):
        training.on(batch)


def one_iterator_with_workers(training: Training) -> None:
    batches = OneIterator(Noisy(6), 2, shuffle=True, num_workers=1)
    for batch in training.checkpointer.batches(batches, epochs=2):
        training.on(batch)


@pytest.mark.parametrize(
    "loop",
    [
        rebuilt,
        rebuilt_over_one_generator,
        curriculum,
        rebuilt_and_zipped,
        loader_of_a_cache,
        a_dataset_that_grows,
        one_iterator,
    ],
    ids=lambda loop: loop.__name__,
)
def test_loaders_that_change_between_epochs_continue_exactly(tmp_path: Path, loop: Loop) -> None:
    assert_kills_are_survived(loop, tmp_path)


WORKERS = {"num_workers": 1, "persistent_workers": True}


def rebuilt_with_workers(training: Training) -> None:
    for epoch in training.checkpointer.epochs(2):
        for batch in training.checkpointer.batches(loader(4, first=10 * epoch, **WORKERS)):
            training.on(batch)


def left_early_with_workers(training: Training) -> None:
    """What its worker had made ahead is dropped, and its random numbers continue behind that."""
    batches = loader(12, **WORKERS)
    for _ in training.checkpointer.epochs(2):
        rest = training.checkpointer.batches(batches)
        for number, batch in enumerate(rest, start=rest.initial):
            training.on(batch)
            if number == 1:
                break


def zipped_with_workers(training: Training) -> None:
    loaders = {"a": loader(8, **WORKERS), "b": loader(4, first=100, **WORKERS)}
    for batch in training.checkpointer.batches(loaders, epochs=2):
        training.on(*batch.values())


@pytest.mark.parametrize(
    "loop",
    [
        rebuilt_with_workers,
        pytest.param(left_early_with_workers, marks=pytest.mark.full),
        zipped_with_workers,
        one_iterator_with_workers,
    ],
    ids=lambda loop: loop.__name__,
)
def test_workers_that_are_replaced_or_left_behind_continue_exactly(
    tmp_path: Path, loop: Loop
) -> None:
    assert_kills_are_survived(loop, tmp_path)


def test_another_loader_in_the_middle_of_an_epoch_is_refused_with_its_name(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def train() -> None:
        for batch in training.checkpointer.batches(loader(4), epochs=2):
            training.on(batch)
            training.checkpointer.batches(loader(4), epochs=2)

    with pytest.raises(ConfigurationError, match=r"name='train'.*second loader.*after batch 1"):
        train()
    training.checkpointer.close()


def test_the_geometry_of_the_epoch_under_way_is_checked_and_no_other(tmp_path: Path) -> None:
    def train(
        training: Training, lengths: list[int], *, stop_after: int = 100, **settings: Any
    ) -> list[int]:
        epochs = []
        for epoch in training.checkpointer.epochs(3):
            epochs.append(epoch)
            for batch in training.checkpointer.batches(loader(lengths[epoch], **settings)):
                training.on(batch)
                if training.checkpointer.progress.step == stop_after:
                    training.checkpointer.close()
                    return epochs
        return epochs

    train(Training(tmp_path), [4, 6, 4], stop_after=3)  # one batch of epoch 1
    with pytest.raises(DataPositionError, match="batch_size 1, expected batch_size 2"):
        train(Training(tmp_path), [4, 6, 4], batch_size=1)
    train(Training(tmp_path), [99, 6, 4], stop_after=5)  # all of epoch 1, whose end was not seen
    with Training(tmp_path).checkpointer as checkpointer:
        assert (checkpointer.resume().step, checkpointer.progress.epoch) == (5, 1)
    assert train(Training(tmp_path), [99, 6, 8]) == [1, 2]


def test_the_epoch_under_way_has_the_loader_that_it_began_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(lengths: list[int], *, stop_after: int = 100) -> int:
        training = Training(tmp_path)
        with training.checkpointer as checkpointer:
            for epoch in checkpointer.epochs(2):
                for batch in checkpointer.batches(loader(lengths[epoch])):
                    training.on(batch)
                    if checkpointer.progress.step == stop_after:
                        raise ZeroDivisionError
            return checkpointer.progress.step

    with pytest.raises(ZeroDivisionError):
        train([6, 6], stop_after=2)
    assert train([4, 4]) == 5  # three batches, as it began, and two of the next epoch
    said = "restored what the loader of this epoch was built from: dataset.length"
    assert said in caplog.text


# ---------------------------------------------------------------- leaving a loop


def left_by_break(training: Training) -> None:
    """Leaves an epoch after its first, a middle and its last batch."""
    batches = loader(6, generator=seeded(2))
    for epoch in training.checkpointer.epochs(3):
        rest = training.checkpointer.batches(batches)
        for number, batch in enumerate(rest, start=rest.initial):
            training.on(batch)
            if number == epoch:
                break
        torch.rand(1)


def crashes_in_a_fetch(training: Training) -> None:
    """The dataset fails when the batch is fetched, right after the former step was saved."""
    data = Noisy(6)
    batches = DataLoader(data, 2, shuffle=True, generator=seeded(3))

    def before_read() -> None:
        if training.crash_at == len(training.seen) + 1:
            raise CrashError

    data.before_read = before_read
    for batch in training.checkpointer.batches(batches, epochs=2):
        training.on(batch)


@pytest.mark.parametrize(
    "loop", [left_by_break, crashes_in_a_fetch], ids=lambda loop: loop.__name__
)
def test_a_loop_that_is_left_continues_exactly(tmp_path: Path, loop: Loop) -> None:
    assert_kills_are_survived(loop, tmp_path)


@pytest.mark.parametrize(
    ("outer", "leave_after"),
    [(outer, step) for outer in ("batches", "epochs") for step in (1, 3, 6)],
)
def test_a_run_that_is_left_by_break_and_closed_continues_exactly(
    tmp_path: Path, outer: str, leave_after: int
) -> None:
    """Also right after the last batch of an epoch, whose end has not been seen then."""

    def train(training: Training, leave_after: int | None) -> None:
        checkpointer, batches = training.checkpointer, loader(6, generator=seeded(2))
        if outer == "batches":
            for batch in checkpointer.batches(batches, epochs=2):
                training.on(batch)
                if checkpointer.progress.step == leave_after:
                    break
            return
        for epoch in checkpointer.epochs(2):
            for batch in checkpointer.batches(batches):
                training.on(batch)
                if checkpointer.progress.step == leave_after:
                    return
            training.notes.append((epoch, torch.rand(1).item()))  # a schedule for each epoch

    def launched(directory: Path, leave_after: int | None = None, seed: int = 0) -> Training:
        training = Training(directory, seed=seed)
        with training.checkpointer:
            train(training, leave_after)
        return training

    whole = launched(tmp_path / "whole")
    first = launched(tmp_path / "run", leave_after)
    second = launched(tmp_path / "run", seed=9)
    assert not first.seen.keys() & second.seen.keys()
    assert {**first.seen, **second.seen} == whole.seen
    assert second.notes == whole.notes  # restored, and no epoch's end runs twice or is left out
    assert second.weights() == whole.weights()


def test_stop_and_break_finish_the_run_at_close(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=None)
    with training.checkpointer as checkpointer:
        for batch in checkpointer.batches(loader(6), epochs=2):
            training.on(batch)
            if checkpointer.progress.step == 2:
                checkpointer.stop("no improvement")
                break
    again = Training(tmp_path)
    assert again.checkpointer.resume().finished == "no improvement"
    again.checkpointer.close()


def test_stop_and_an_error_do_not_finish_the_run(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def train() -> None:
        with training.checkpointer as checkpointer:
            for batch in checkpointer.batches(loader(6), epochs=2):
                training.on(batch)
                if checkpointer.progress.step == 2:
                    checkpointer.stop("no improvement")
                    raise CrashError

    with pytest.raises(CrashError):
        train()
    training.checkpointer.close()
    with Training(tmp_path).checkpointer as again:
        assert again.resume().finished is None
        assert again.progress.step == 1


def test_a_save_before_the_loop_saves_the_random_state_that_is_still_to_be_set(
    tmp_path: Path,
) -> None:
    whole = launch(zipped, tmp_path / "whole")
    launch(zipped, tmp_path / "run", crash_at=4)
    for seed in (5, 6):
        with Training(tmp_path / "run", seed=seed).checkpointer as checkpointer:
            checkpointer.resume()
            torch.rand(7)
            checkpointer.save()
    rest = launch(zipped, tmp_path / "run", seed=8)
    assert rest.seen == {number: whole.seen[number] for number in (4, 5, 6)}
    assert rest.weights() == whole.weights()


def test_a_save_that_is_due_between_two_loops_of_an_epoch_is_made_there(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=2, keep_latest=None)
    with training.checkpointer as checkpointer:
        for _ in checkpointer.epochs(1):
            for name in ("first", "second"):
                for batch in checkpointer.batches(loader(4), name=name):
                    training.on(batch)
                    if name == "second":
                        assert (tmp_path / "step-00000002").exists()


def test_a_framework_that_stops_at_the_end_of_an_epoch_has_finished_it(tmp_path: Path) -> None:
    """It knows the length, and does not ask for one batch more."""
    training = Training(tmp_path)
    loop = training.checkpointer.drive(epochs=1)
    loop.resume()
    loop.next_epoch()
    batches = loop.batches(loader(4))
    for _ in range(2):
        training.on(next(batches))
    loop.finish("that was all")
    training.checkpointer.close()
    progress = training.checkpointer.progress
    assert (progress.epoch, progress.batch) == (1, 0)


def test_the_workers_of_a_loader_end_when_another_replaces_it(tmp_path: Path) -> None:
    training = Training(tmp_path)
    before = set(multiprocessing.active_children())  # of tests that have just ended
    workers = []
    with training.checkpointer as checkpointer:
        for _ in checkpointer.epochs(3):
            for batch in checkpointer.batches(loader(4, **WORKERS)):
                training.on(batch)
                workers.append(len(set(multiprocessing.active_children()) - before))
    assert set(workers) == {1}


@pytest.mark.parametrize("batch_size", [2, 3, 5, 7])
def test_a_repeated_loader_whose_last_batch_is_short_draws_what_follows_its_end(
    tmp_path: Path, batch_size: int
) -> None:
    """torch's own sampler draws once more at its end, and a short batch has seen that end."""

    def repeated(training: Training) -> None:
        short = loader(5, first=100, batch_size=batch_size, drop_last=False, generator=seeded(5))
        others = training.checkpointer.batches(short, name="others", repeat=True)
        for batch in training.checkpointer.batches(loader(6), epochs=2):
            training.on(batch, next(others))

    assert_kills_are_survived(repeated, tmp_path)


# ---------------------------------------------------------------- whatever the lengths


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Two loaders of any lengths, in one of the ways that people use two."""
    lengths = [draw(st.integers(1, 7)) for _ in range(2)]
    sizes = [draw(st.integers(1, 3)) for _ in range(2)]
    keeps_rest = [
        draw(st.booleans()) or size > length for length, size in zip(lengths, sizes, strict=True)
    ]
    way, num_epochs = (
        draw(st.sampled_from(["zipped", "repeated", "phases"])),
        draw(st.integers(1, 3)),
    )

    def loop(training: Training) -> None:
        first, second = (
            loader(
                length,
                first=100 * index,
                batch_size=size,
                drop_last=not keeps,
                generator=seeded(index) if index else None,
            )
            for index, (length, size, keeps) in enumerate(
                zip(lengths, sizes, keeps_rest, strict=True)
            )
        )
        checkpointer = training.checkpointer
        if way == "zipped":
            for batch in checkpointer.batches({"a": first, "b": second}, epochs=num_epochs):
                training.on(*batch.values())
        elif way == "repeated":
            others = checkpointer.batches(second, name="others", repeat=True)
            for batch in checkpointer.batches(first, epochs=num_epochs):
                training.on(batch, next(others))
        else:
            for _ in checkpointer.epochs(num_epochs):
                for name, each in (("first", first), ("second", second)):
                    for batch in checkpointer.batches(each, name=name):
                        training.on(batch)

    loop.__name__ = f"{way} {lengths} by {sizes}, rest kept {keeps_rest}, {num_epochs} epochs"
    return loop


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(loop=loops(), data=st.data())
def test_two_loaders_of_any_lengths_continue_exactly(loop: Loop, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        whole = launch(loop, directory / "whole", save_at=range(0))
        kill = data.draw(st.integers(1, len(whole.seen)))
        killed = launch(loop, directory / "run", crash_at=kill, save_at=range(kill - 1, kill))
        was_saved = any(directory.glob("run/step-*"))
        again = launch(loop, directory / "run", seed=9 if was_saved else 0, save_at=range(0))
        assert_same(whole, killed, again)


# Attributes of a loader


def test_batches_have_the_attributes_of_their_loader(tmp_path: Path) -> None:
    """A crashed run whose function reads ``loader.dataset`` continues exactly."""

    def train(directory: Path, crash_at: int | None = None) -> Any:
        launched = Training(directory)
        length, seen = 6, 0

        def train_epoch(batches: Any) -> float:
            nonlocal seen
            total = 0.0
            for batch in batches:
                loss = launched.model(batch).square().mean()
                launched.optimizer.zero_grad()
                loss.backward()
                launched.optimizer.step()
                seen += 1
                if seen == crash_at:
                    raise CrashError
                launched.checkpointer.step()
                total += loss.item() * len(batch)
            assert (batches.batch_size, batches.drop_last) == (2, True)
            return total / len(batches.dataset)

        with launched.checkpointer as checkpointer:
            for _ in checkpointer.epochs(2):
                scale = train_epoch(checkpointer.batches(loader(length)))
                with torch.no_grad():
                    launched.model.weight.mul_(1 + scale / 100)
        return launched.model.weight

    expected = train(tmp_path / "whole")
    with pytest.raises(CrashError):
        train(tmp_path / "crashed", crash_at=5)
    assert torch.equal(train(tmp_path / "crashed"), expected)


def test_batches_hide_nothing_behind_the_attributes_of_a_loader(tmp_path: Path) -> None:
    class Stateful(DataLoader[Any]):
        initial, num_classes = 7, 10

        def state_dict(self) -> dict[str, Any]:
            return {}

        load_state_dict = print

    with Training(tmp_path).checkpointer as checkpointer:
        batches = checkpointer.batches(Stateful(Noisy(4), 2), epochs=1, name="one")
        assert (batches.initial, len(batches), batches.num_classes) == (0, 2, 10)
        assert not hasattr(batches, "state_dict")
        assert not isinstance(batches, state.Stateful)
        for name in ("_dataset", "__deepcopy__", "unknown"):
            with pytest.raises(AttributeError, match=name):
                getattr(batches, name)
        empty = type(batches).__new__(type(batches))  # as copy and pickle begin
        with pytest.raises(AttributeError, match="_feed"):
            _ = empty.dataset


def test_batches_of_several_loaders_have_no_attributes_of_one(tmp_path: Path) -> None:
    with Training(tmp_path).checkpointer as checkpointer:
        batches = checkpointer.batches({"a": loader(4), "b": loader(4)}, epochs=1)
        with pytest.raises(AttributeError, match="'Batches' object has no attribute 'dataset'"):
            _ = batches.dataset
