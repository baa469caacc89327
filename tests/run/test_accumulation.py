"""Saves inside an accumulation window: killed at every micro-batch, a run continues exactly."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Checkpointer as BaseCheckpointer
from resumekit import StateComponent
from resumekit.adapters.torch import Checkpointer
from resumekit.capture.gradients import AccumulatedGradients, gradient_states, named_parameters
from resumekit.capture.model import ModelState
from resumekit.capture.slots import state_components
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.serialization.reading import read_payload
from resumekit.state import WorldChange
from resumekit.storage.manifest import Manifest
from resumekit.storage.store import Store

ACCUMULATE = 4
NUM_BATCHES = 6  # of an epoch: accumulation windows reach over its end
NUM_EPOCHS = 2


@pytest.fixture(autouse=True)
def _quick_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of launches are made here, and none is about the git commit."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)


class CrashError(Exception):
    """Stands for whatever ends a process."""


class Training:
    """One launch of a loop that accumulates; it saves at the micro-batches in `save_at`.

    The judge's ``losses`` of a launch are no state of the loop.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        crash_at: int | None = None,
        save_at: range | None = None,
        loop: str = "batches",
        **options: Any,
    ) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        data = TensorDataset(torch.arange(36.0).reshape(12, 3) / 36, torch.arange(12) % 2)
        self.loader = DataLoader(data, batch_size=2, shuffle=True)
        self.crash_at, self.loop = crash_at, loop
        self.save_at = range(100) if save_at is None else save_at
        self.losses: dict[int, str] = {}
        settings = {
            "save_every": None,
            "mid_accumulation": "gradients",
            "transient": {"losses"},
            **options,
        }
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, **settings
        )

    def batches(self) -> Iterator[Any]:
        if self.loop == "batches":
            yield from self.checkpointer.batches(self.loader, epochs=NUM_EPOCHS)
            return
        for _ in self.checkpointer.epochs(NUM_EPOCHS):
            torch.rand(1)
            # In a launch that resumes inside an accumulation window this comes once more.
            if self.checkpointer.progress.micro_step % ACCUMULATE == 0 or self.loop == "clears":
                self.optimizer.zero_grad(set_to_none=False)
            yield from self.checkpointer.batches(self.loader)

    def train(self) -> Training:
        with suppress(CrashError), self.checkpointer:
            for inputs, labels in self.batches():
                self.on_batch(inputs, labels)
        return self

    def on_batch(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        micro_step = self.checkpointer.progress.micro_step
        loss = nn.functional.cross_entropy(self.model(inputs), labels) / ACCUMULATE
        loss.backward()
        self.losses[micro_step] = float(loss.detach()).hex()
        if micro_step % ACCUMULATE == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.checkpointer.step(tokens=micro_step)
        if micro_step in self.save_at:
            self.checkpointer.save()
        if len(self.losses) == self.crash_at:
            raise CrashError

    def weights(self) -> list[float]:
        return [x for p in self.model.parameters() for x in p.detach().flatten().tolist()]


def manifest_of(directory: Path) -> Manifest:
    return Manifest.from_bytes((directory / "manifest.json").read_bytes())


def newest(directory: Path) -> Path:
    return max(directory.glob("step-*"), key=lambda path: path.name)


@pytest.mark.parametrize(
    ("loop", "kills"),
    # inside an accumulation window, after a step, at the end of the first epoch
    [("batches", (2, 5, 7, 12)), ("epochs", (5, 8)), ("clears", (5, 7))],
    ids=["batches", "epochs", "clears"],
)
def test_a_kill_at_any_micro_batch_continues_exactly(
    tmp_path: Path, loop: str, kills: tuple[int, ...]
) -> None:
    whole = Training(tmp_path / "whole", loop=loop).train()
    assert len(whole.losses) == NUM_EPOCHS * NUM_BATCHES
    for kill in kills:
        directory = tmp_path / f"killed at {kill}"
        killed = Training(
            directory, loop=loop, crash_at=kill, save_at=range(kill - 1, kill)
        ).train()
        again = Training(directory, loop=loop, seed=kill, save_at=range(0)).train()
        # Each finished batch was saved, in the middle of an accumulation window or not.
        assert min(again.losses) == kill
        assert {**killed.losses, **again.losses} == whole.losses
        assert again.weights() == whole.weights(), kill
        assert again.checkpointer.progress == whole.checkpointer.progress
    assert whole.checkpointer.progress.step == 3
    assert whole.checkpointer.progress.tokens == 4 + 8 + 12


def test_without_the_gradients_the_same_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Training(tmp_path / "whole").train()
    for kill in (4, 5, 7):
        directory = tmp_path / f"killed at {kill}"
        Training(directory, crash_at=kill, save_at=range(kill - 1, kill)).train()
        with monkeypatch.context() as context:
            context.setenv("RESUMEKIT_INJECT", "model/gradients")
            again = Training(directory, seed=kill, save_at=range(0)).train()
        # Right after a step there are none.
        assert (again.weights() == whole.weights()) == (kill % ACCUMULATE == 1)


def test_by_default_a_save_inside_a_window_is_made_at_its_end(tmp_path: Path) -> None:
    training = Training(tmp_path, save_at=range(2, 3), mid_accumulation="boundary")
    for inputs, labels in training.batches():
        training.on_batch(inputs, labels)
        there = [path.name for path in tmp_path.glob("step-*")]
        micro_step = training.checkpointer.progress.micro_step
        assert there == ([] if micro_step <= ACCUMULATE else ["step-00000001"])
        if micro_step == 6:
            break
    assert "model/gradients" not in str(manifest_of(newest(tmp_path)).components)
    training.checkpointer.close()


def test_with_the_option_it_is_made_at_the_next_batch(tmp_path: Path) -> None:
    training = Training(tmp_path, save_at=range(2, 3))
    for inputs, labels in training.batches():
        training.on_batch(inputs, labels)
        if training.checkpointer.progress.micro_step == 3:
            break
    (saved,) = tmp_path.glob("step-*")
    assert saved.name == "step-00000000"
    assert manifest_of(saved).progress["micro_step"] == 2
    training.checkpointer.close()


def test_the_clock_saves_inside_windows_and_steps_save_at_their_end(tmp_path: Path) -> None:
    clock = Training(tmp_path / "clock", save_every="0.000001s", save_at=range(0)).train()
    names = [path.name for path in (tmp_path / "clock").glob("step-*")]
    assert any("-r" in name for name in names), "a second save of one step"
    steps = Training(tmp_path / "steps", save_every=1, save_at=range(0), keep_latest=None).train()
    names = sorted(path.name for path in (tmp_path / "steps").glob("step-*"))
    assert names == ["step-00000001", "step-00000002", "step-00000003"]
    assert clock.weights() == steps.weights()


@pytest.mark.parametrize(
    ("crash_at", "stored"), [(4, 4), (5, 0), (6, 4)], ids=["within", "between", "within the next"]
)
def test_gradients_are_stored_inside_a_window_and_not_between_two(
    tmp_path: Path, crash_at: int, stored: int
) -> None:
    Training(tmp_path, crash_at=crash_at).train()
    store = Store(tmp_path)
    reader = store.open_step(store.step_names()[0])
    (component,) = [each for each in reader.manifest.components if "gradients" in each.key]
    assert component.pattern == "per_rank"
    (gradients,) = read_payload(reader, component.directory, 0, [component.key]).values()
    assert len(gradients.get("gradients", ())) == stored


@pytest.mark.parametrize("crash_at", [4, 5], ids=["inside accumulation", "between steps"])
@pytest.mark.parametrize("then", ["gradients", "boundary"])
@pytest.mark.parametrize("now", ["gradients", "boundary"])
def test_the_option_may_change_between_launches(
    tmp_path: Path, then: str, now: str, crash_at: int
) -> None:
    whole = Training(tmp_path / "whole").train()
    directory = tmp_path / "run"
    Training(directory, mid_accumulation=then, crash_at=crash_at + 4).train()
    again = Training(directory, seed=5, mid_accumulation=now).train()
    assert again.weights() == whole.weights()
    assert again.losses.items() <= whole.losses.items()


def test_a_break_inside_a_window_saves_what_is_due(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole").train()
    training = Training(tmp_path / "run", save_at=range(6, 7))
    with training.checkpointer:
        for inputs, labels in training.batches():
            training.on_batch(inputs, labels)
            if training.checkpointer.progress.micro_step == 6:
                break
    again = Training(tmp_path / "run", seed=3).train()
    assert min(again.losses) == 7
    assert again.weights() == whole.weights()


def test_a_framework_that_runs_the_loop_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    checkpointer = BaseCheckpointer(
        tmp_path, components=[StateComponent("model", model)], mid_accumulation="gradients"
    )
    with pytest.raises(ConfigurationError, match="mid_accumulation"):
        checkpointer.drive(epochs=1)


def test_a_model_that_keeps_its_gradients_elsewhere_is_refused(tmp_path: Path) -> None:
    class Engine(ModelState):
        """An optimizer of a framework, whose parameters have no ``.grad``."""

    components = [StateComponent("model", Engine(nn.Linear(1, 1)))]
    with pytest.raises(ConfigurationError, match=r"'gradients', and model is a Engine"):
        BaseCheckpointer(tmp_path, components=components, mid_accumulation="gradients")


def test_an_unknown_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mid_accumulation"):
        Training(tmp_path, mid_accumulation="yes")


# ---------------------------------------------------------------- the gradients of a module


def gradients_of(module: nn.Module) -> AccumulatedGradients:
    return AccumulatedGradients(
        partial(named_parameters, module), lambda: True, key="model/gradients"
    )


def brought_back(before: nn.Module, after: nn.Module) -> None:
    state = gradients_of(before).state_dict()
    there = gradients_of(after)
    there.check_state_dict(state)
    there.load_state_dict(state)
    there.after_rng_restore()


def test_gradients_keep_their_bits_their_layout_and_their_absence() -> None:
    def make() -> Any:
        model: Any = nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2), nn.Linear(5, 5)
        )
        return model.to(memory_format=torch.channels_last)

    before, after = make(), make()
    before[:3](torch.randn(1, 2, 2, 2)).sum().backward()
    for parameter in after[3].parameters():
        parameter.grad = torch.ones_like(parameter)  # left over from before the resume
    brought_back(before, after)
    for mine, yours in zip(before.parameters(), after.parameters(), strict=True):
        if mine.grad is None:
            assert yours.grad is None
            continue
        assert yours.grad is not None
        assert torch.equal(mine.grad, yours.grad)
        assert mine.grad.stride() == yours.grad.stride()
        assert mine.grad.data_ptr() != yours.grad.data_ptr()


