"""Variables of the user's functions: when they are saved, set, left to the script, or refused."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import InexactError, ResumekitError, StateMismatchError
from resumekit.run.components import RunComponents
from resumekit.storage.store import Store

Train = Callable[..., Any]
NUM_BATCHES = 4


class CrashError(Exception):
    """Ends a launch inside a step."""


class Records:
    """What the trainings of a test did; nothing of a loop refers to it."""

    losses: dict[int, str]
    crash_at: int
    break_at: int


class Trained:
    """A model, its loader and its run; the loss of a step is scaled by what the loop says."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.rand(8, 3), torch.rand(8, 2))
        self.loader = DataLoader(data, batch_size=2, shuffle=True)
        settings = {"save_every": 3, **options}
        self.ckpt = Checkpointer(directory, model=self.model, optimizer=self.optimizer, **settings)

    def step(self, batch: Any, scale: Any = 1.0) -> torch.Tensor:
        inputs, labels = batch
        loss = (nn.functional.mse_loss(self.model(inputs), labels) * scale).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ckpt.step()
        step = self.ckpt.progress.step
        Records.losses[step] = float(loss.item()).hex()
        if step == Records.crash_at:
            raise CrashError
        return loss


@pytest.fixture(autouse=True)
def _messages(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "resumekit"):
        yield


def launched(train: Train, directory: Path, crash_at: int = -1, **options: Any) -> Any:
    """One launch, which may crash; gives what the training returns."""
    Records.crash_at = crash_at
    parts = Trained(directory, **options)
    try:
        with parts.ckpt:
            return train(parts)
    except CrashError:
        return None


def losses_of(train: Train, directory: Path, *crashes: int, **options: Any) -> dict[int, str]:
    """The losses of the logical run, by step."""
    Records.losses = {}
    for crash in (*crashes, -1):
        launched(train, directory, crash, **options)
    return Records.losses


def scaled(parts: Trained) -> float:
    scale, ckpt = 1.0, parts.ckpt
    for batch in ckpt.batches(parts.loader, epochs=3):
        parts.step(batch, scale)
        scale *= 0.9
        ckpt.wait()
    return scale


def with_sums(parts: Trained) -> float:
    total = 1.0
    for _ in parts.ckpt.epochs(3):
        total += one_epoch(parts, total)
    return total


def one_epoch(parts: Trained, scale: float) -> float:
    sum_of_losses = 0.0
    for batch in parts.ckpt.batches(parts.loader):
        sum_of_losses += parts.step(batch, scale + sum_of_losses).item()
    return sum_of_losses


def with_starts(parts: Trained) -> Any:
    total, phase = 0.0, "early"
    last: torch.Tensor | None = None
    for epoch in parts.ckpt.epochs(3):
        sys.stdout.write(f"{epoch} {total} {phase}\n")
        for batch in parts.ckpt.batches(parts.loader):
            last = parts.step(batch)
            latest = last.item()  # not there when the first epoch begins
            total += latest
            phase = "late" if total > 0.5 else phase
        total += latest
    return total, phase, last is not None


def with_shared(parts: Trained) -> Any:
    """What an epoch begins with is one object with what else refers to it."""
    log = SimpleNamespace(losses=[], mean=torch.zeros(2), phase={"is_late": False})
    losses, mean, last_mean, phase = log.losses, log.mean, log.mean[1:], log.phase
    push = losses.append
    weight = torch.ones(1, requires_grad=True)
    log.weights = [weight]
    for _ in parts.ckpt.epochs(3):
        phase["is_late"] = False
        for batch in parts.ckpt.batches(parts.loader):
            scale = 1 + len(losses) + len(log.losses) + float(last_mean + log.mean[1] + mean[1])
            loss = parts.step(batch, scale + log.phase["is_late"] + weight)
            push(loss.item())
            with torch.no_grad():
                assert weight.grad is not None
                log.weights[0] -= 0.1 * weight.grad
            weight.grad = None
            log.mean.lerp_(loss.detach(), 0.1)
        phase["is_late"] = True
    return losses, mean.tolist()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


