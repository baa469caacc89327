"""Settings that are changed between two launches of a Trainer: reported, refused, or followed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from small_trainer import STEPS_PER_EPOCH, attach, make_trainer, stop_at
from transformers import Trainer
from transformers_workloads import NUM_BLOCKS, Blocks

from resumekit.errors import ConfigurationError, DataPositionError, DriftError

ALLOWED = {"horizon", "batch_size"}
EPOCHS = 3


class Used:
    """The samples that the training steps were given, by epoch of the run."""

    def __init__(self) -> None:
        self.by_epoch: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(EPOCHS + 3)]

    def watch(self, trainer: Trainer, *, until: int | None = None) -> None:
        """Notes what counts: of a launch that is interrupted, the steps up to its last save."""
        step = trainer.training_step

        def noted(model: Any, inputs: Any, *rest: Any) -> Any:
            state = trainer.state
            if until is None or state.global_step < until:
                epoch = int(state.epoch + 1e-9) if state.epoch is not None else 0
                self.by_epoch[epoch].update(tuple(row) for row in inputs["input_ids"].tolist())
            return step(model, inputs, *rest)

        trainer.training_step = noted  # type: ignore[method-assign]

    def require_each_once(self, num_epochs: int = EPOCHS) -> None:
        whole = Counter(tuple(row) for row in Blocks(augment=False).tokens.tolist())
        for epoch in range(num_epochs):
            assert self.by_epoch[epoch] == whole, f"epoch {epoch}"


def launch(
    directory: Path,
    used: Used,
    *,
    stop: int | None = None,
    saved: int | None = None,
    allow: Any = ALLOWED,
    **arguments: Any,
) -> Trainer:
    """One launch; it is interrupted at a step, after a save at another."""
    trainer = make_trainer(
        directory, **{"num_train_epochs": EPOCHS, "logging_steps": 1, **arguments}
    )
    used.watch(trainer, until=saved)
    attach(trainer, directory, save_every=3, allow_changes=allow)
    with stop_at(trainer, stop):
        trainer.train()
    return trainer


def learning_rates(trainer: Trainer) -> dict[int, float]:
    log = trainer.state.log_history
    return {line["step"]: line["learning_rate"] for line in log if "learning_rate" in line}


# After 15 steps of 8 samples, in the second epoch with 68 of 92 left.
@pytest.mark.quick("{'per_device_train_batch_size': 4}*")
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"per_device_train_batch_size": 4}, 15 + 17 + 23),
        ({"per_device_train_batch_size": 16}, 15 + 5 + 6),
        ({"gradient_accumulation_steps": 3}, 15 + 3 + 4),
        ({"gradient_accumulation_steps": 2}, 15 + 5 + 6),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 15 + 9 + 12),
    ],
    ids=str,
)
def test_no_sample_is_lost_or_used_twice(
    tmp_path: Path, arguments: dict[str, Any], steps: int
) -> None:
    used = Used()
    launch(tmp_path, used, stop=17, saved=15)
    launch(tmp_path, used, stop=20, saved=18, **arguments)
    trainer = launch(tmp_path, used, **arguments)
    used.require_each_once()
    assert trainer.state.global_step == trainer.state.max_steps == steps
    # The schedule is planned again over the steps that the run has now: it ends with the run.
    rates = learning_rates(trainer)
    assert rates[steps] == pytest.approx(trainer.args.learning_rate / steps)
    again = launch(tmp_path, used, **arguments)
    assert again.state.global_step == steps
    used.require_each_once()


@pytest.mark.quick("16-3")
@pytest.mark.parametrize(
    ("batch_size", "num_whole_epochs"),
    [(4, 1), (16, 3)],  # 15 steps and 17 of 4; or 15, 5 and 6 of 16, and 4 more
)
def test_a_run_of_so_many_steps_takes_as_many_epochs_as_it_needs(
    tmp_path: Path, batch_size: int, num_whole_epochs: int
) -> None:
    used = Used()
    launch(tmp_path, used, stop=17, saved=15, max_steps=30)
    trainer = launch(tmp_path, used, max_steps=30, per_device_train_batch_size=batch_size)
    assert trainer.state.global_step == trainer.state.max_steps == 30
    used.require_each_once(num_whole_epochs)
    assert max(used.by_epoch[num_whole_epochs].values()) == 1


@pytest.mark.quick(
    "{'num_train*", "{'per_device_train_batch_size': 4}-allow4*", "{'num_samples': 91*"
)
@pytest.mark.parametrize(
    ("arguments", "allow", "error", "words"),
    [
        ({"num_train_epochs": 4}, {"batch_size"}, DriftError, ("num_train_epochs: was 3, now 4,",)),
        ({"max_steps": 40}, {"batch_size"}, DriftError, ("max_steps: was -1, now 40,",)),
        ({"gradient_accumulation_steps": 2}, (), DriftError, ("on_steps: was 1, now 2,",)),
        ({"warmup_steps": 3}, (), DriftError, ("num_warmup_steps: was 0, now 3;",)),
        ({"per_device_train_batch_size": 4}, {"horizon"}, DataPositionError, ("size 4", "size 8")),
        ({"per_device_train_batch_size": 4}, {"batch_size"}, DriftError, ("size: was 8, now 4,",)),
        ({"num_samples": 91}, ALLOWED, DataPositionError, ("91", "92")),
        ({"num_samples": 60}, ALLOWED, DataPositionError, ("60", "92")),
    ],
    ids=lambda value: sorted(value) if isinstance(value, set) else str(value),
)
def test_a_change_that_nobody_allowed_is_refused_with_both_values(
    tmp_path: Path,
    arguments: dict[str, Any],
    allow: Any,
    error: type[Exception],
    words: tuple[str, ...],
) -> None:
    launch(tmp_path, Used(), stop=17)
    trainer = make_trainer(tmp_path, **{"num_train_epochs": EPOCHS, **arguments})
    weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    attach(trainer, tmp_path, allow_changes=allow)
    with pytest.raises(error) as refusal:
        trainer.train()
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert all(torch.equal(weights[k], v) for k, v in trainer.model.state_dict().items())


def test_more_epochs_are_trained_if_that_is_allowed(tmp_path: Path) -> None:
    used = Used()
    launch(tmp_path, used)
    trainer = launch(tmp_path, used, num_train_epochs=4)
    assert trainer.state.global_step == 4 * STEPS_PER_EPOCH
    used.require_each_once(4)


def test_another_learning_rate_is_reported_and_the_saved_one_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = launch(tmp_path / "whole", Used(), learning_rate=0.01)
    launch(tmp_path, Used(), stop=17, learning_rate=0.01)
    trainer = launch(tmp_path, Used(), learning_rate=0.02)
    assert learning_rates(trainer) == learning_rates(whole)
    ignored = "learning rate: the script says 0.02, the checkpoint's 0.01 is used"
    logged = capfd.readouterr().err
    assert ignored in logged
    assert logged.count("the script says") == 1


def test_another_data_seed_inside_an_epoch_is_refused_with_the_former_one(tmp_path: Path) -> None:
    launch(tmp_path, Used(), stop=17, data_seed=4)
    with pytest.raises(DataPositionError, match="Restore the seed of the sampler, 4, until"):
        launch(tmp_path, Used(), data_seed=5)


def test_another_seed_is_reported_and_the_checkpoints_random_state_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(tmp_path, Used(), stop=17, data_seed=4, seed=1)
    launch(tmp_path, Used(), data_seed=4, seed=2)
    expected = "WARNING: seed: was 1, the script says 2, the checkpoint's random state is used"
    assert expected in capfd.readouterr().err


def test_another_length_of_the_data_set_is_reported_at_the_end_of_an_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(tmp_path, Used(), stop=STEPS_PER_EPOCH + 2)
    used = Used()
    launch(tmp_path, used, num_samples=NUM_BLOCKS - 1)
    expected = f"samples: was {NUM_BLOCKS} in the checkpoint, the script's {NUM_BLOCKS - 1} is used"
    assert expected in capfd.readouterr().err
    assert sum(used.by_epoch[1].values()) == NUM_BLOCKS - 1


def test_gradients_are_summed_up_over_whole_windows_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
    attach(trainer, tmp_path, mid_accumulation="gradients")
    with pytest.raises(ConfigurationError, match="gradients"):
        trainer.train()
