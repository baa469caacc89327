"""Code between an epoch's start and its first batch changes the state once, also after a resume.

It had run before a save inside that epoch; a resumed process runs it again.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import IncompleteLoadError, InexactError, StateMismatchError
from resumekit.record.trace import rng_digests
from resumekit.run.resuming import loading
from resumekit.run.resuming.loading import Loading
from resumekit.serialization.digests import state_digest

NUM_BATCHES, NUM_EPOCHS = 8, 4
# What a test records is an attribute of the training: live variables would restore it.
SETTINGS = {
    "save_every": 5,
    "best_metric": "accuracy",
    "mode": "max",
    "loop_variables": "off",
}
AGAIN = "restored again"


class CrashError(Exception):
    """Stands for whatever ends a process."""


class Net(nn.Module):
    """A batch norm, a dropout, and a buffer that counts."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 2)
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.layers(inputs)
        return out * (1 + self.seen / 100)


class Training:
    """One launch of a loop with all slots; ``change`` is called at the start of each epoch."""

    def __init__(
        self,
        directory: Path,
        change: Callable[[Training], None],
        *,
        seed: int = 0,
        crash_in: int | None = None,
        loop: str = "one",
        **options: Any,
    ) -> None:
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(seed)
        self.change, self.crash_in, self.loop = change, crash_in, loop
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.scheduler = schedule
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.extras: dict[str, Any] = {"sum": 0.0, "history": [], "mean": torch.zeros(2)}
        inputs = torch.arange(48.0).reshape(16, 3) / 48
        data = TensorDataset(inputs, torch.arange(16) % 2)
        self.loader = DataLoader(data, batch_size=2, shuffle=True)
        first, second = torch.utils.data.random_split(
            data, [8, 8], generator=torch.Generator().manual_seed(0)
        )
        self.halves = DataLoader(first, batch_size=2, shuffle=True), DataLoader(second, 2)
        self.states: dict[int, dict[str, str]] = {}
        self.checkpointer = Checkpointer(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=schedule,
            grad_scaler=self.scaler,
            ema=self.ema,
            extras=self.extras,
            **{**SETTINGS, **options},
        )

    def train(self) -> Training:
        """The loop; ``crash_in`` raises in that step, like a crash that leaves no time."""
        ckpt = self.checkpointer
        with suppress(CrashError), ckpt:
            if self.loop == "batches":
                batches = ckpt.batches(self.loader, epochs=NUM_EPOCHS)
                self.change(self)
                for batch in batches:
                    self.on_batch(batch)
                return self
            for _ in ckpt.epochs(NUM_EPOCHS):
                if self.loop == "one":
                    self.change(self)
                    for batch in ckpt.batches(self.loader):
                        self.on_batch(batch)
                    continue
                for batch in ckpt.batches(self.halves[0], name="first"):
                    self.on_batch(batch)
                self.change(self)
                for batch in ckpt.batches(self.halves[1], name="second"):
                    self.on_batch(batch)
        return self

    def on_batch(self, batch: Any) -> None:
        if self.checkpointer.progress.step + 1 == self.crash_in:
            raise CrashError
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.ema.update_parameters(self.model)
        self.extras["sum"] += float(loss.detach())
        self.extras["history"].append(float(loss.detach()))
        self.extras["mean"] = self.extras["mean"] + inputs.mean()
        self.checkpointer.step(loss=loss)
        self.states[self.checkpointer.progress.step] = self.state()

    def state(self) -> dict[str, str]:
        """Digests of all that training uses."""
        return {
            "model": state_digest(self.model.state_dict()),
            "optimizer": state_digest(self.optimizer.state_dict()),
            "lr_scheduler": state_digest(self.scheduler.state_dict()),
            "grad_scaler": state_digest(self.scaler.state_dict()),
            "ema": state_digest(self.ema.state_dict()),
            "extras": state_digest({k: v for k, v in self.extras.items() if k != "stubborn"}),
            "best": str(self.checkpointer._run.selection.state_dict()),
            **rng_digests(),
        }


def halve_learning_rate(job: Training) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] *= 0.5


def add_noise(job: Training) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 * random.random())


def scale_data(job: Training) -> None:
    for parameter in job.model.parameters():
        parameter.data.mul_(0.9)


def scale_view(job: Training) -> None:
    weight = job.model.layers[0].weight
    assert isinstance(weight, nn.Parameter)
    view = weight.detach().numpy()
    view *= 0.9


def replace_data(job: Training) -> None:
    weight = job.model.layers[0].weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data * 0.9


def warm_up_norm(job: Training) -> None:
    with torch.no_grad():
        job.model.layers(torch.randn(4, 3))


def clear_buffer(job: Training) -> None:
    job.model.seen.zero_()


