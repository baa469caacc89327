"""A map-style dataset that training changes gives the batches of a stock loop after a resume."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from resumekit.adapters.torch import Checkpointer
from resumekit.data.map_style import MapSource
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.data.stream_objects import ObjectsAtStart, ObjectsReadAhead
from resumekit.errors import InexactError

EPOCHS, SIZE, BATCH_SIZE = 4, 8, 2
PER_EPOCH = SIZE // BATCH_SIZE
# Resumes inside the second epoch, there again, before the third, and inside it.
KILLS = (6, 7, 9, 11)


class Content:
    """What training changes, in all ways: a number, a list, a tensor in place, a new attribute."""

    def __init__(self) -> None:
        self.level = 0
        self.history: list[int] = []
        self.weights = torch.zeros(3)
        self.former: dict[str, Any] = {"level": 0}

    def change(self) -> None:
        self.level += 1
        self.history.append(self.level % 2)
        self.weights[self.level % 3] += 1
        self.former["level"] = self.level - 1
        self.latest = self.level

    def number(self) -> float:
        sums = float(self.weights @ torch.arange(1.0, 4.0)) + 10 * sum(self.history)
        of_attributes = self.level + 100 * self.former["level"] + 1000 * getattr(self, "latest", 0)
        return sums + 10_000 * of_attributes


class Levelled(Dataset[Any], Content):
    """Its samples depend on its content, and on random numbers."""

    def __init__(self, length: int = SIZE) -> None:
        Content.__init__(self)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        return index + self.number() + random.random() / 2


class Alternating(Levelled):
    """Holds at every second change what the script made."""

    def change(self) -> None:
        self.level = 1 - self.level
        self.history[:] = [1] * self.level
        self.weights[1] = self.level


class Collating(Content):
    """A collate function with content."""

    def __call__(self, samples: list[float]) -> torch.Tensor:
        return torch.tensor(samples, dtype=torch.float64) + self.number()


class Starting(Content):
    """A ``worker_init_fn`` with content, which it gives to the dataset."""

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.latest = self.number()


class Narrowed(Content):
    """Training takes other indices for a Subset."""

    def __init__(self, subset: Any) -> None:
        super().__init__()
        self.subset = subset

    def change(self) -> None:
        self.subset.indices[0] += 1
        self.subset.indices = [each + 1 for each in self.subset.indices]


def of_dataset(**options: Any) -> tuple[Any, Content]:
    data = Levelled()
    return DataLoader(data, BATCH_SIZE, shuffle=True, **options), data


def of_collate_function(**options: Any) -> tuple[Any, Content]:
    collate = Collating()
    return DataLoader(Levelled(), BATCH_SIZE, shuffle=True, collate_fn=collate, **options), collate


def of_worker_init_fn(**options: Any) -> tuple[Any, Content]:
    start = Starting()
    loader = DataLoader(Levelled(), BATCH_SIZE, shuffle=True, worker_init_fn=start, **options)
    return loader, start


def of_subset(**options: Any) -> tuple[Any, Content]:
    data: Any = Subset(Subset(Levelled(100), range(1, 90)), list(range(0, 2 * SIZE, 2)))
    return DataLoader(data, BATCH_SIZE, shuffle=True, **options), Narrowed(data)


def of_long_subset(**options: Any) -> tuple[Any, Content]:
    data: Any = Subset(Levelled(10**5), list(range(6 * 10**4)))
    return DataLoader(data, BATCH_SIZE, sampler=range(SIZE), **options), Narrowed(data)


def of_alternating_dataset(**options: Any) -> tuple[Any, Content]:
    data = Alternating()
    return DataLoader(data, BATCH_SIZE, shuffle=True, **options), data


def of_inner_dataset(**options: Any) -> tuple[Any, Content]:
    inner = Levelled(100)
    data: Any = Subset(inner, range(SIZE))
    return DataLoader(data, BATCH_SIZE, shuffle=True, **options), inner


class KilledError(Exception):
    pass


class Training:
    """A loop over a loader; training changes what it reads.

    Args:
        make: gives the loader, and what changes.
        changed_at: the batch in each epoch after which it does; the last one: after the epoch.
        wrap: makes a framework's loader of it.
        is_rebuilt: each epoch has a loader, and a dataset, of its own.
        options: of the loader.
    """

    def __init__(
        self,
        make: Callable[..., tuple[Any, Content]],
        changed_at: int = PER_EPOCH,
        wrap: Callable[[Any], Any] = lambda loader: loader,
        is_rebuilt: bool = False,
        **options: Any,
    ) -> None:
        self._make, self._changed_at, self._wrap = make, changed_at, wrap
        self._is_rebuilt, self._options = is_rebuilt, options
        self.found: dict[int, Any] = {}  # the batches by step, of the last launch

    def stock(self) -> dict[int, Any]:
        """The batches by step, without a checkpoint."""
        loader, content = self._made()
        found: dict[int, Any] = {}
        for _ in range(EPOCHS):
            self._train(iter(self._again(loader)), content, found, lambda: None)
        return found

    def launch(self, directory: Path, *, last: int = -1, **options: Any) -> dict[int, Any]:
        """The batches by step of a launch; it is killed after ``last``."""
        found = self.found = {}
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader, content = self._made()
        # What reaches the objects is the loader alone, as in a framework's loop.
        options = {"save_every": 1, "loop_variables": "off", **options}
        with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:

            def step() -> None:
                ckpt.step()
                if ckpt.progress.step == last:
                    raise KilledError

            if isinstance(loader, Ahead):
                loader = PrefetchedLoader(loader.loader)
            for _ in ckpt.epochs(EPOCHS):
                batches = ckpt.batches(self._again(loader))
                self._train(batches, content, found, step, lambda: ckpt.progress.step)
        return found

    def _made(self) -> tuple[Any, Content]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        loader, content = self._make(**self._options)
        return self._wrap(loader), content

    def _again(self, loader: Any) -> Any:
        if not self._is_rebuilt:
            return loader
        return DataLoader(copy.copy(loader.dataset), BATCH_SIZE, shuffle=True, **self._options)

    def _train(
        self,
        batches: Iterator[Any],
        content: Content,
        found: dict[int, Any],
        step: Callable[[], None],
        num_steps: Callable[[], int] | None = None,
    ) -> None:
        for batch in batches:
            before = len(found) if num_steps is None else num_steps()
            found[before + 1] = batch.tolist()
            if before % PER_EPOCH + 1 == self._changed_at < PER_EPOCH:
                content.change()
            step()
        if self._changed_at == PER_EPOCH:
            content.change()

    def differences(
        self,
        directory: Path,
        *,
        kills: Sequence[int] = KILLS,
        later: Training | None = None,
        **options: Any,
    ) -> list[tuple[int, int]]:
        """The launch, counted from 0, and the step of each batch that the stock loop has not.

        Args:
            directory: of the runs.
            kills: the steps after which the launches of a run are killed, but for the last one.
            later: what is trained after the first kill; this by default.
            options: of the Checkpointer; with keys the loop without a kill is no stock loop.
        """
        is_keyed = options.get("randomness") == "keyed"
        expected = self.launch(directory / "whole", **options) if is_keyed else self.stock()
        found = []
        for launch, (before, last) in enumerate(zip((0, *kills), (*kills, -1), strict=True)):
            training = later if later and launch else self
            with pytest.raises(KilledError) if last > 0 else nullcontext():
                training.launch(directory / "killed", last=last, **options)
            batches = training.found
            assert min(batches) == max(before, 1)
            found += [(launch, step) for step, each in batches.items() if expected[step] != each]
        assert max(batches) == EPOCHS * PER_EPOCH
        return found


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}
MAKERS = [
    of_dataset,
    of_inner_dataset,
    of_subset,
    of_long_subset,
    of_collate_function,
    of_worker_init_fn,
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_what_training_changes_between_epochs_is_exact(
    tmp_path: Path, make: Any, workers: str
) -> None:
    assert not Training(make, **WORKERS[workers]).differences(tmp_path, strict=True)


@pytest.mark.parametrize("randomness", ["tape", "keyed"])
@pytest.mark.parametrize("workers", WORKERS)
def test_what_training_changes_within_an_epoch_is_exact(
    tmp_path: Path, workers: str, randomness: str
) -> None:
    training = Training(of_dataset, 2, **WORKERS[workers])
    assert not training.differences(tmp_path, strict=True, randomness=randomness)


@pytest.mark.parametrize("workers", WORKERS)
def test_what_is_as_the_script_made_it_at_the_save_is_exact(tmp_path: Path, workers: str) -> None:
    training = Training(of_alternating_dataset, 2, **WORKERS[workers])
    assert not training.differences(tmp_path, kills=(6, 8, 9, 11), strict=True)


@pytest.mark.parametrize("later", [0, 1])
def test_with_keys_the_number_of_workers_may_change(tmp_path: Path, later: int) -> None:
    training, other = (Training(of_dataset, num_workers=each) for each in (1 - later, later))
    assert not training.differences(tmp_path, later=other, strict=True, randomness="keyed")


def test_a_loader_that_is_built_again_in_each_epoch_is_exact(tmp_path: Path) -> None:
    training = Training(of_dataset, is_rebuilt=True, **WORKERS["workers"])
    options: Any = {"loop_variables": "restore", "transient": {"found"}}
    assert not training.differences(tmp_path, strict=True, **options)


@pytest.mark.parametrize("workers", ["workers", "persistent workers"])
def test_without_the_objects_that_workers_were_started_with_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setattr(MapSource, "follow_objects", lambda self, follow: None)
    found = Training(of_dataset, **WORKERS[workers]).differences(tmp_path)
    assert {launch for launch, _ in found} == ({1, 2, 4} if workers == "workers" else {3})


def test_without_what_was_saved_of_them_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectsAtStart, "set_back", lambda self: None)
    training = Training(of_alternating_dataset, 2, **WORKERS["workers"])
    found = training.differences(tmp_path, kills=[8])
    assert found[0] == (1, 9)  # where the next epoch starts


def test_a_position_has_no_field_for_what_nobody_changed(tmp_path: Path) -> None:
    for changed_at, is_there in ((PER_EPOCH + 1, False), (PER_EPOCH, True)):
        directory = tmp_path / str(changed_at)
        Training(of_dataset, changed_at, num_workers=1).launch(directory)
        text = (directory / "step-00000015" / "state" / "rank-00000.json").read_text("utf-8")
        assert ('"copied"' in text) == is_there


# ---------------------------------------------------------------- one batch ahead of the step


class ByLevel(Levelled):
    """Training changes a number only."""

    def change(self) -> None:
        self.level += 1


class Counting(ByLevel):
    """A sample counts, and depends on the count."""

    def __getitem__(self, index: int) -> float:
        self.level += 1
        return super().__getitem__(index)


class Remembering(Levelled):
    """A sample changes a list, and depends on it."""

    def __getitem__(self, index: int) -> float:
        self.history.append(index)
        return super().__getitem__(index)

    def change(self) -> None:
        """Nothing."""


class Caching(Levelled):
    """A sample is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, float] = {}

    def __getitem__(self, index: int) -> float:
        return self.made.setdefault(index, index + 0.5)

    def change(self) -> None:
        """Nothing."""


