"""The count of `enumerate` around the loops of a run continues: each form, crashed and resumed."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import InexactError, NoUsableCheckpointError
from resumekit.run.components import RunComponents

tqdm = pytest.importorskip("tqdm").tqdm
Train = Callable[..., Any]
NUM_BATCHES, EPOCHS = 4, 3


class CrashError(Exception):
    """Ends a launch inside a step."""


class Records:
    """What the trainings of a test did; nothing of a loop refers to it."""

    steps: dict[int, tuple[Any, ...]]  # counts, loss and weights, by step
    crash_at: int
    alive: list[Any]


class Trained:
    """A model, its loader and its run; a step scales its loss by the counts of the loop."""

    def __init__(self, directory: Path, *, batch_size: int = 2, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.rand(8, 3), torch.rand(8, 2))
        self.loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        self.optimizer = optimizer
        settings = {"save_every": 3, "strict": True, **options}
        self.ckpt = Checkpointer(directory, model=self.model, optimizer=optimizer, **settings)

    def batches(self, **options: Any) -> Any:
        return self.ckpt.batches(self.loader, **options)

    def step(self, batch: Any, *counts: int) -> None:
        inputs, labels = batch
        scale = 1.0
        for number, count in enumerate(counts, 1):
            scale += number * count / 7
        loss = nn.functional.mse_loss(self.model(inputs), labels) * scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ckpt.step()
        weights = [each.tolist() for each in self.model.parameters()]
        step = self.ckpt.progress.step
        Records.steps[step] = (counts, loss.item(), weights)
        if step == Records.crash_at:
            raise CrashError


def launched(train: Train, directory: Path, crash_at: int = -1, **options: Any) -> None:
    Records.crash_at = crash_at
    parts = Trained(directory, **options)
    with contextlib.suppress(CrashError), parts.ckpt:
        train(parts)


def steps_of(train: Train, directory: Path, *crashes: int, **options: Any) -> dict[int, Any]:
    """The steps of the logical run."""
    Records.steps = {}
    for crash in (*crashes, -1):
        launched(train, directory, crash, **options)
    return Records.steps


@pytest.fixture(autouse=True)
def _messages(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "resumekit"):
        yield


# ---------------------------------------------------------------- the forms


def in_each_epoch(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        for number, batch in enumerate(parts.batches()):
            parts.step(batch, number)


def over_all_epochs(parts: Trained) -> None:
    for number, batch in enumerate(parts.batches(epochs=EPOCHS)):
        parts.step(batch, number)


def at_the_position(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        batches = parts.batches()
        for number, batch in enumerate(batches, start=batches.initial):
            parts.step(batch, number)


def from_one(parts: Trained) -> None:
    for number, batch in enumerate(parts.batches(epochs=EPOCHS), 1):
        parts.step(batch, number)


def around_a_bar(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        for number, batch in enumerate(tqdm(parts.batches(), disable=True)):
            parts.step(batch, number)


def in_a_bar(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        for number, batch in tqdm(enumerate(parts.batches()), file=sys.stdout):
            parts.step(batch, number)


def in_a_bar_with_a_name(parts: Trained) -> None:
    bar = tqdm(enumerate(parts.batches(epochs=EPOCHS)), disable=True)
    for number, batch in bar:
        parts.step(batch, number)
        bar.set_postfix(number=number)


def at_the_initial_value_of_a_bar(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        bar = tqdm(parts.batches(), disable=True)
        bar.initial = 0  # tqdm's own one, where the bar is shown
        for number, batch in enumerate(bar, start=bar.initial):
            parts.step(batch, number)


def in_a_variable(parts: Trained) -> None:
    pairs = enumerate(parts.batches(epochs=EPOCHS))
    for number, batch in pairs:
        parts.step(batch, number)


def asked_by_next(parts: Trained) -> None:
    pairs = enumerate(parts.batches(epochs=EPOCHS))
    while True:
        try:
            number, batch = next(pairs)
        except StopIteration:
            break
        parts.step(batch, number)


def of_epochs(parts: Trained) -> None:
    for number, _ in enumerate(parts.ckpt.epochs(EPOCHS), 1):
        for batch in parts.batches():
            parts.step(batch, number)


def of_epochs_and_of_batches(parts: Trained) -> None:
    for epoch, _ in tqdm(enumerate(parts.ckpt.epochs(EPOCHS)), disable=True):
        for number, batch in enumerate(parts.batches(), 1):
            parts.step(batch, epoch, number)


def of_a_bar_over_the_epochs(parts: Trained) -> None:
    for epoch, _ in enumerate(tqdm(parts.ckpt.epochs(EPOCHS), disable=True)):
        for number, batch in enumerate(parts.batches()):
            parts.step(batch, epoch, number)


def in_two_loops(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        for number, batch in enumerate(parts.batches(name="first")):
            parts.step(batch, number)
        for number, batch in enumerate(parts.batches(name="second"), 5):
            parts.step(batch, number)


def from_a_count_of_the_script(parts: Trained) -> None:
    total = 3
    for _ in parts.ckpt.epochs(EPOCHS):
        for number, batch in enumerate(parts.batches(), total):
            parts.step(batch, number)
        total += 10


def numbered(batches: Any) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        yield batch, number


def inside_a_generator(parts: Trained) -> None:
    for batch, number in numbered(parts.batches(epochs=EPOCHS)):
        parts.step(batch, number)


def through_the_epochs(parts: Trained) -> None:
    def cycle() -> Iterator[Any]:
        for _ in parts.ckpt.epochs(EPOCHS):
            yield from numbered(parts.batches())

    for number, (batch, inner) in enumerate(cycle()):
        parts.step(batch, number, inner)


def doubled(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield batch
        yield batch


def of_a_generator_that_repeats(parts: Trained) -> None:
    for number, batch in enumerate(doubled(parts.batches(epochs=EPOCHS))):
        if number % 2 == 0:
            parts.step(batch, number)


class Trainer:
    """A trainer of the user's."""

    def __init__(self, parts: Trained) -> None:
        self.parts = parts

    def train_epoch(self) -> None:
        step = self.parts.step

        def run() -> None:
            for number, batch in enumerate(self.parts.batches()):
                step(batch, number)

        run()

    def train(self) -> None:
        for _ in self.parts.ckpt.epochs(EPOCHS):
            self.train_epoch()