def reset_average(job: Training) -> None:
    job.ema.module.load_state_dict(job.model.state_dict())
    job.ema.n_averaged.zero_()


def step_scheduler(job: Training) -> None:
    job.optimizer.zero_grad()
    job.optimizer.step()
    job.scheduler.step()


def forget_moments(job: Training) -> None:
    job.optimizer.state.clear()


def change_scale(job: Training) -> None:
    job.scaler.scale(torch.zeros(1))  # makes its tensors
    job.scaler.update(2.0)


def reset_extras(job: Training) -> None:
    job.extras.update(sum=0, history=[], mean=torch.zeros(2))


def report_metric(job: Training) -> None:
    job.checkpointer.report(accuracy=float(job.model.seen))


CHANGES = {
    "optimizer": [halve_learning_rate, forget_moments],
    "model": [add_noise, scale_data, scale_view, replace_data, warm_up_norm, clear_buffer],
    "ema": [reset_average],
    "lr_scheduler": [step_scheduler],
    "grad_scaler": [change_scale],
    "extras": [reset_extras],
    "best_metric": [report_metric],
}
EVERY = [
    pytest.param(change, key, id=change.__name__)
    for key, each in CHANGES.items()
    for change in each
]


def change_all(job: Training) -> None:
    for change in (change for each in CHANGES.values() for change in each):
        change(job)