class InPlace(Levelled):
    """Training changes a tensor, and no mark shows it."""

    def change(self) -> None:
        self.weights[1] += 1


def over(kind: type[Levelled]) -> Callable[..., tuple[Any, Content]]:
    def make(**options: Any) -> tuple[Any, Content]:
        data = kind()
        return DataLoader(data, BATCH_SIZE, shuffle=True, **options), data

    return make


def accelerated(loader: Any) -> Any:
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    return prepare(loader, num_processes=1, process_index=0)


class Ahead:
    """A stock loop that looks one batch ahead, as frameworks do for loaders without a length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch


class CountingStream(IterableDataset[float]):
    """A stream that counts, and depends on the count."""

    level = 0

    def __iter__(self) -> Iterator[float]:
        for index in range(SIZE):
            self.level += 1
            yield index + 100.0 * self.level + random.random()


def of_stream(**options: Any) -> tuple[Any, Content]:
    return DataLoader(CountingStream(), BATCH_SIZE, **options), Content()


WRAPS = {"Accelerate's": accelerated, "a loader without a length": Ahead}


@pytest.mark.parametrize("changed_at", [2, 3, PER_EPOCH])
@pytest.mark.parametrize("kind", [ByLevel, Counting])
@pytest.mark.parametrize("wrap", WRAPS)
def test_ahead_of_the_step_numbers_are_exact(
    tmp_path: Path, wrap: str, kind: Any, changed_at: int
) -> None:
    training = Training(over(kind), changed_at, wrap=WRAPS[wrap])
    assert not training.differences(tmp_path, strict=True)


@pytest.mark.parametrize("wrap", WRAPS)
def test_ahead_of_the_step_all_that_changes_between_epochs_is_exact(
    tmp_path: Path, wrap: str
) -> None:
    for make in (of_dataset, of_collate_function, of_subset):
        training = Training(make, wrap=WRAPS[wrap])
        assert not training.differences(tmp_path / make.__name__, strict=True)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("workers", ["workers", "persistent workers"])
def test_ahead_of_the_step_workers_are_exact(tmp_path: Path, wrap: str, workers: str) -> None:
    training = Training(of_dataset, 2, wrap=WRAPS[wrap], **WORKERS[workers])
    assert not training.differences(tmp_path, strict=True)


def test_ahead_of_the_step_what_a_stream_changes_itself_is_exact(tmp_path: Path) -> None:
    assert not Training(of_stream, wrap=Ahead).differences(tmp_path, strict=True)


@pytest.mark.parametrize("wrap", WRAPS)
def test_ahead_of_the_step_a_cache_is_exact(tmp_path: Path, wrap: str) -> None:
    training = Training(over(Caching), 2, wrap=WRAPS[wrap])
    assert not training.differences(tmp_path, strict=True)


@pytest.mark.parametrize("wrap", WRAPS)
def test_ahead_of_the_step_what_training_changes_is_reported(tmp_path: Path, wrap: str) -> None:
    training = Training(over(Levelled), 2, wrap=WRAPS[wrap])
    assert training.differences(tmp_path / "run", kills=[7])
    with pytest.raises(InexactError, match="changed after a batch is fetched ahead of its step"):
        training.launch(tmp_path / "strict", strict=True)


@pytest.mark.parametrize("kind", [Remembering, InPlace])
@pytest.mark.parametrize("wrap", WRAPS)
def test_ahead_of_the_step_another_batch_is_reported_at_the_resume(
    tmp_path: Path, wrap: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(over(kind), 2, wrap=WRAPS[wrap])
    with caplog.at_level("WARNING", "resumekit"):
        assert training.differences(tmp_path / "run", kills=[7])
    assert "a batch that was fetched ahead of its step is another one now" in caplog.text
    with pytest.raises(KilledError):
        training.launch(tmp_path / "strict", last=7, strict=True)
    with pytest.raises(InexactError, match="is another one now"):
        training.launch(tmp_path / "strict", strict=True)


def test_without_the_values_before_the_fetch_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectsReadAhead, "set_values", lambda self, values: {})
    assert Training(over(Counting), 2, wrap=accelerated).differences(tmp_path, kills=[6])
