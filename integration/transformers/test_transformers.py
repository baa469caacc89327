"""What the Trainer's adapter takes over, what it leaves alone, and what it refuses."""

from __future__ import annotations

import inspect
import random
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from accelerate.data_loader import SeedableRandomSampler
from small_trainer import (
    STEPS_PER_EPOCH,
    Recorder,
    attach,
    interrupted,
    make_trainer,
    stop_at,
    without_clock,
)
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import speed_metrics
from transformers_workloads import BATCH_SIZE, NUM_BLOCKS, Blocks

from resumekit.adapters.transformers import ResumeCallback
from resumekit.adapters.transformers._private import (
    STATE,
    attribute_faults,
    method_faults,
)
from resumekit.adapters.transformers.arguments import Counts
from resumekit.data.epoch_order import may_draw_lazily
from resumekit.errors import ConfigurationError, InexactError
from resumekit.state import CLOCK_SUFFIXES


@pytest.mark.quick("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_callback_changes_no_bit_of_the_training(tmp_path: Path, workers: int) -> None:
    runs = {}
    for name in ("stock", "attached"):
        trainer = make_trainer(
            tmp_path, augment=True, dataloader_num_workers=workers, logging_steps=1
        )
        if name == "attached":
            attach(trainer, tmp_path, save_every=5)
        result = trainer.train()
        weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        runs[name] = (without_clock(trainer.state.log_history), result.training_loss, weights)
    stock, attached = runs["stock"], runs["attached"]
    assert attached[:2] == stock[:2]
    assert all(torch.equal(attached[2][key], value) for key, value in stock[2].items())


def test_what_the_trainer_returns_and_logs_is_that_of_the_whole_run(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"eval_strategy": "epoch", "logging_steps": 7}
    whole = make_trainer(tmp_path / "whole", **arguments)
    attach(whole, tmp_path / "whole", save_every=3)
    expected = whole.train()
    interrupted(tmp_path, 17, **arguments)
    trainer = make_trainer(tmp_path, **arguments)
    attach(trainer, tmp_path, save_every=3)
    result = trainer.train()
    assert result.training_loss == expected.training_loss
    assert result.global_step == expected.global_step == 2 * STEPS_PER_EPOCH
    assert without_clock(trainer.state.log_history) == without_clock(whole.state.log_history)


def test_other_callbacks_see_the_restored_run_and_no_epoch_twice(tmp_path: Path) -> None:
    interrupted(tmp_path, 17)
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder)
    attach(trainer, tmp_path, save_every=3)
    trainer.train()
    assert recorder.begun_at == [15]
    assert recorder.epochs == [15 / STEPS_PER_EPOCH]
    assert recorder.num_steps == 2 * STEPS_PER_EPOCH - 15


def test_training_again_after_the_end_does_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder()
        trainer = make_trainer(tmp_path, recorder)
        attach(trainer, tmp_path, save_every=5)
        trainer.train()
        weights = trainer.model.state_dict()
        trainer.train()
        # Its count is restored, and no step is added to it.
        assert recorder.num_steps == 2 * STEPS_PER_EPOCH
        assert trainer.state.global_step == 2 * STEPS_PER_EPOCH
        assert all(torch.equal(weights[k], v) for k, v in trainer.model.state_dict().items())


