"""An interrupted loop over an iterable continues with the same samples and random numbers."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.rng import RngState
from resumekit.data.iterable import BatchDigest, ReplaySource
from resumekit.data.position import open_source
from resumekit.data.workers import FetchRecorder, read_states, write_states
from resumekit.errors import DataPositionError, InexactError
from resumekit.log import show_messages
from resumekit.state import Fidelity

EPOCHS = 3
NUM_SAMPLES = 22
BATCH_SIZE = 4  # the last batch of an epoch is a partial one


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


@pytest.fixture(autouse=True)
def _messages_on_standard_error() -> None:
    """As after the first run of a process."""
    show_messages()


def keep(samples: list[Any]) -> list[Any]:
    """Collates nothing: plain values are quicker to send than tensors."""
    return samples


class Stream(IterableDataset[Any]):
    """Plain numbers; no worker reads what another one does."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, NUM_SAMPLES, step)


class Noisy(Stream):
    """Draws for each sample from all three global generators, and once more at the end."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample, random.random(), float(np.random.rand()), torch.rand(()).item()
        torch.rand(())


class Buffered(Stream):
    """Shuffles through a buffer by torch's global generator, from which the training step draws."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 6:
                yield buffer.pop(int(torch.randint(6, ())))
        random.shuffle(buffer)
        yield from buffer


class OwnGenerator(Stream):
    """Shuffles by a generator that lies deep in it and continues from epoch to epoch."""

    def __init__(self) -> None:
        self.order = {"by": [np.random.default_rng(5)]}

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        yield from (samples[i] for i in self.order["by"][0].permutation(len(samples)))


class ByEpoch(Stream):
    """Shuffles by a seed of its own and the epoch's number; its length is far from the truth."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Any]:
        samples = list(super().__iter__())
        random.Random(f"7{self.epoch}").shuffle(samples)
        yield from ((sample, torch.rand(()).item()) for sample in samples)


class Uneven(Stream):
    """All samples belong to the first worker; the other one draws as it begins, and gives none."""

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())
        info = get_worker_info()
        num_samples = NUM_SAMPLES if info is None or info.id == 0 else 0
        return ((sample, random.random()) for sample in range(num_samples))


DATASETS: dict[str, Callable[[], IterableDataset[Any]]] = {
    "plain": Stream,
    "drawing": Noisy,
    "shuffled by the global generator": Buffered,
    "shuffled by its own generator": OwnGenerator,
    "shuffled by its epoch": ByEpoch,
    "unevenly sharded": Uneven,
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "fresh workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def make_loader(kind: str, workers: str = "no workers", **others: Any) -> DataLoader[Any]:
    options = {"batch_size": BATCH_SIZE, "collate_fn": keep, **WORKERS[workers], **others}
    return DataLoader(DATASETS[kind](), **options)


class FetchesAhead:
    """The shape of a framework's loader: it holds another and is one batch ahead of the loop."""

    def __init__(self, inner: Any) -> None:
        self.base_dataloader = inner
        self.epochs_set: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def set_epoch(self, epoch: int) -> None:
        self.epochs_set.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())
        waiting: deque[Any] = deque()
        for batch in self.base_dataloader:
            waiting.append(batch)
            if len(waiting) > 1:
                yield waiting.popleft()
        yield from waiting


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Loop:
    """A loop over one loader that can be left at any safe point and taken up by another."""

    def __init__(self, loader: Any, saved: dict[str, Any] | None = None) -> None:
        self.source = open_source(loader, "train")
        self.rng = RngState()
        self.saved = saved
        if saved is not None:
            self.source.load_state_dict(copy.deepcopy(saved["data"]))

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"data": self.source.state_dict(), "rng": self.rng.state_dict()})

    def run(self, stops: list[dict[str, Any]] | None = None) -> list[Any]:
        seen: list[Any] = []
        while (epoch := position_of(self.source)[0]) < EPOCHS:
            if stops is not None and position_of(self.source)[1] == 0:
                stops.append(self.state())
            self.begin(epoch)
            while True:
                if stops is not None and position_of(self.source)[1] > 0:
                    stops.append(self.state())
                try:
                    batch = self.source.next_batch()
                except StopIteration:
                    break
                # What a training step draws, and what it saw.
                seen.append((batch, random.random(), float(np.random.rand()), torch.rand(3)[0]))
            self.source.end_epoch()
        return seen

    def begin(self, epoch: int) -> None:
        saved, self.saved = self.saved, None
        if saved is None:
            self.source.begin(epoch)
        elif position_of(self.source)[1] == 0:
            self.rng.load_state_dict(saved["rng"])
            self.source.restore_generators()
            self.source.begin(epoch)
        else:
            self.source.begin(epoch)
            self.source.restore_generators()
            self.rng.load_state_dict(saved["rng"])