def in_a_method(parts: Trained) -> None:
    Trainer(parts).train()


# The first ones are in a plain run.
FORMS = (
    *(in_each_epoch, around_a_bar, in_a_bar_with_a_name, at_the_initial_value_of_a_bar),
    *(asked_by_next, of_epochs_and_of_batches, in_two_loops, from_a_count_of_the_script),
    *(of_a_generator_that_repeats, in_a_method),
)
MORE_FORMS = (
    *(over_all_epochs, from_one, in_a_bar, in_a_variable, of_epochs, of_a_bar_over_the_epochs),
    *(inside_a_generator, through_the_epochs),
)


def forms(*others: Train) -> pytest.MarkDecorator:
    """The parametrization of a test by all forms, and others."""
    more = [pytest.param(each, marks=pytest.mark.full) for each in MORE_FORMS]
    return pytest.mark.parametrize(
        "train", [*FORMS, *others, *more], ids=lambda each: each.__name__
    )


@forms(at_the_position)
def test_the_count_continues(
    tmp_path: Path, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    whole = steps_of(train, tmp_path / "whole", save_every=None)
    assert steps_of(train, tmp_path / "thirds", 5, 8, 11) == whole
    assert steps_of(train, tmp_path / "each", 3, 7, save_every=1) == whole
    assert steps_of(train, tmp_path / "epochs", 5, 9, save_every=4) == whole
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@forms()
def test_without_it_the_training_differs(tmp_path: Path, train: Train) -> None:
    whole = steps_of(train, tmp_path / "whole", save_every=None)
    found = steps_of(train, tmp_path / "run", 5, 8, loop_variables="off", save_every=1)
    assert found != whole


def test_a_count_at_the_position_moves_with_another_batch_size(tmp_path: Path) -> None:
    """Half of an epoch is used, whatever the size of the batches is."""
    for train in (in_each_epoch, at_the_position, over_all_epochs):
        directory = tmp_path / train.__name__
        Records.steps = {}
        launched(train, directory, 7, save_every=2)  # in the second epoch, resumes at its half
        launched(train, directory, batch_size=1, allow_changes={"batch_size"})
        position = 8 + 4 if train is over_all_epochs else 4
        assert Records.steps[7][0] == (position,)


def test_a_loop_that_was_left_continues_at_the_position(tmp_path: Path) -> None:
    """A save after `break` finds no `enumerate` any more."""

    def left(parts: Trained) -> None:
        with parts.ckpt:  # a save that is due is made at its end
            batches = parts.batches(epochs=EPOCHS)
            for number, batch in enumerate(batches, start=batches.initial):
                parts.step(batch, number)
                if parts.ckpt.progress.step == 5 and Records.crash_at:
                    parts.ckpt.save()
                    break

    Records.steps = {}
    launched(left, tmp_path / "run")
    assert len(Records.steps) == 5
    launched(left, tmp_path / "run", crash_at=0)
    assert [counts for counts, *_ in Records.steps.values()] == [(n,) for n in range(12)]


# ---------------------------------------------------------------- what is reported


def frozen(parts: Trained) -> None:
    pairs = enumerate(parts.batches(epochs=EPOCHS))
    gc.freeze()
    try:
        for number, batch in pairs:
            parts.step(batch, number)
    finally:
        gc.unfreeze()


def zipped(parts: Trained) -> None:
    batches = parts.batches(epochs=EPOCHS)
    for number, (batch, _) in tqdm(enumerate(zip(batches, range(99), strict=False)), disable=True):
        parts.step(batch, number)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (frozen, "the count of enumerate .*write enumerate.batches, start=batches.initial"),
        (zipped, "the count of zip .*write enumerate.batches.: its count continues"),
    ],
)
def test_a_count_that_is_lost_is_refused(tmp_path: Path, train: Train, message: str) -> None:
    with pytest.raises(InexactError, match=message):
        steps_of(train, tmp_path)