def test_a_second_data_set_is_not_taken_for_the_run_that_is_over(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    attach(trainer, tmp_path)
    trainer.train()
    trainer.train_dataset = Blocks(augment=True)
    with pytest.raises(ConfigurationError, match="a directory for each training"):
        trainer.train()


class Fails(TrainerCallback):
    """As an error in the evaluation would, the first time."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 10:
            raise KeyError("of the user")


def test_after_an_error_the_same_trainer_continues_in_the_same_process(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    attach(whole, tmp_path / "whole")
    whole.train()
    trainer = make_trainer(tmp_path, fails := Fails())
    attach(trainer, tmp_path, save_every=3)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) == handler
    trainer.remove_callback(fails)
    trainer.train()
    assert without_clock(trainer.state.log_history) == without_clock(whole.state.log_history)
    state = whole.model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in trainer.model.state_dict().items())


def test_a_metric_may_be_anything_but_the_one_that_selects(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, eval_strategy="steps", eval_steps=2, max_steps=4, metric_for_best_model="loss"
    )
    trainer.compute_metrics = lambda _: {"f1": [0.5, 0.25], "by_class": {"a": 1}, "name": "x"}
    attach(trainer, tmp_path, save_every=2)
    trainer.train()
    again = make_trainer(tmp_path, max_steps=4)
    attach(again, tmp_path)
    again.train()
    assert again.state.log_history[1]["eval_f1"] == [0.5, 0.25]


def test_a_run_that_a_callback_stops_early_is_finished(tmp_path: Path) -> None:
    def patient() -> EarlyStoppingCallback:
        return EarlyStoppingCallback(early_stopping_patience=2)

    arguments: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the loss falls: nothing ever improves on the first
        "learning_rate": 1e-2,
    }
    trainer = make_trainer(tmp_path, patient(), **arguments)
    attach(trainer, tmp_path)
    trainer.train()
    stopped_at = trainer.state.global_step
    assert stopped_at == 6
    recorder = Recorder()
    trainer = make_trainer(tmp_path, patient(), recorder, **arguments)
    attach(trainer, tmp_path)
    trainer.train()
    assert recorder.num_steps == 0
    assert trainer.state.global_step == stopped_at


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="steps", eval_steps=4)
    attach(trainer, tmp_path, best_metric="eval_loss", keep_latest=1)
    trainer.train()
    losses = {
        line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line
    }
    best = min(losses, key=lambda step: losses[step])
    assert (tmp_path / "run" / f"step-{best:08}").is_dir()


def test_a_callback_of_another_class_may_join_at_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupted(tmp_path, 8, eval_strategy="epoch", metric_for_best_model="eval_loss")
    trainer = make_trainer(
        tmp_path,
        EarlyStoppingCallback(early_stopping_patience=9),
        eval_strategy="epoch",
        metric_for_best_model="eval_loss",
    )
    attach(trainer, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2 * STEPS_PER_EPOCH
    assert "has no callbacks/EarlyStoppingCallback-0" in capfd.readouterr().err


def test_an_evaluation_in_persistent_workers_is_reported_as_inexact(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        eval_strategy="epoch",
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )
    attach(trainer, tmp_path, strict=True)
    with pytest.raises(InexactError, match="dataloader_persistent_workers=False"):
        trainer.train()


@pytest.mark.parametrize(
    "setting", ["ignore_data_skip", "auto_find_batch_size", "enable_jit_checkpoint"]
)
def test_a_setting_that_cannot_be_followed_is_refused_and_named(
    tmp_path: Path, setting: str
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, **{setting: True})
    signal.signal(signal.SIGTERM, handler)  # enable_jit_checkpoint has set one already
    with pytest.raises(ConfigurationError, match=setting):
        ResumeCallback(trainer, tmp_path / "run")


@pytest.mark.parametrize("name", ["galore_adamw_layerwise", "apollo_adamw", "grokadamw"])
def test_an_optimizer_whose_state_cannot_be_saved_is_refused_and_named(
    tmp_path: Path, name: str
) -> None:
    trainer = make_trainer(tmp_path, optim=name)
    with pytest.raises(ConfigurationError, match=name):
        ResumeCallback(trainer, tmp_path / "run")


def test_a_second_callback_and_a_wrong_option_are_refused_at_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigurationError, match="save_evry"):
        ResumeCallback(trainer, tmp_path / "run", save_evry=5)  # type: ignore[call-arg]
    ResumeCallback(trainer, tmp_path / "run")
    with pytest.raises(ConfigurationError, match="second ResumeCallback"):
        ResumeCallback(trainer, tmp_path / "other")


# What the adapter relies on that transformers does not document. One that fails here has moved.


def test_pin_the_methods_that_are_replaced() -> None:
    begin = inspect.signature(Trainer._init_training_state).parameters
    assert list(begin) == [
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ]
    run = inspect.signature(Trainer._run_epoch).parameters
    assert {
        "epoch",
        "train_dataloader",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    } <= set(run)
    count = inspect.signature(Trainer.set_initial_training_values).parameters
    assert list(count) == ["self", "args", "dataloader"]
    loop = inspect.getsource(Trainer._inner_training_loop)
    assert loop.index("set_initial_training_values(") < loop.index("_init_training_state(")
    assert loop.index("_init_training_state(") < loop.index("_prepare_for_training(")
    assert loop.index("on_train_begin(") < loop.index("on_epoch_begin(") < loop.index("_run_epoch(")


def test_pin_what_the_trainer_counts_before_it_begins(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=5)
    counts = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert Counts(*counts) == Counts(
        num_train_epochs=2,
        num_update_steps_per_epoch=3,
        num_examples=NUM_BLOCKS,
        num_train_samples=2 * NUM_BLOCKS,
        total_train_batch_size=5 * BATCH_SIZE,
        steps_in_epoch=STEPS_PER_EPOCH,
        max_steps=6,
    )


def test_pin_a_random_state_that_is_not_there_is_not_loaded(tmp_path: Path) -> None:
    trainer, before = make_trainer(tmp_path), torch.get_rng_state()
    trainer._load_rng_state(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


def test_pin_the_fields_of_the_state_and_the_sums(tmp_path: Path) -> None:
    settings = {
        "max_steps",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "train_batch_size",
        "num_train_epochs",
        "is_local_process_zero",
        "is_world_process_zero",
        "is_hyper_param_search",
        "trial_name",
        "trial_params",
        "stateful_callbacks",
    }

    assert set(vars(TrainerState())) == settings | set(STATE)
    trainer = make_trainer(tmp_path, max_steps=1)
    assert not list(method_faults(trainer))
    assert any("_tr_loss is missing" in fault for fault in attribute_faults(trainer))
    trainer.train()
    assert not list(attribute_faults(trainer))


def test_pin_what_is_read_from_a_clock() -> None:
    metrics = speed_metrics("eval", 0.0, num_samples=1, num_steps=1, num_tokens=1)
    assert all(name.endswith(CLOCK_SUFFIXES) for name in metrics)


def test_pin_the_seeded_sampler_draws_from_its_own_generator_alone() -> None:
    sampler = SeedableRandomSampler(range(5), data_seed=3)
    assert not may_draw_lazily(sampler)
    before, drawn = torch.get_rng_state(), list(sampler)
    sampler.set_epoch(0)
    torch.rand(1)
    assert list(sampler) == drawn
    torch.set_rng_state(before)
    list(sampler)
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- hidden states


def with_hidden_states(directory: Path, *, stop: int | None = None, hooked: bool = False) -> Any:
    """A launch whose loss draws a number for each hidden state; the state of Python's RNG, and the
    weights.
    """

    def loss_of(model: Any, inputs: Any, **rest: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        return outputs.loss + sum(random.random() * h.mean() for h in outputs.hidden_states)

    trainer = make_trainer(directory, gradient_accumulation_steps=2)
    trainer.compute_loss = loss_of  # type: ignore[method-assign]
    if hooked:
        trainer.model.transformer._output_capturing_hooks_installed = True
    attach(trainer, directory, save_every=5)
    with stop_at(trainer, stop):
        trainer.train()
    return random.getstate(), trainer.model.state_dict()


@pytest.mark.parametrize("is_hooked", [False, True], ids=["exact", "control"])
def test_a_loss_of_hidden_states_is_exact(tmp_path: Path, is_hooked: bool) -> None:
    rng, weights = with_hidden_states(tmp_path / "whole")
    with_hidden_states(tmp_path / "run", stop=8)
    found_rng, found = with_hidden_states(tmp_path / "run", hooked=is_hooked)
    is_equal = all(torch.equal(value, found[name]) for name, value in weights.items())
    assert (found_rng == rng, is_equal) == (not is_hooked, not is_hooked)