def uninterrupted(make: Callable[[], Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    seed_everything(1)
    stops: list[dict[str, Any]] = []
    return Loop(make()).run(stops), stops


def continued(make: Callable[[], Any], saved: dict[str, Any]) -> list[Any]:
    seed_everything(1234)
    return Loop(make(), saved).run()


def stock(loader: Any) -> list[Any]:
    """What a loop without resumekit sees and draws."""
    seed_everything(1)
    seen = []
    for epoch in range(EPOCHS):
        if hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(epoch)
        for batch in loader:
            seen.append((batch, random.random(), float(np.random.rand()), torch.rand(3)[0]))
    return seen


def used(stops: list[dict[str, Any]]) -> list[int]:
    """How many batches were used before each stop: at an epoch's end there are two."""
    numbers, ended = [], 0
    for stop in range(len(stops)):
        numbers.append(stop - ended)
        ended += stop + 1 < len(stops) and stops[stop + 1]["data"]["batch"] == 0
    return numbers


@pytest.mark.parametrize("kind", DATASETS)
def test_without_workers_every_safe_point_continues_bit_for_bit(kind: str) -> None:
    expected, stops = uninterrupted(lambda: make_loader(kind))
    assert open_source(make_loader(kind), "train").fidelity[0] is Fidelity.EXACT
    for stop, number in enumerate(used(stops)):
        assert continued(lambda: make_loader(kind), stops[stop]) == expected[number:], stop


@pytest.mark.parametrize(
    "kind", ["drawing", "shuffled by its own generator", "shuffled by its epoch"]
)
def test_fresh_workers_draw_again_from_their_seed(kind: str) -> None:
    def make() -> DataLoader[Any]:
        return make_loader(kind, "fresh workers")

    expected, stops = uninterrupted(make)
    assert open_source(make(), "train").fidelity[0] is Fidelity.EXACT
    numbers = used(stops)
    epoch = len(stops) // EPOCHS
    for stop in (2, epoch - 1, epoch + 1):
        assert continued(make, stops[stop]) == expected[numbers[stop] :], stop


@pytest.mark.parametrize("kind", ["drawing", "shuffled by its epoch", "unevenly sharded"])
def test_persistent_workers_begin_with_the_state_of_the_epoch(kind: str) -> None:
    def make() -> DataLoader[Any]:
        return make_loader(kind, "persistent workers")

    expected, stops = uninterrupted(make)
    assert open_source(make(), "train").fidelity[0] is Fidelity.EXACT
    numbers = used(stops)
    epoch = len(stops) // EPOCHS
    for stop in (2, epoch, epoch + 1):
        assert continued(make, stops[stop]) == expected[numbers[stop] :], stop


def test_persistent_workers_that_draw_in_their_last_collation_continue_from_there() -> None:
    def make() -> DataLoader[Any]:
        return make_loader("drawing", "persistent workers", collate_fn=noisy_collate)

    expected, stops = uninterrupted(make)
    epoch = len(stops) // EPOCHS
    assert continued(make, stops[epoch + 2]) == expected[used(stops)[epoch + 2] :]


def noisy_collate(samples: list[Any]) -> list[Any]:
    return [*samples, random.random()]


def test_persistent_workers_whose_dataset_draws_from_a_generator_of_its_own_are_reported() -> None:
    fidelity, reason = open_source(
        make_loader("shuffled by its own generator", "persistent workers"), "train"
    ).fidelity
    assert fidelity is Fidelity.LOST
    assert "dataset.order.by.0 keeps its state" in reason
    assert "persistent_workers=False" in reason


def test_an_epoch_that_persistent_workers_were_left_in_is_reported_until_the_next_one_begins() -> (
    None
):
    source = open_source(make_loader("plain", "persistent workers"), "train")
    source.begin(0)
    source.next_batch()
    source.end_epoch()
    assert source.fidelity[0] is Fidelity.LOST
    assert "left early" in source.fidelity[1]
    assert source.state_dict()["workers"] is None
    source.begin(1)
    assert source.fidelity[0] is Fidelity.EXACT


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", ["shuffled by its epoch"])
def test_the_loop_draws_what_a_stock_loop_draws(kind: str, workers: str) -> None:
    watched, _ = uninterrupted(lambda: make_loader(kind, workers))
    assert watched == stock(make_loader(kind, workers))


@pytest.mark.parametrize("workers", ["no workers", "fresh workers"])
def test_a_resume_from_a_resume_continues_too(workers: str) -> None:
    def make() -> DataLoader[Any]:
        return make_loader("shuffled by the global generator", workers)

    expected, stops = uninterrupted(make)
    seed_everything(77)
    again: list[dict[str, Any]] = []
    Loop(make(), stops[8]).run(again)
    assert str(again[1]) == str(stops[9])
    assert continued(make, again[1]) == expected[used(stops)[9] :]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loader_around_a_stream_that_fetches_ahead_continues_exactly(workers: str) -> None:
    def make() -> FetchesAhead:
        return FetchesAhead(make_loader("drawing", workers))

    expected, stops = uninterrupted(make)
    assert open_source(make(), "train").fidelity[0] is Fidelity.EXACT
    numbers = used(stops)
    for stop in (1, 5, 9) if workers == "no workers" else (9,):
        assert continued(make, stops[stop]) == expected[numbers[stop] :], stop


def test_a_loader_around_a_stream_is_reported_its_epoch_and_stays_as_it_is() -> None:
    loader = FetchesAhead(make_loader("plain"))
    inner = loader.base_dataloader
    Loop(loader).run()
    assert loader.epochs_set == list(range(EPOCHS))
    assert loader.base_dataloader is inner


def test_the_users_loader_and_dataset_stay_as_they_are() -> None:
    loader = make_loader("plain", "persistent workers")
    dataset, collate = loader.dataset, loader.collate_fn
    Loop(loader).run()
    assert (loader.dataset, loader.collate_fn, loader._iterator) == (dataset, collate, None)


def test_in_workers_the_dataset_is_what_the_user_made_of_it() -> None:
    def shard(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset
        assert isinstance(dataset, Sharded)
        assert not hasattr(dataset, "missing")
        dataset.mine = 10 * worker

    loader = DataLoader(Sharded(), None, worker_init_fn=shard, **WORKERS["persistent workers"])
    source = open_source(loader, "train")
    source.begin(0)
    assert [source.next_batch() for _ in range(4)] == [0, 10, 1, 11]


class Sharded(IterableDataset[int]):
    mine = 0

    def __iter__(self) -> Iterator[int]:
        yield from range(self.mine, self.mine + 2)


@pytest.mark.parametrize("left_out", ["start", "fetches", "generators", "rng", "place"])
def test_a_state_with_one_part_left_out_does_not_continue(
    left_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> DataLoader[Any]:
        return make_loader("shuffled by the global generator", generator=torch.Generator())

    expected, stops = uninterrupted(make)
    saved, other = stops[9], stops[2]
    if left_out == "rng":
        saved["rng"] = other["rng"]
    elif left_out == "place":
        saved["data"]["batch"] -= 1
    elif left_out == "fetches":
        saved["data"]["fetches"] = None
    else:
        saved["data"][left_out] = other["data"][left_out]
    rest = continued(make, saved)
    if left_out == "generators":  # the loader's own: nothing but workers' seeds comes from it
        assert rest == expected[used(stops)[9] :]
        return
    assert rest != expected[used(stops)[9] :]
    assert ("batches differ from the used ones" in caplog.text) == (left_out != "rng")


@pytest.mark.parametrize("left_out", ["start", "workers"])
def test_a_state_without_the_workers_random_numbers_does_not_continue(left_out: str) -> None:
    workers = "fresh workers" if left_out == "start" else "persistent workers"

    def make() -> DataLoader[Any]:
        return make_loader("drawing", workers)

    expected, stops = uninterrupted(make)
    stop = len(stops) // EPOCHS + 2
    saved, other = stops[stop], stops[2]
    saved["data"][left_out] = other["data"][left_out]
    assert continued(make, saved) != expected[used(stops)[stop] :]


def test_a_dataset_shaped_by_something_else_is_found_out_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> DataLoader[int]:
        Growing.num_epochs = 0  # as in a new process
        return DataLoader(Growing())

    _, stops = uninterrupted(make)
    in_first, in_second = stops[2], stops[11]
    assert in_second["data"]["epoch"] == 1
    source = open_source(make(), "train")
    source.load_state_dict(in_first["data"])
    source.begin(0)
    assert source.fidelity[0] is Fidelity.EXACT
    source = open_source(make(), "train")
    source.load_state_dict(in_second["data"])
    caplog.clear()
    source.begin(1)
    assert "batches differ from the used ones" in caplog.text
    assert source.fidelity[0] is Fidelity.LOST


def draw(name: str, times: int) -> list[float]:
    numbers: dict[str, Any] = {
        "python": random.gauss,
        "numpy": np.random.normal,
        "torch": torch.normal,
    }
    size = ((1,),) if name == "torch" else ()
    return [float(numbers[name](0.0, 1.0, *size)) for _ in range(times)]


DRAWS = st.lists(
    st.tuples(st.sampled_from(["python", "numpy", "torch"]), st.integers(1, 3)), max_size=3
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(DRAWS, DRAWS), max_size=6))
def test_a_tape_of_fetches_plays_any_of_them_again(
    steps: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]],
) -> None:
    seed_everything(3)
    tape, start = FetchRecorder(), read_states()
    tape.begin()
    fetched = []
    for number, (by_training, by_loader) in enumerate(steps):
        for name, times in by_training:
            draw(name, times)
        tape.before(number)
        fetched.append([draw(name, times) for name, times in by_loader])
        tape.after(number)
    write_states(start)
    playback = FetchRecorder()
    playback.begin(tape.state_dict())
    again = []
    for number, (_, by_loader) in enumerate(steps):
        playback.before(number)
        again.append([draw(name, times) for name, times in by_loader])
    assert again == fetched


def digest_of(*batches: Any) -> str:
    contents = BatchDigest()
    for batch in batches:
        contents.add(batch)
    return contents.hexdigest()


def test_the_digest_of_batches_distinguishes_any_two() -> None:
    ones, large = torch.ones(2, 3), torch.zeros(300, 300)
    changed = large.clone()
    changed[-1, -1] = 1
    different = [
        (ones, ones * 2),
        (ones, ones.reshape(3, 2)),
        (ones, ones.double()),
        (ones, ones.numpy()),
        (large, changed),
        (torch.ones(()), torch.zeros(())),
        (torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)),
        (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [2, 1]),
        ([1, 2], (1, 2)),
        ("a", b"a"),
        (1, True),
        ([[1], 2], [[1, 2]]),
    ]
    for one, other in different:
        assert digest_of(one) != digest_of(other), (one, other)
        assert digest_of(one) == digest_of(copy.deepcopy(one)), one
    assert digest_of(1, 2) != digest_of(2, 1)
    assert digest_of(torch.ones(4, 4).t()[::2]) == digest_of(torch.ones(2, 4))