def test_a_count_that_is_not_saved_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps_of(in_each_epoch, tmp_path, loop_variables="report", strict=False)
    assert "the count of enumerate starts again after a resume" in caplog.text


class Doctored:
    """Changes the saved counts when a checkpoint is loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **counts: Any) -> None:
        original = RunComponents.__init__

        def doctoring(components: RunComponents, *given: Any, **named: Any) -> None:
            original(components, *given, **named)
            variables = components.variables
            check, load = variables.check_state_dict, variables.load_state_dict

            def changed(state: Any) -> Any:
                script = {key: each for key, each in state["script"].items() if "counts" not in key}
                return {**state, "script": {**script, **counts}}

            content = variables.check_content
            monkeypatch.setattr(
                variables, "check_content", lambda key, state: content(key, changed(state))
            )
            monkeypatch.setattr(variables, "check_state_dict", lambda state: check(changed(state)))
            monkeypatch.setattr(variables, "load_state_dict", lambda state: load(changed(state)))

        monkeypatch.setattr(RunComponents, "__init__", doctoring)


@pytest.mark.parametrize("count", [-1, True, "2", 1.5, None])
@pytest.mark.parametrize("name", ["counts", "epoch_counts"])
def test_a_damaged_count_is_refused(
    tmp_path: Path, name: str, count: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Records.steps = {}
    launched(of_epochs_and_of_batches, tmp_path, 5)
    Doctored(monkeypatch, **{name: {"counts": [count], "used": 3}})
    with pytest.raises(NoUsableCheckpointError, match=rf"variables: script\.{name}\.counts"):
        launched(of_epochs_and_of_batches, tmp_path)


def test_a_checkpoint_without_counts_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was written by a former version; a count that begins at the position is right."""
    for train in (at_the_position, in_each_epoch):
        Records.steps = {}
        launched(train, tmp_path / train.__name__, 6)  # resumes at step 3
    Doctored(monkeypatch)
    launched(at_the_position, tmp_path / "at_the_position")
    assert "the count of enumerate" not in caplog.text
    with pytest.raises(InexactError, match="the count of enumerate starts again"):
        launched(in_each_epoch, tmp_path / "in_each_epoch")
    launched(in_each_epoch, tmp_path / "in_each_epoch", strict=False)
    assert "the count of enumerate starts again" in caplog.text
    assert Records.steps[4][0] == (0,)


# ---------------------------------------------------------------- memory and time


def test_a_loop_that_was_left_frees_its_batches_at_once(tmp_path: Path) -> None:
    Records.alive = []

    def left(parts: Trained) -> None:
        for _ in parts.ckpt.epochs(EPOCHS):
            part_of_an_epoch(parts)
            assert [each() for each in Records.alive] == [None] * len(Records.alive)

    def part_of_an_epoch(parts: Trained) -> None:
        batches = parts.batches()
        Records.alive.append(weakref.ref(batches))
        for number, batch in enumerate(tqdm(batches, disable=True)):
            Records.alive.append(weakref.ref(batch[0]))
            parts.step(batch, number)
            if number == 2:
                break

    gc.disable()
    try:
        Records.steps = {}
        launched(left, tmp_path, save_every=1, strict=False)  # weak references are in no checkpoint
    finally:
        gc.enable()
    assert len(Records.steps) == 9


@pytest.mark.parametrize(
    ("save_every", "num_searches"), [(None, 1), (6, 3)], ids=["no save", "two saves"]
)
def test_only_a_first_fetch_and_a_save_look_at_all_objects(
    tmp_path: Path, save_every: int | None, num_searches: int
) -> None:
    found: list[str] = []

    def count(_frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and argument is gc.get_objects:
            found.append(event)

    Records.steps = {}
    sys.setprofile(count)
    try:
        launched(over_all_epochs, tmp_path, save_every=save_every)
    finally:
        sys.setprofile(None)
    assert (len(Records.steps), len(found)) == (12, num_searches + (save_every is None))


def in_a_shown_bar_of_each_epoch(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(EPOCHS):
        for batch in tqdm(parts.batches(), mininterval=0, miniters=1, file=sys.stdout):
            parts.step(batch)


def in_a_shown_bar_of_all_epochs(parts: Trained) -> None:
    batches = parts.batches(epochs=EPOCHS)
    for batch in tqdm(batches, mininterval=0, miniters=1, file=sys.stdout):
        parts.step(batch)


@pytest.mark.parametrize(
    ("train", "total"),
    [
        (in_a_shown_bar_of_each_epoch, NUM_BATCHES),
        (in_a_shown_bar_of_all_epochs, NUM_BATCHES * EPOCHS),
    ],
)
def test_a_progress_bar_continues_at_its_count(
    train: Train, total: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Records.steps = {}
    launched(train, tmp_path, crash_at=7)
    capfd.readouterr()
    launched(train, tmp_path)
    shown = re.findall(rf"(\d+)/{total} ", capfd.readouterr().out)
    counts = [int(each) for each in shown if each != "0"]
    assert counts[0] == 6 % total
    assert sorted(set(counts[: total - counts[0] + 2])) == [*range(counts[0], total + 1)]