def resumed(tmp_path: Path, change: Callable[[Training], None], *crashes: int, **kw: Any) -> Any:
    """The states of an uninterrupted run, and those of the last launch of one that crashed."""
    whole = Training(tmp_path / "whole", change, **kw).train()
    for number, crash in enumerate(crashes):
        Training(tmp_path / "run", change, seed=number, crash_in=crash, **kw).train()
    last = Training(tmp_path / "run", change, seed=99, **kw).train()
    assert max(last.states) == NUM_BATCHES * NUM_EPOCHS
    return {step: whole.states[step] for step in last.states}, last.states


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script changes is not restored again."""
    monkeypatch.setattr(loading.RestoredState, "restore", lambda self: ([], []))


@pytest.mark.parametrize(("change", "key"), EVERY)
def test_a_change_before_the_first_batch_of_an_epoch_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, key: str
) -> None:
    expected, found = resumed(tmp_path, change, 23, strict=True)
    assert list(found) == list(range(21, 33))
    assert found == expected
    lines = [line for line in capsys.readouterr().err.splitlines() if AGAIN in line]
    assert len(lines) == 1
    assert key in lines[0]


@pytest.mark.parametrize(("change", "key"), EVERY)
def test_control_without_the_second_restore_the_change_is_made_twice(
    tmp_path: Path, disabled: None, change: Any, key: str
) -> None:
    expected, found = resumed(tmp_path, change, 23)
    assert found != expected


@pytest.mark.parametrize(
    ("loop", "crashes"),
    [
        ("one", (6,)),
        ("one", (17,)),
        ("one", (23, 21)),  # the second kill is one step after the resume
        ("two", (7, 12, 18)),
        ("two", (14, 16)),
        ("batches", (6, 7)),
        ("batches", (8, 9, 17)),
    ],
)
def test_wherever_the_run_is_killed_each_change_is_made_once(
    tmp_path: Path, loop: str, crashes: tuple[int, ...]
) -> None:
    expected, found = resumed(tmp_path, change_all, *crashes, loop=loop)
    assert found == expected


def test_after_a_save_between_two_epochs_the_change_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, found = resumed(tmp_path, halve_learning_rate, 18, save_every=8)
    assert min(found) == 17
    assert found == expected
    assert AGAIN not in capsys.readouterr().err


def test_nothing_is_read_twice_where_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loading, "load_again", None)
    expected, found = resumed(tmp_path, lambda job: None, 23)
    assert found == expected


def test_a_new_run_takes_no_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "state_digest", None)
    assert max(Training(tmp_path, halve_learning_rate).train().states) == 32


# ---------------------------------------------------------------- resume() before the loop


@pytest.mark.parametrize("is_changed_again", [True, False])
def test_what_the_script_changes_between_resume_and_the_loop_stays(
    tmp_path: Path, is_changed_again: bool
) -> None:
    change = halve_learning_rate if is_changed_again else clear_buffer
    Training(tmp_path, change, crash_in=23).train()
    again = Training(tmp_path, change, seed=5)
    assert again.checkpointer.resume().step == 20
    moments = [state_digest(each) for each in again.optimizer.state.values()]
    again.optimizer.param_groups[0]["lr"] = 0.5
    rates, found = [], []

    def note(job: Training) -> None:
        change(job)
        rates.append(job.optimizer.param_groups[0]["lr"])

    again.change = note
    first = again.on_batch

    def on_batch(batch: Any) -> None:
        found.append(again.optimizer.param_groups[0]["lr"])
        if len(found) == 1:
            assert [state_digest(each) for each in again.optimizer.state.values()] == moments
        first(batch)

    again.on_batch = on_batch  # type: ignore[method-assign]
    again.train()
    assert rates == ([0.25, 0.25] if is_changed_again else [0.5, 0.5])
    assert found == [0.5] * 4 + ([0.25] if is_changed_again else [0.5]) * 8


def test_after_a_save_before_the_loop_a_change_is_made_once(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", change_all).train()
    Training(tmp_path / "run", change_all, crash_in=23).train()
    again = Training(tmp_path / "run", change_all, seed=5)
    again.checkpointer.resume()
    again.checkpointer.save()
    again.train()
    assert again.states == {step: whole.states[step] for step in again.states}


def test_a_change_is_undone_by_the_revision_that_was_resumed(tmp_path: Path) -> None:
    """Another attempt has left a newer checkpoint of the same step."""

    class Other(Training):
        def on_batch(self, batch: Any) -> None:
            super().on_batch(batch)
            scale_data(self)

    options: dict[str, Any] = {"loop": "batches", "save_every": 1, "keep_latest": None}
    whole = Training(tmp_path, lambda _: None, crash_in=7, **options).train()
    Other(tmp_path, lambda _: None, crash_in=6, resume_from="step-00000003", **options).train()
    assert (tmp_path / "step-00000004-r1").exists()
    again = Training(tmp_path, scale_data, resume_from="step-00000004", **options).train()
    assert again.states[5] == whole.states[5]


# ---------------------------------------------------------------- what cannot be restored again


def test_a_group_that_only_the_checkpoint_has_is_refused(tmp_path: Path) -> None:
    def grow(job: Training) -> None:
        if job.checkpointer.progress.epoch == 1:
            job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})

    Training(tmp_path, grow, crash_in=13).train()
    with pytest.raises(StateMismatchError, match="optimizer"):
        Training(tmp_path, grow, seed=5).train()


def test_a_group_that_only_the_script_has_is_refused_with_a_remedy(tmp_path: Path) -> None:
    Training(tmp_path, lambda job: None, crash_in=13).train()

    def grow(job: Training) -> None:
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})

    with pytest.raises(StateMismatchError, match=r"rebuilt it .* before the loop begins"):
        Training(tmp_path, grow, seed=5).train()


def test_a_fetch_after_one_that_was_refused_restores_the_state_again(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole", lambda job: None).train()
    Training(tmp_path / "run", lambda job: None, crash_in=13).train()
    again = Training(tmp_path / "run", lambda job: None, seed=5, loop="batches")

    def grow(job: Training) -> None:
        scale_data(job)
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})

    batches = again.checkpointer.batches(again.loader, epochs=NUM_EPOCHS)
    grow(again)
    with pytest.raises(StateMismatchError, match="rebuilt it"):
        next(batches)
    again.optimizer.param_groups.pop()
    again.on_batch(next(batches))
    (step,) = again.states
    assert again.states == {step: whole.states[step]}
    again.checkpointer.close()


def test_a_horizon_that_is_behind_ends_the_run_in_the_state_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    job = Training(tmp_path, lambda job: None, crash_in=21, loop="batches").train()
    again = Training(tmp_path, lambda job: None, seed=5, allow_changes={"horizon"})
    batches = again.checkpointer.batches(again.loader, epochs=1)
    scale_data(again)
    assert list(batches) == []
    assert again.checkpointer.finished is not None
    assert again.state() == job.states[20]


class Stubborn:
    """An object that takes a state once."""

    value, has_loaded = 0, False

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.has_loaded:
            self.value, self.has_loaded = state["value"], True


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_component_that_stays_changed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_strict: bool
) -> None:
    def train(directory: Path, crash_in: int | None) -> None:
        stubborn = Stubborn()

        def count(job: Training) -> None:
            stubborn.value += 1

        job = Training(directory, count, crash_in=crash_in, strict=is_strict)
        job.extras["stubborn"] = stubborn
        job.train()

    train(tmp_path, 13)
    words = "changed before the first batch, not restored: extras"
    if is_strict:
        with pytest.raises(InexactError, match=words):
            train(tmp_path, None)
    else:
        train(tmp_path, None)
        assert words in capsys.readouterr().err


def test_a_checkpoint_that_has_gone_since_the_load_is_a_typed_error(tmp_path: Path) -> None:
    Training(tmp_path, halve_learning_rate, crash_in=23).train()

    def remove(job: Training) -> None:
        halve_learning_rate(job)
        shutil.rmtree(tmp_path / "step-00000020")

    with pytest.raises(IncompleteLoadError, match="cannot be read a second time"):
        Training(tmp_path, remove, seed=5).train()
