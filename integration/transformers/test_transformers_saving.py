"""When a Trainer's run is saved, what its checkpoints are good for, and what damage costs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from small_trainer import (
    STEPS_PER_EPOCH,
    attach,
    interrupted,
    make_trainer,
    stop_at,
    without_clock,
)
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
)
from transformers.generation import GenerationConfig

from resumekit.errors import NoUsableCheckpointError, Preempted
from resumekit.record.trace import INJECT_VARIABLE
from resumekit.storage.store import Store


def steps_of(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (directory / "run").glob("step-*"))


def trained(directory: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    trainer = make_trainer(directory, **arguments)
    attach(trainer, directory, **(options or {}))
    trainer.train()
    return trainer


END = 2 * STEPS_PER_EPOCH


@pytest.mark.quick(
    "{'save_strategy': 'steps', 'save_steps': 7*",
    "{'save_strategy': 'epoch*",
    "{'save_strategy': 'no*",
)
@pytest.mark.parametrize(
    ("arguments", "steps", "words"),
    [
        ({"save_strategy": "steps", "save_steps": 7}, [7, 14, 21, END], "every 7 steps"),
        ({"save_strategy": "steps", "save_steps": 0.25}, [6, 12, 18, END], "every 6 steps"),
        ({"save_strategy": "epoch"}, [STEPS_PER_EPOCH, END], "at the end of each epoch"),
        ({"save_strategy": "no"}, [END], "automatically, first after 3 min"),
    ],
    ids=str,
)
def test_it_is_saved_when_the_arguments_say(
    tmp_path: Path,
    arguments: dict[str, Any],
    steps: list[int],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    trained(tmp_path, {"keep_latest": None}, **arguments)
    assert steps_of(tmp_path) == steps
    assert f"resumekit: starting in {tmp_path / 'run'}; saves {words}; " in capfd.readouterr().err


def test_the_arguments_say_how_many_are_kept_and_which_is_the_best(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=4,
        metric_for_best_model="loss",
        greater_is_better=True,  # the loss falls: the first one stays the best
    )
    assert steps_of(tmp_path) == [4, END]
    native = sorted(path.name for path in (tmp_path / "output").glob("checkpoint-*"))
    assert native == ["checkpoint-4"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "output" / "checkpoint-4")


def test_an_option_counts_more_than_an_argument(tmp_path: Path) -> None:
    options = {"save_every": 5, "keep_latest": 3, "best_metric": None}
    trained(
        tmp_path,
        options,
        save_strategy="epoch",
        save_total_limit=1,
        eval_strategy="epoch",
        metric_for_best_model="loss",
    )
    assert steps_of(tmp_path) == [15, 20, END]


def test_the_best_model_is_loaded_at_the_end_also_after_a_resume(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    whole = trained(tmp_path / "whole", **arguments)
    interrupted(tmp_path, 17, **arguments)
    trainer = trained(tmp_path, **arguments)
    assert trainer.state.best_global_step == whole.state.best_global_step == 3
    weights = whole.model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in trainer.model.state_dict().items())
    assert without_clock(trainer.state.log_history) == without_clock(whole.state.log_history)


def test_the_model_of_a_checkpoint_is_opened_by_from_pretrained(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    folder = tmp_path / "run" / f"step-{END:08}" / "model"
    for kind in (GPT2LMHeadModel, AutoModelForCausalLM):
        model, found = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(found.values()), found
        assert type(model) is GPT2LMHeadModel
        expected = trainer.model.state_dict()
        assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
        assert expected.keys() == model.state_dict().keys()
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 0
    manifest = Store(tmp_path / "run").open_step(Store(tmp_path / "run").step_names()[0]).manifest
    listed = {entry.path for entry in manifest.files if entry.path.startswith("model/")}
    assert listed == {f"model/{path.name}" for path in folder.iterdir()}


def _truncate(step: Path) -> None:
    weights = step / "model" / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def _flip_a_bit_of_the_optimizer(step: Path) -> None:
    moments = step / "optimizer" / "rank-00000.safetensors"
    content = bytearray(moments.read_bytes())
    content[-5] ^= 1
    moments.write_bytes(content)


def _lose_the_optimizer(step: Path) -> None:
    for path in (step / "optimizer").iterdir():
        path.unlink()


def _lose_the_manifest(step: Path) -> None:
    (step / "manifest.json").unlink()


DAMAGES = (_truncate, _flip_a_bit_of_the_optimizer, _lose_the_optimizer, _lose_the_manifest)


@pytest.mark.quick("_lose_the_manifest")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_in_one_line_and_the_one_before_is_used(
    tmp_path: Path, damage: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole")
    interrupted(tmp_path, 17)
    damage(tmp_path / "run" / "step-00000015")
    capfd.readouterr()
    trainer = trained(tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "passed over step-00000015" in line]) == 1
    assert any("resuming at step 12" in line for line in lines)
    weights = whole.model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in trainer.model.state_dict().items())


def test_a_run_of_which_every_checkpoint_is_damaged_never_starts_over(tmp_path: Path) -> None:
    interrupted(tmp_path, 17)
    for step in (tmp_path / "run").glob("step-*"):
        _lose_the_optimizer(step)
    with pytest.raises(NoUsableCheckpointError, match="optimizer"):
        trained(tmp_path)


@pytest.mark.quick("backward")
@pytest.mark.parametrize("during", ["forward", "backward"])
def test_a_signal_in_the_middle_of_a_step_leaves_at_its_end(tmp_path: Path, during: str) -> None:
    whole = trained(tmp_path / "whole", augment=True, logging_steps=1)
    trainer = make_trainer(tmp_path, augment=True, logging_steps=1)
    calls = []

    def ask(*_: Any) -> None:
        calls.append(during)
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    block = trainer.model.transformer.h[0]  # dropout is drawn before and after it
    hook = {"forward": "register_forward_hook", "backward": "register_full_backward_hook"}[during]
    getattr(block, hook)(ask)
    attach(trainer, tmp_path, save_every=3)
    with pytest.raises(Preempted):
        trainer.train()
    assert steps_of(tmp_path)[-1] == 8
    trainer = trained(tmp_path, {"save_every": 3}, augment=True, logging_steps=1)
    assert without_clock(trainer.state.log_history) == without_clock(whole.state.log_history)
    weights = whole.model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in trainer.model.state_dict().items())


def test_the_checkpoint_says_what_the_callbacks_hold(tmp_path: Path) -> None:
    trained(tmp_path)
    index = tmp_path / "run" / f"step-{END:08}" / "state" / "rank-00000.json"
    assert "callbacks/attributes" in json.loads(index.read_text(encoding="utf-8"))["states"]


class Counting(TrainerCallback):
    """Counts in a number of its own, and in a dict that is saved."""

    def __init__(self, saved: dict[str, int]) -> None:
        self.num_steps, self.every, self.saved = 0, 2, saved
        self.began_at: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_at = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps += 1
        self.saved["steps"] += 1


class CountingLoss:
    """What a Trainer calls may be an object."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, outputs: Any, labels: Any, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        return outputs["logits"].square().mean()


@pytest.mark.quick("False")
@pytest.mark.parametrize("is_saved", [True, False])
def test_what_user_code_counts_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    extras = {"steps": 0}
    counts = []
    for interrupt_at in (17, None):
        callback, loss = Counting(extras), CountingLoss()
        trainer = make_trainer(tmp_path, callback)
        trainer.compute_loss_func = loss
        attach(trainer, tmp_path, save_every=3, extras=extras)
        with stop_at(trainer, interrupt_at):
            trainer.train()
        counts.append((callback.num_steps, loss.num_calls, extras["steps"]))
        if not is_saved:
            monkeypatch.setenv(INJECT_VARIABLE, "callbacks/attributes")
    assert counts[0] == (17, 17, 17)
    assert counts[1] == ((END, END, END) if is_saved else (END - 15, END - 15, END))