class Growing(IterableDataset[int]):
    """Each epoch leaves something in the class that a new process does not know of."""

    num_epochs = 0

    def __iter__(self) -> Iterator[int]:
        Growing.num_epochs += 1
        yield from range(Growing.num_epochs, 9)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("strict", [False, True])
def test_from_then_on_checkpoints_say_that_the_position_is_lost_and_strict_ends_the_run(
    tmp_path: Path, strict: bool
) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(last: int) -> None:
        Growing.num_epochs = 0  # as in a new process
        with Checkpointer(
            tmp_path, model=model, optimizer=optimizer, save_every=3, strict=strict
        ) as checkpointer:
            for _ in checkpointer.batches(DataLoader(Growing()), epochs=2):
                if checkpointer.progress.step == last:
                    raise KilledError
                checkpointer.step()

    with pytest.raises(KilledError):
        train(11)
    if strict:
        with pytest.raises(InexactError, match="batches differ from the used ones"):
            train(99)
        return
    train(99)
    text = (max(tmp_path.glob("step-*")) / "manifest.json").read_text(encoding="utf-8")
    manifest, _ = json.JSONDecoder().raw_decode(text)
    assert manifest["capture"]["data"]["fidelity"] == "lost"


def test_states_are_kept_only_for_generators_that_the_training_draws_from_as_well() -> None:
    def make() -> DataLoader[Any]:
        return make_loader("shuffled by the global generator")

    seed_everything(1)
    source = open_source(make(), "train")
    source.begin(0)
    for _ in range(3):
        source.next_batch()
        random.random()
    assert source.state_dict()["fetches"] == {}
    torch.rand(())
    source.next_batch()
    kept = source.state_dict()["fetches"]
    assert {name: each["batches"].tolist() for name, each in kept.items()} == {"torch": [3]}