def test_a_gradient_that_is_there_is_filled_in_place() -> None:
    before, after = nn.Linear(2, 2), nn.Linear(2, 2)
    before(torch.ones(1, 2)).sum().backward()
    after(torch.zeros(1, 2)).sum().backward()
    kept = after.weight.grad
    brought_back(before, after)
    assert after.weight.grad is kept
    assert torch.equal(after.weight.grad, before.weight.grad)  # type: ignore[arg-type]


def test_sparse_gradients_are_restored_uncoalesced() -> None:
    before, after = (nn.Embedding(6, 2, sparse=True) for _ in range(2))
    for index in (3, 3, 1):
        before(torch.tensor([index])).sum().backward()
    brought_back(before, after)
    mine, yours = before.weight.grad, after.weight.grad
    assert mine is not None
    assert yours is not None
    assert mine.is_coalesced() == yours.is_coalesced()
    assert torch.equal(mine._indices(), yours._indices())
    assert torch.equal(mine._values(), yours._values())


def test_gradients_of_another_model_are_refused_with_its_name() -> None:
    before, after = nn.Linear(2, 2), nn.Linear(3, 2)
    before(torch.ones(1, 2)).sum().backward()
    with pytest.raises(StateMismatchError, match=r"weight: a gradient of shape \(2, 2\)"):
        brought_back(before, after)