# ---------------------------------------------------------------- saved and set


@pytest.mark.parametrize("train", [scaled, with_sums])
@pytest.mark.parametrize("crashes", [(5,), (8, 8), (4, 5, 6, 11)])
def test_variables_continue(tmp_path: Path, train: Train, crashes: tuple[int, ...]) -> None:
    whole = losses_of(train, tmp_path / "whole")
    assert losses_of(train, tmp_path / "run", *crashes) == whole


@pytest.mark.parametrize("train", [scaled, with_sums])
def test_without_them_the_training_differs(tmp_path: Path, train: Train) -> None:
    whole = losses_of(train, tmp_path / "whole")
    assert losses_of(train, tmp_path / "run", 5, loop_variables="off") != whole


CRASHES = [(2,), (3, 4), (6,), (6, 8), (7, 8), (9, 10, 11)]


@pytest.mark.parametrize("crashes", CRASHES)
def test_an_epoch_begins_again_with_what_it_began_with(
    tmp_path: Path, crashes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = losses_of(with_starts, tmp_path / "whole")
    begun = capsys.readouterr().out.splitlines()
    assert losses_of(with_starts, tmp_path / "run", *crashes, save_every=1) == whole
    again = capsys.readouterr().out.splitlines()
    assert len(again) > len(begun) == 3
    assert {*again} == {*begun}


@pytest.mark.parametrize("crashes", CRASHES)
def test_what_is_shared_across_epochs_stays_one_object(
    tmp_path: Path, crashes: tuple[int, ...]
) -> None:
    whole = losses_of(with_shared, tmp_path / "whole")
    assert losses_of(with_shared, tmp_path / "run", *crashes, save_every=1) == whole


def slots_of(directory: Path, step: int) -> set[str]:
    state = directory / f"step-{step:08d}" / "state" / "rank-00000.json"
    return {*re.findall(r"with_starts(?:@epoch)?\", ?\"\w+\", ?\"\w+", state.read_text())}


@pytest.mark.parametrize("crash", [3, 5, 6])
def test_a_resumed_run_saves_the_variables_that_the_run_saves(tmp_path: Path, crash: int) -> None:
    """A loss has a graph until a resume, which must not make it one of the epoch's values."""
    options = {"save_every": 1, "keep_latest": None}
    losses_of(with_starts, tmp_path / "whole", **options)
    losses_of(with_starts, tmp_path / "run", crash, **options)
    for step in range(crash, 3 * NUM_BATCHES):
        found = slots_of(tmp_path / "run", step)
        assert len(found) > 2
        assert found == slots_of(tmp_path / "whole", step)


def test_strict_starts_without_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses_of(with_sums, tmp_path / "run", 5, 8, strict=True)
    assert warnings(caplog) == []


@pytest.mark.parametrize("train", [scaled, with_starts])
def test_a_finished_run_gives_its_variables_again(tmp_path: Path, train: Train) -> None:
    Records.losses = {}
    first = launched(train, tmp_path)
    assert launched(train, tmp_path) == first != 1.0


def left_by_break(parts: Trained) -> None:
    scale = 1.0
    with parts.ckpt as ckpt:
        for batch in ckpt.batches(parts.loader, epochs=3):
            parts.step(batch, scale)
            scale *= 0.9
            if ckpt.progress.step == Records.break_at:
                ckpt.save()  # close() makes it
                break


def test_a_loop_that_was_left_by_break_continues_at_its_fetch(tmp_path: Path) -> None:
    Records.break_at = -1
    whole = losses_of(left_by_break, tmp_path / "whole")
    Records.break_at = 4
    Records.losses = {}
    launched(left_by_break, tmp_path / "run")
    Records.break_at = -1
    launched(left_by_break, tmp_path / "run")
    assert Records.losses == whole


def test_variables_of_a_function_that_has_returned_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def returned(parts: Trained) -> None:
        scale = 1.0
        for batch in parts.ckpt.batches(parts.loader, epochs=3):
            parts.step(batch, scale)
            scale *= 0.9
            if parts.ckpt.progress.step == 4:
                parts.ckpt.save()
                return

    losses_of(returned, tmp_path)
    assert "the loop was left before the save" in " ".join(warnings(caplog))


def test_readings_of_a_clock_are_the_new_process_s(tmp_path: Path) -> None:
    def timed(parts: Trained) -> None:
        began = time.perf_counter()
        for batch in parts.ckpt.batches(parts.loader, epochs=2):
            parts.step(batch)
            began = time.perf_counter()
        Clock.last = began

    class Clock:
        last = 0.0

    Records.losses = {}
    launched(timed, tmp_path, 5)
    before = time.perf_counter()
    launched(timed, tmp_path)
    assert Clock.last > before


# ---------------------------------------------------------------- the script's values


class Settings:
    """What a person edits in the script between two launches."""

    clip = 1.0


def edited(parts: Trained) -> None:
    clip = Settings.clip
    for batch in parts.ckpt.batches(parts.loader, epochs=2):
        parts.step(batch, clip)
        Seen.clip = clip


class Seen:
    """What the loop saw last."""

    clip = 0.0


def test_a_constant_that_was_edited_is_the_script_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Records.losses = {}
    launched(edited, tmp_path, 5)
    monkeypatch.setattr(Settings, "clip", 0.5)
    launched(edited, tmp_path)
    assert Seen.clip == 0.5
    lines = [each.message for each in caplog.records if "changed in the script" in each.message]
    assert lines == [
        "changed in the script: test_variables.py:edited.clip; using the script's value"
    ]


def dated(parts: Trained) -> None:
    began, day = datetime.now().replace(microsecond=0), time.strftime("%H:%M:%S")
    seed = time.time_ns() % 1000003
    for batch in parts.ckpt.batches(parts.loader, epochs=2):
        parts.step(batch)
        assert began, (day, seed)


def test_a_date_is_not_called_edited_and_a_seed_from_a_clock_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Records.losses = {}
    launched(dated, tmp_path, 5)
    time.sleep(1)  # the seconds differ
    launched(dated, tmp_path)
    lines = [each.message for each in caplog.records if "changed in the script" in each.message]
    assert lines == [
        "changed in the script: test_variables.py:dated.seed; using the script's value"
    ]


def collecting(parts: Trained) -> None:
    states = []
    for batch in parts.ckpt.batches(parts.loader, epochs=2):
        parts.step(batch, 1.0)
        states.append(parts.model.state_dict())  # no copies: memory of the model
        assert states


def test_what_could_not_be_saved_is_not_called_edited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Records.losses = {}
    launched(collecting, tmp_path, 5)
    launched(collecting, tmp_path)
    lines = [each.getMessage() for each in caplog.records]
    assert any("states" in line and "memory of a model" in line for line in lines)
    assert not any("changed in the script" in line for line in lines)


class Replayed(Dataset[Any]):
    """Samples of a list that training changes, as of a replay buffer."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index % len(self.samples)]
        return sample, sample[:2]


def replaying(parts: Trained) -> None:
    samples = [torch.full((3,), 0.1 * number) for number in range(4)]
    data = Replayed(samples)
    for _ in parts.ckpt.epochs(2):
        for batch in parts.ckpt.batches(DataLoader(data, batch_size=2)):
            parts.step(batch, 1.0)
            samples.append(parts.model(batch[0])[0].detach().sum().expand(3).clone())
            del samples[0]
            assert samples is data.samples


def replaying_a_copy(parts: Trained) -> None:
    """The same with a copy in the dataset, which is to stay one."""
    samples = [torch.full((3,), 0.1 * number) for number in range(4)]
    data = Replayed(list(samples))
    for _ in parts.ckpt.epochs(2):
        for batch in parts.ckpt.batches(DataLoader(data, batch_size=2)):
            parts.step(batch, float(samples[-1].sum()))
            samples.append(parts.model(batch[0])[0].detach().sum().expand(3).clone())
            data.samples[0] = samples.pop(0) + 1
            assert samples is not data.samples


@pytest.mark.parametrize("train", [replaying, replaying_a_copy])
def test_what_a_variable_and_a_dataset_share_is_one_after_a_resume(
    tmp_path: Path, train: Train
) -> None:
    whole = losses_of(train, tmp_path / "whole")
    assert losses_of(train, tmp_path / "run", 2, 5, 9, strict=True) == whole


def drawn_at_the_top(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(5):
        if torch.rand(()) < 0.5:
            for batch in parts.ckpt.batches(parts.loader):
                parts.step(batch, 1.0)
        else:
            for batch in parts.ckpt.batches(parts.loader):
                parts.step(batch, 2.0)


def test_a_number_drawn_at_the_top_of_an_epoch_is_drawn_again(tmp_path: Path) -> None:
    whole = losses_of(drawn_at_the_top, tmp_path / "whole")
    assert losses_of(drawn_at_the_top, tmp_path / "run", 5, 8, 11, 14, 19) == whole


def counted(parts: Trained) -> None:
    step = parts.ckpt.resume().step
    for batch in parts.ckpt.batches(parts.loader, epochs=2):
        parts.step(batch, 1.0 + step)
        step += 1
        assert step == parts.ckpt.progress.step


def counted_from(parts: Trained) -> None:
    parts.ckpt.resume()
    begun = step = parts.ckpt.progress.step
    for batch in parts.ckpt.batches(parts.loader, epochs=2):
        parts.step(batch, 1.0 + step)
        step += 1
        assert begun <= step == parts.ckpt.progress.step


def counted_from_zero(parts: Trained) -> None:
    step = 0
    parts.ckpt.resume()
    for batch in parts.ckpt.batches(parts.loader, epochs=2):
        parts.step(batch, 1.0 + step)
        step += 1  # noqa: SIM113  the count is what is tested


@pytest.mark.parametrize("train", [counted, counted_from, counted_from_zero])
def test_a_counter_that_starts_at_the_resumed_step_is_no_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Train
) -> None:
    whole = losses_of(train, tmp_path / "whole")
    assert losses_of(train, tmp_path / "run", 5, 7, strict=True) == whole
    lines = [each.message for each in caplog.records]
    assert sum(line.startswith("resuming at step") for line in lines) == 2
    assert not any("changed in the script" in line for line in lines)
    assert not warnings(caplog)


def test_without_its_counter_a_resume_differs(tmp_path: Path) -> None:
    whole = losses_of(counted_from_zero, tmp_path / "whole")
    again = losses_of(counted_from_zero, tmp_path / "run", 5, transient={"step"})
    assert again != whole


def test_transient_names_are_left_to_the_script(tmp_path: Path) -> None:
    whole = losses_of(scaled, tmp_path / "whole")
    assert losses_of(scaled, tmp_path / "run", 5, transient={"scale"}) != whole


def test_report_names_what_training_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses_of(scaled, tmp_path, loop_variables="report")
    assert any("test_variables.py:scaled.scale: lost" in each for each in warnings(caplog))


def test_report_is_refused_by_strict(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match="scale"):
        losses_of(scaled, tmp_path, loop_variables="report", strict=True)


# ---------------------------------------------------------------- refused


def test_a_batch_at_another_line_is_refused(tmp_path: Path) -> None:
    is_ahead = False

    def ahead(parts: Trained) -> None:
        scale = 1.0
        batches = parts.ckpt.batches(parts.loader, epochs=3)
        if is_ahead:
            parts.step(next(batches), scale)
        for batch in batches:
            parts.step(batch, scale)
            scale *= 0.9

    Records.losses = {}
    launched(ahead, tmp_path, 5)
    is_ahead = True
    with pytest.raises(StateMismatchError, match="first batch is requested by"):
        launched(ahead, tmp_path)


BAD_SLOTS = {
    "a module": ["logging", 5],
    "a function": ["scaled", 5],
    "the run": ["ckpt", 5],
    "a dunder": ["__builtins__", 5],
    "the class": ["__class__", 5],
    "the file": ["__file__", "elsewhere.py"],
    "a name that is not read": ["other", 5],
    "the builtins": ["__name__", "x"],
}


@pytest.mark.parametrize("bad", BAD_SLOTS.values(), ids=BAD_SLOTS)
def test_a_doctored_state_is_refused(
    tmp_path: Path, bad: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Records.losses = {}
    launched(scaled, tmp_path, 5)
    original = RunComponents.__init__

    def doctoring(self: RunComponents, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        load = self.variables.load_state_dict

        def changed(state: Any) -> Any:
            slot = ["test_variables.py:scaled", "attribute", *bad]
            doctored = {**state, "slots": [*state["slots"], slot]}
            self.variables.check_state_dict(doctored)
            return load(doctored)

        monkeypatch.setattr(self.variables, "load_state_dict", changed)

    monkeypatch.setattr(RunComponents, "__init__", doctoring)
    with pytest.raises(ResumekitError):
        launched(scaled, tmp_path)


class Reserved:
    """An object with an attribute of a name that Python reserves, as pydantic's models have."""

    def __init__(self) -> None:
        self.__fields_set__ = 0


def with_reserved(parts: Trained) -> None:
    reserved = Reserved()
    for batch in parts.ckpt.batches(parts.loader, epochs=3):
        parts.step(batch, 0.9**reserved.__fields_set__)
        reserved.__fields_set__ += 1


def test_an_attribute_of_a_reserved_name_is_restored(tmp_path: Path) -> None:
    expected = losses_of(with_reserved, tmp_path / "whole")
    assert losses_of(with_reserved, tmp_path / "crashed", 5) == expected


def test_a_run_that_no_launch_can_resume_is_reported_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(parts: Trained) -> None:
        for batch in parts.ckpt.batches(parts.loader, epochs=3):
            parts.step(batch)
            parts.model.scale = nn.Parameter(torch.ones(1))

    Records.losses = {}
    launched(train, tmp_path, 5)
    assert "no launch can resume this run; do that before the first batch" in caplog.text
    with pytest.raises(StateMismatchError, match="scale"):
        launched(train, tmp_path)


class Link:
    """An element of a chain."""

    def __init__(self, number: int, before: Link | None) -> None:
        self.number, self.before = number, before


def with_chains(parts: Trained) -> None:
    chain, lists, cycle = Link(0, None), list[Any](), list[Any]()
    cycle.append(cycle)
    for _ in parts.ckpt.epochs(3):
        for batch in parts.ckpt.batches(parts.loader):
            parts.step(batch, 0.9 ** (chain.number + len(lists) + len(cycle)))
            for number in range(200):
                chain, lists = Link(number % 3, chain), [lists]


def test_chains_that_training_makes_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Records.losses = {}
    launched(with_chains, tmp_path, 5)
    for line in ("chain.before: lost", "lists: unknown"):
        assert f"with_chains.{line} (nested too deeply" in caplog.text
    launched(with_chains, tmp_path)
    assert len(Records.losses) == 12


# ---------------------------------------------------------------- memory


def test_no_batch_outlives_its_fetch(tmp_path: Path) -> None:
    alive: list[int] = []

    class Watched:
        last: Any = None

    def watched(parts: Trained) -> None:
        for batch in parts.ckpt.batches(parts.loader, epochs=2):
            if Watched.last is not None:
                alive.append(Watched.last() is not None)
            Watched.last = weakref.ref(batch[0])
            parts.step(batch)
            del batch

    Records.losses = {}
    launched(watched, tmp_path, save_every=1)
    assert len(alive) == 7
    assert not any(alive)


def test_a_checkpoint_says_where_its_variables_belong(tmp_path: Path) -> None:
    Records.losses = {}
    launched(scaled, tmp_path, 5)
    step = Store(tmp_path).directory / "step-00000003"
    tree = json.loads((step / "state" / "rank-00000.json").read_text())
    assert "test_variables.py" in json.dumps(tree)