def test_an_epoch_too_long_to_keep_all_states_of_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resumekit.data.workers.MAX_BYTES", 20_000)
    source = open_source(make_loader("drawing"), "train")
    source.begin(0)
    for _ in range(3):
        torch.rand(())
        source.next_batch()
    assert source.fidelity[0] is Fidelity.EXACT
    for _ in range(2):
        torch.rand(())
        source.next_batch()
    assert source.fidelity[0] is Fidelity.EQUIVALENT
    assert "self.rng = random.Random(seed)" in source.fidelity[1]
    assert source.state_dict()["contents"] is None


def test_another_number_of_workers_is_refused_in_the_middle_of_an_epoch() -> None:
    _, stops = uninterrupted(lambda: make_loader("plain"))
    source = open_source(make_loader("plain", "fresh workers"), "train")
    with pytest.raises(DataPositionError, match=r"num_workers 2.*expected.*num_workers 0"):
        source.load_state_dict(stops[1]["data"])


def test_an_epoch_that_became_shorter_than_what_was_used_is_an_error() -> None:
    _, stops = uninterrupted(lambda: make_loader("plain"))
    saved = stops[2]["data"]
    saved["batch"] = 50
    source = open_source(make_loader("plain"), "train")
    source.load_state_dict(saved)
    with pytest.raises(DataPositionError, match=r"an epoch of 6 batches.*at least the 50"):
        source.begin(0)