def test_gradients_of_an_open_window_are_saved_although_steps_begin_without_any() -> None:
    model, is_open = nn.Linear(2, 1), [True]
    gradients = AccumulatedGradients(
        partial(named_parameters, model), lambda: is_open[0], key="model"
    )
    gradients.watch.inherit()  # as after steps that were seen to begin without gradients
    model(torch.ones(1, 2)).sum().backward()
    assert gradients.state_dict()["reason"] == "window"
    is_open[0] = False
    assert gradients.state_dict() == {}


def test_gradients_that_differ_between_the_ranks_allow_no_other_number_of_ranks() -> None:
    model = nn.Linear(2, 1)
    gradients = AccumulatedGradients(
        partial(named_parameters, model), lambda: True, key="model/gradients"
    )
    states = []
    for factor in (1.0, 2.0):
        model.zero_grad()
        model(torch.full((1, 2), factor)).sum().backward()
        states.append(gradients.state_dict())
    first, second = states
    change = WorldChange(rank=0, world_size=1, former_world_size=2)
    assert gradients.resplit_state_dict({0: first, 1: first}, change)[0] is first
    with pytest.raises(StateMismatchError, match="different gradients on each of 2 ranks"):
        gradients.resplit_state_dict({0: first, 1: second}, change)


def test_every_model_has_its_own_component_and_buffers_have_none() -> None:
    models = {"a": nn.BatchNorm1d(2), "b": nn.Linear(2, 2)}
    components = state_components(model=models, num_ranks=2)
    assert "model/a/rank_buffers" in [each.key for each in components]
    keys = [each.key for each in gradient_states(components, lambda: True)]
    assert keys == ["model/a/gradients", "model/b/gradients"]
