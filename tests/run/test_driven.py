"""A loop that a framework runs: it is met in callbacks, and comes out as a user's loop does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Checkpointer, StateComponent
from resumekit.adapters.torch import Checkpointer as TorchCheckpointer
from resumekit.capture.slots import state_components
from resumekit.errors import DriftError, LoopError, StateMismatchError
from resumekit.run.loop import Loop
from resumekit.run.loops import FrameworkLoop
from resumekit.run.run import RunState

NUM_BATCHES = 4
NUM_EPOCHS = 3


class CrashError(Exception):
    """Stands for whatever ends a process."""


class Framework:
    """A trainer with hooks, which knows nothing of resumekit; ``skips`` batches like a Trainer."""

    def __init__(self, model: nn.Module, loader: Any, *, num_epochs: int = NUM_EPOCHS) -> None:
        self.model = model
        self.loader = loader
        self.num_epochs = num_epochs
        self.losses: list[str] = []
        self.events: list[str] = []
        self.optimizer: Any = None
        self.crash_after: int | None = None
        self.stop_after: int | None = None

    def fit(self, callback: Callback | None = None) -> None:
        hooks: Any = callback or NoCallback(self)
        epoch, skipped = hooks.first_place()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)  # made late
        hooks.on_train_begin()
        while epoch < self.num_epochs:
            hooks.on_epoch_begin()
            self.events.append(f"epoch {epoch} from {skipped}")
            for number, batch in enumerate(hooks.loader(skipped)):
                if number >= skipped:
                    self.losses.append(self._step(batch))
                    hooks.on_step_end()
                if len(self.losses) == self.crash_after:
                    raise CrashError
                if len(self.losses) == self.stop_after or number + 1 == NUM_BATCHES:
                    break
            torch.rand(1)  # an evaluation that draws random numbers
            if len(self.losses) == self.stop_after:
                break
            epoch, skipped = epoch + 1, 0
        hooks.on_train_end()

    def _step(self, batch: Any) -> str:
        inputs, labels = batch
        noisy = inputs + 0.1 * torch.randn_like(inputs)
        loss = nn.functional.cross_entropy(self.model(noisy), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()).hex()


class NoCallback:
    """The framework by itself."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework

    def first_place(self) -> tuple[int, int]:
        return 0, 0

    def loader(self, num_skipped: int) -> Any:
        return self.framework.loader

    def on_train_begin(self) -> None: ...

    on_epoch_begin = on_step_end = on_train_end = on_train_begin


class Callback:
    """What an adapter does: it calls the driven loop where the framework comes by."""

    def __init__(self, framework: Framework, directory: Path, **options: Any) -> None:
        self.framework = framework
        components: Callable[[], tuple[StateComponent, ...]] = lambda: state_components(  # noqa: E731
            model=framework.model, optimizer=framework.optimizer
        )
        settings = {"save_every": 1, **options}
        self.checkpointer = Checkpointer(directory, components=components, **settings)
        self.loop: FrameworkLoop

    def first_place(self) -> tuple[int, int]:
        self.loop = self.checkpointer.drive(epochs=self.framework.num_epochs)
        if self.loop.finished:
            return self.framework.num_epochs, 0
        return self.loop.progress.epoch, self.loop.progress.batch

    def on_train_begin(self) -> None:
        self.loop.resume()

    def on_epoch_begin(self) -> None:
        self.loop.next_epoch()

    def loader(self, num_skipped: int) -> Any:
        return self.loop.as_loader(self.framework.loader, num_skipped=num_skipped)

    def on_step_end(self) -> None:
        self.checkpointer.step()

    def on_train_end(self) -> None:
        self.loop.finish("the framework said so")
        self.checkpointer.close()


def make(seed: int = 0, **settings: Any) -> Framework:
    torch.manual_seed(seed)
    data = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2)
    return Framework(nn.Linear(3, 2), DataLoader(data, batch_size=2, shuffle=True), **settings)


def weights(framework: Framework) -> list[float]:
    return [x for p in framework.model.parameters() for x in p.detach().flatten().tolist()]


def launch(directory: Path, *, crash_after: int | None = None, **options: Any) -> Framework:
    framework = make(seed=7)  # another state than any checkpoint's
    framework.crash_after = crash_after
    callback = Callback(framework, directory, **options)
    with suppress(CrashError):
        framework.fit(callback)
    callback.checkpointer._run.close()  # what the end of a process does
    return framework