def test_delivery_out_of_order_cannot_be_repeated() -> None:
    source = open_source(make_loader("plain", "fresh workers", in_order=False), "train")
    assert source.fidelity[0] is Fidelity.LOST


def test_any_other_iterable_is_replayed_and_promises_less() -> None:
    class Numbers:
        def __iter__(self) -> Iterator[Any]:
            for index in range(6):
                yield index, torch.rand(()).item()

    expected, stops = uninterrupted(Numbers)
    for stop, number in enumerate(used(stops)):
        assert continued(Numbers, stops[stop]) == expected[number:]
    source = open_source(Numbers(), "train")
    assert isinstance(source, ReplaySource)
    assert source.fidelity[0] is Fidelity.EQUIVALENT
    assert "IterableDataset" in source.fidelity[1]


class Slow:
    """Takes 5 seconds of the clock for each batch, once it is replayed."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.seconds = 0.0

    def __iter__(self) -> Iterator[int]:
        for index in range(40):
            self.clock.now += self.seconds
            yield index


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_the_progress_of_a_long_replay(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("resumekit.progress_display.time", clock)
    monkeypatch.setattr("resumekit.data.iterable._rank", lambda: rank)
    loader = Slow(clock)
    source = open_source(loader, "train")
    source.begin(0)
    for _ in range(40):
        source.next_batch()
    saved = copy.deepcopy(source.state_dict())
    saved["epoch"], saved["batch"] = 0, 40
    loader.seconds = 5.0
    again = open_source(loader, "train")
    again.load_state_dict(saved)
    again.begin(0)
    what = "resumekit: replaying the used batches of 'train'"
    lines = [
        f"{what}: 2 of 40 batches, about 3 min left",
        f"{what}: 20 of 40 batches, about 2 min left",
        f"{what}: 40 batches in 3 min",
    ]
    assert capfd.readouterr().err.splitlines() == (lines if rank == 0 else [])


@pytest.mark.parametrize("kind", [range, list, tuple, np.ndarray, torch.Tensor])
def test_a_sequence_is_exact_and_another_one_is_found_out(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(first: int) -> Any:
        if kind is range:
            return range(first, first + 6)
        if kind in (np.ndarray, torch.Tensor):
            numbers = torch.arange(first, first + 6)
            return numbers if kind is torch.Tensor else numbers.numpy()
        return kind(range(first, first + 6))

    source = open_source(make(0), "train")
    source.begin(0)
    for _ in range(4):
        source.next_batch()
    saved = copy.deepcopy(source.state_dict())
    for first in (0, 1):
        again = open_source(make(first), "train")
        again.load_state_dict(saved)
        again.begin(0)
        assert again.fidelity[0] is (Fidelity.LOST if first else Fidelity.EXACT)
        assert ("batches differ from the used ones" in caplog.text) == bool(first)
        assert int(again.next_batch()) == first + 4