def test_a_driven_loop_changes_no_random_number_of_the_framework(tmp_path: Path) -> None:
    stock, driven = make(), make()
    torch.manual_seed(1)
    stock.fit()
    torch.manual_seed(1)
    driven.fit(Callback(driven, tmp_path))
    assert driven.losses == stock.losses
    assert weights(driven) == weights(stock)


@pytest.mark.parametrize("crash_after", [1, 4, 5, 11])
def test_a_driven_loop_goes_on_at_the_next_unseen_batch(tmp_path: Path, crash_after: int) -> None:
    whole = launch(tmp_path / "whole")
    first = launch(tmp_path / "run", crash_after=crash_after)
    saved = crash_after - 1  # a step is saved when the framework asks for the next batch
    second = launch(tmp_path / "run")
    assert first.losses[:saved] + second.losses == whole.losses
    assert weights(second) == weights(whole)
    epoch, batch = divmod(saved, NUM_BATCHES)
    assert second.events[0] == f"epoch {epoch} from {batch}"


def test_a_finished_driven_loop_is_restored_and_does_nothing(tmp_path: Path) -> None:
    whole = launch(tmp_path)
    again = launch(tmp_path)
    assert again.losses == []
    assert weights(again) == weights(whole)


def test_a_framework_that_ends_within_an_epoch_has_finished(tmp_path: Path) -> None:
    framework = make()
    framework.stop_after = 6
    framework.fit(Callback(framework, tmp_path))
    again = make()
    callback = Callback(again, tmp_path)
    again.fit(callback)
    assert again.losses == []
    assert callback.checkpointer.finished == "the framework said so"
    assert callback.checkpointer.progress.batch == 2


def test_progress_is_known_before_any_object_exists(tmp_path: Path) -> None:
    launch(tmp_path, crash_after=6)

    def not_yet() -> tuple[StateComponent, ...]:
        raise AssertionError("asked for the components before resume()")

    checkpointer = Checkpointer(tmp_path, components=not_yet)
    loop = checkpointer.drive(epochs=NUM_EPOCHS)
    assert (loop.progress.step, loop.progress.epoch, loop.progress.batch) == (5, 1, 1)
    checkpointer._run.close()


def test_a_changed_horizon_is_refused_at_once(tmp_path: Path) -> None:
    launch(tmp_path, crash_after=6)
    callback = Callback(make(num_epochs=5), tmp_path)
    with pytest.raises(DriftError, match="epochs=3"):
        callback.first_place()
    callback.checkpointer._run.close()


def test_a_refused_checkpoint_stays_refused(tmp_path: Path) -> None:
    launch(tmp_path, crash_after=6)
    framework = make()
    framework.model = nn.Linear(3, 2, bias=False)
    callback = Callback(framework, tmp_path)
    for _ in range(2):
        with pytest.raises(StateMismatchError):
            framework.fit(callback)
    callback.checkpointer._run.close()


def test_a_second_epoch_without_a_step_is_an_error(tmp_path: Path) -> None:
    framework = make()
    callback = Callback(framework, tmp_path)
    callback.first_place()
    framework.optimizer = torch.optim.AdamW(framework.model.parameters())
    callback.on_train_begin()
    for _ in range(2):
        callback.on_epoch_begin()
        next(iter(callback.loader(0)))
    with pytest.raises(LoopError, match="not one call of step"):
        callback.on_epoch_begin()
    callback.checkpointer._run.close()


def test_an_epoch_left_at_its_last_batch_is_over(tmp_path: Path) -> None:
    """A user's loop that counts its batches, and breaks where the loader has no more."""
    framework = make()
    optimizer = torch.optim.AdamW(framework.model.parameters())
    checkpointer = TorchCheckpointer(tmp_path, model=framework.model, optimizer=optimizer)
    counts = []
    for _ in checkpointer.epochs(2):
        count = 0
        for _ in checkpointer.batches(framework.loader):
            checkpointer.step()
            count += 1
            if count == NUM_BATCHES:
                break
        counts.append(count)
    checkpointer.close()
    assert counts == [NUM_BATCHES, NUM_BATCHES]


class Counting(Loop):
    """The loop of a framework that counts steps itself: one for every two batches."""

    micro_steps = counted = 0

    def at_step_boundary(self) -> bool:
        return self.micro_steps % 2 == 0

    def count_taken_step(self) -> None:
        if self.micro_steps // 2 > self.counted:
            self.step(0, {})
            self.counted += 1


def counting(directory: Path, framework: Framework) -> tuple[Checkpointer, Counting]:
    """A Checkpointer that saves each step, and its loop."""
    optimizer = torch.optim.AdamW(framework.model.parameters())
    components = state_components(model=framework.model, optimizer=optimizer)
    loops: list[Counting] = []

    def make_loop(run: RunState) -> Counting:
        loops.append(Counting(run))
        return loops[0]

    checkpointer = Checkpointer(directory, components=components, make_loop=make_loop, save_every=1)
    return checkpointer, loops[0]


@pytest.mark.parametrize("loop", ["batches", "epochs", "steps"])
def test_steps_that_the_framework_counts_need_no_call(tmp_path: Path, loop: str) -> None:
    framework = make()
    checkpointer, counts = counting(tmp_path, framework)
    if loop == "epochs":
        for _ in checkpointer.epochs(2):
            for _ in checkpointer.batches(framework.loader):
                counts.micro_steps += 1
    else:
        horizon: Any = {"epochs": 2} if loop == "batches" else {"steps": 4}
        for _ in checkpointer.batches(framework.loader, **horizon):
            counts.micro_steps += 1
    assert checkpointer.progress.step == 4
    assert checkpointer.finished
    checkpointer.close()


def test_tokens_add_up_over_an_accumulation_window(tmp_path: Path) -> None:
    framework = make()
    checkpointer, counts = counting(tmp_path, framework)
    counts.counted = 100  # every step is marked by the loop
    for _ in checkpointer.batches(framework.loader, epochs=1):
        counts.micro_steps += 1
        checkpointer.step(tokens=10)
    assert (checkpointer.progress.step, checkpointer.progress.tokens) == (2, 40)
    checkpointer.close()


def test_how_much_of_an_epoch_is_left_is_known_before_anything_is_restored(tmp_path: Path) -> None:
    launch(tmp_path, crash_after=6)
    for batch_size, used_and_left in [(2, (1, 3)), (1, (2, 6)), (4, (1, 2))]:
        framework = make()
        loader = DataLoader(framework.loader.dataset, batch_size=batch_size, shuffle=True)
        checkpointer = Checkpointer(tmp_path, components=(), allow_changes={"batch_size"})
        loop = checkpointer.drive()
        assert loop.horizon == {"epochs": NUM_EPOCHS}
        assert tuple(loop.under_way(loader)) == used_and_left
        assert loop.under_way(loader) == loop.under_way(loader)
        checkpointer._run.close()


def test_a_horizon_may_be_given_after_the_checkpoint_was_found(tmp_path: Path) -> None:
    launch(tmp_path, crash_after=6)
    checkpointer = Checkpointer(tmp_path, components=())
    loop = checkpointer.drive()
    with pytest.raises(DriftError, match="horizon"):
        loop.accept_horizon(epochs=NUM_EPOCHS + 1)
    loop.accept_horizon(epochs=NUM_EPOCHS)
    checkpointer._run.close()


def test_of_a_new_run_nothing_is_used(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, components=())
    loop = checkpointer.drive()
    assert loop.horizon == {}
    assert tuple(loop.under_way(make().loader)) == (0, NUM_BATCHES)
    checkpointer._run.close()


def test_a_finished_run_that_goes_further_shows_its_state_and_sets_its_random_state(
    tmp_path: Path,
) -> None:
    def launch(num_epochs: int, **options: Any) -> tuple[TorchCheckpointer, FrameworkLoop]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"mid_accumulation": "gradients", **options}
        checkpointer = TorchCheckpointer(tmp_path, model=model, optimizer=optimizer, **options)
        return checkpointer, checkpointer.drive(epochs=num_epochs, one_at_a_time=True)

    loader = DataLoader(TensorDataset(torch.rand(NUM_BATCHES, 2)))
    checkpointer, loop = launch(1)
    assert (loop.saved("progress"), loop.goes_on_after_end) == (None, False)
    loop.resume()
    loop.next_epoch(loader)
    batches = loop.batches(loader)
    batches.prime()
    for _ in range(NUM_BATCHES):
        next(batches)
        checkpointer.step()
    assert batches.used_up
    loop.finish("epochs=1")
    checkpointer.close()
    expected = torch.rand(1)

    torch.manual_seed(5)
    checkpointer, loop = launch(2, allow_changes={"horizon"})
    assert loop.saved("progress")["progress"]["step"] == NUM_BATCHES
    loop.resume()
    assert loop.goes_on_after_end
    loop.end_resume()
    assert torch.equal(torch.rand(1), expected)
    assert loop.next_epoch() == 1
    checkpointer.close()
