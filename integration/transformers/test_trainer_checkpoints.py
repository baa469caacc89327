"""The Trainer's own checkpoints next to those of the run: which are reported, kept and loaded."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from small_trainer import STEPS_PER_EPOCH, Recorder, attach, interrupted, make_trainer, stop_at
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers_workloads import NUM_BLOCKS, Blocks

from resumekit.adapters.transformers import ResumeCallback
from resumekit.diff import compare_checkpoints
from resumekit.errors import ConfigurationError, ResumekitError
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store

END = 2 * STEPS_PER_EPOCH
EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the loss falls: the first one stays the best
}


def continued(directory: Path, **arguments: Any) -> Trainer:
    trainer = make_trainer(directory, **arguments)
    attach(trainer, directory, save_every=3)
    return trainer


def with_the_best(
    directory: Path,
    *callbacks: TrainerCallback,
    limit: int | None = None,
    async_save: bool = False,
) -> Trainer:
    """One that loads the best model of the run at the end, and saves nothing by itself."""
    trainer = make_trainer(directory, *callbacks, save_total_limit=limit, **EVALUATED)
    trainer.args.load_best_model_at_end = True  # TrainingArguments() takes it with its saving only
    attach(trainer, directory, save_every=3, async_save=async_save)
    return trainer


def require_equal(trainer: Trainer, other: torch.nn.Module) -> None:
    expected = other.state_dict()
    assert all(torch.equal(expected[k], v) for k, v in trainer.model.state_dict().items())


@pytest.mark.full
@pytest.mark.parametrize("given", [True, "True", "run", False], ids=str)
def test_to_resume_is_what_it_does_anyway(tmp_path: Path, given: bool | str) -> None:
    asked = str(tmp_path / given) if given == "run" else given
    whole = continued(tmp_path / "whole")
    whole.train()
    trainer = continued(tmp_path)  # where there is no checkpoint yet
    trainer.args.resume_from_checkpoint = asked  # type: ignore[assignment]
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    require_equal(trainer, whole.model)
    shutil.rmtree(tmp_path / "run")
    interrupted(tmp_path, 17)
    trainer = continued(tmp_path)
    result = trainer.train(resume_from_checkpoint=asked)
    assert result.global_step == END
    require_equal(trainer, whole.model)


@pytest.mark.parametrize("relative", [False, True])
def test_a_step_of_the_run_is_resumed_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = continued(tmp_path / "whole")
    whole.train()
    interrupted(tmp_path, 17)
    recorder = Recorder()
    path = "run/step-00000012"
    trainer = make_trainer(tmp_path, recorder)
    attach(trainer, tmp_path, save_every=3)
    trainer.train(resume_from_checkpoint=path if relative else tmp_path / path)
    assert recorder.begun_at == [12]
    require_equal(trainer, whole.model)
    again = continued(tmp_path)
    assert again.train(resume_from_checkpoint=path).global_step == END  # the same command
    lacking = make_trainer(tmp_path / "lacking")
    interrupted(tmp_path / "lacking", 17)
    attach(lacking, tmp_path / "lacking", exclude={"optimizer"})
    lacking.train(resume_from_checkpoint=tmp_path / "lacking" / path)
    with pytest.raises(AssertionError):
        require_equal(lacking, whole.model)


@pytest.mark.parametrize(
    ("holds", "path", "remedy"),
    [
        (
            False,
            "output/checkpoint-5",
            "the Trainer at step 5, .* begin a new one from its",
        ),
        (
            *(True, "output/checkpoint-5"),
            r"a checkpoint of the Trainer at step 5, and .*step-.* Call trainer\.train\(\) alone",
        ),
        (True, "checkpoint-5", r"no such file or directory, and .* Call trainer\.train\(\) alone"),
        (True, "run/step-00000099", "no such checkpoint"),
    ],
)
def test_a_path_is_refused_before_anything_is_loaded(
    tmp_path: Path, holds: bool, path: str, remedy: str
) -> None:
    make_trainer(tmp_path, save_strategy="steps", save_steps=5, max_steps=5).train()
    if holds:
        interrupted(tmp_path, 17)
    saving: dict[str, Any] = {} if holds else {"save_strategy": "steps", "save_steps": 5}
    trainer, untouched = continued(tmp_path, **saving), make_trainer(tmp_path)
    with pytest.raises(ResumekitError, match=remedy):
        trainer.train(resume_from_checkpoint=str(tmp_path / path))
    require_equal(trainer, untouched.model)


@pytest.mark.full
def test_the_newest_that_the_trainer_saved_is_what_scripts_give(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    whole = continued(tmp_path / "whole", **saving)
    whole.train()
    interrupted(tmp_path, 17, **saving)
    newest = get_last_checkpoint(str(tmp_path / "output"))
    assert newest is not None
    trainer = continued(tmp_path, **saving)
    with pytest.raises(ConfigurationError, match=r"Call trainer\.train\(\) alone"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-12"))
    trainer.train(resume_from_checkpoint=newest)
    require_equal(trainer, whole.model)


def test_trials_of_a_search_are_not_taken_for_one_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a directory for each trial"):
        continued(tmp_path).train(trial={"learning_rate": 0.1})


def reported(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if "Trainer's own" in line]


@pytest.mark.full
def test_a_newer_checkpoint_of_its_own_is_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    interrupted(tmp_path, 17, **saving)  # it has saved the steps 4 to 16, the run 3 to 15
    assert not reported(capfd)
    continued(tmp_path, **saving).train()
    (line,) = reported(capfd)
    assert "output/checkpoint-16 is" in line
    assert "newer than step 15" in line
    continued(tmp_path, **saving).train()  # the run is over
    assert not reported(capfd)
    shutil.rmtree(tmp_path / "run")
    continued(tmp_path).train()
    (line,) = reported(capfd)
    assert f"output/checkpoint-{END} is" in line
    assert "newer than step 0" in line


class Seen(TrainerCallback):
    """The best that is known when a step begins."""

    def __init__(self) -> None:
        self.folders: dict[int, str | None] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folders[state.global_step] = state.best_model_checkpoint


@pytest.mark.full
def test_without_its_own_saving_the_best_is_that_of_the_run(tmp_path: Path) -> None:
    seen = Seen()
    trainer = make_trainer(tmp_path, seen, **{**EVALUATED, "greater_is_better": False})
    attach(trainer, tmp_path, save_every=3)
    trainer.train()
    assert not list((tmp_path / "output").glob("checkpoint-*"))
    best = {step: folder and Path(folder).parent.name for step, folder in seen.folders.items()}
    assert [best[3], best[4], best[7], best[8]] == [
        None,
        "step-00000004",
        "step-00000004",
        "step-00000008",
    ]
    folder = Path(str(trainer.state.best_model_checkpoint))
    assert folder == tmp_path / "run" / f"step-{END:08}" / "model"
    require_equal(trainer, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.quick("True")
@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_model_of_the_run_is_loaded_at_the_end(tmp_path: Path, async_save: bool) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    make_trainer(first, save_strategy="steps", save_steps=5, max_steps=10).train()
    whole = with_the_best(tmp_path / "whole")
    whole.train()
    require_equal(whole, AutoModelForCausalLM.from_pretrained(whole.state.best_model_checkpoint))

    interrupted(first, 17, **EVALUATED)
    first.rename(moved)
    seen = Seen()
    trainer = with_the_best(moved, seen, limit=1, async_save=async_save)
    trainer.train()
    best = str(moved / "run" / "step-00000004" / "model")
    assert set(seen.folders.values()) == {best}
    assert trainer.state.best_model_checkpoint == best
    require_equal(trainer, whole.model)
    again = with_the_best(moved, async_save=async_save)
    again.train()  # nothing is left to train
    require_equal(again, whole.model)
    # What a run before has left there is not in the way of the limit.
    assert len(list((moved / "output").glob("checkpoint-*"))) == 2
    assert trainer.args.save_total_limit == 1


@pytest.mark.full
def test_a_best_model_that_nobody_can_name_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_strategy="epoch")
    trainer.args.load_best_model_at_end = True
    attach(trainer, tmp_path)
    with pytest.raises(ConfigurationError, match="metric_for_best_model"):
        trainer.train()


@pytest.mark.full
def test_a_best_model_that_is_sharded_is_not_promised(tmp_path: Path) -> None:
    trainer = with_the_best(tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigurationError, match="resumekit export"):
        trainer.train()


@pytest.mark.full
def test_a_best_checkpoint_of_its_own_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    arguments = {**EVALUATED, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    interrupted(tmp_path, 17, **arguments)
    shutil.rmtree(tmp_path / "output")
    trainer = continued(tmp_path, **arguments)
    trainer.train()
    assert trainer.state.global_step == END
    assert trainer.state.best_model_checkpoint is None


@pytest.mark.parametrize("num_evaluated", [NUM_BLOCKS, NUM_BLOCKS - 1])
def test_a_comparison_of_two_runs_leaves_out_times_and_no_metrics(
    tmp_path: Path, num_evaluated: int
) -> None:
    for name, num in (("a", NUM_BLOCKS), ("b", num_evaluated)):
        directory = tmp_path / name
        directory.mkdir()
        trainer = make_trainer(directory, eval_strategy="steps", eval_steps=5)
        trainer.eval_dataset = Subset(Blocks(augment=False), range(num))
        attach(trainer, directory, save_every=12)
        with stop_at(trainer, 13):
            trainer.train()
    stores = [Store(tmp_path / name / "run") for name in ("a", "b")]
    found = compare_checkpoints(*(store.open_step(StepName(12)) for store in stores))
    assert found.is_equal == (num_evaluated == NUM_BLOCKS), found.verdict
    assert found.verdict.endswith("; not compared: 6 times")
    differing = [each for each in found.components if not each.is_equal]
    names = [value.name for each in differing for value in each.values]
    assert all(name.endswith("].eval_loss") for name in names), names


# What is relied on that transformers does not document. One that fails here has moved.


def test_pin_the_signature_of_train_and_the_order_of_its_end() -> None:
    assert list(inspect.signature(Trainer.train).parameters)[:3] == [
        "self",
        "resume_from_checkpoint",
        "trial",
    ]
    end = inspect.getsource(Trainer._finalize_training)
    assert end.index("_load_best_model()") < end.index("save_total_limit == 1")
    assert end.index("save_total_limit == 1") < end.index("on_train_end(")


# ---------------------------------------------------------------- mistakes


def test_a_callback_without_its_trainer_is_answered_with_the_right_call(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    right = r'ResumeCallback\(trainer, "runs/a"\)'
    with pytest.raises(ConfigurationError, match=right):
        Trainer(model=trainer.model, callbacks=[ResumeCallback(str(tmp_path))])
    with pytest.raises(ConfigurationError, match=right):
        Trainer(model=trainer.model, callbacks=[ResumeCallback])
    with pytest.raises(ConfigurationError, match=right):
        ResumeCallback(str(tmp_path), trainer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="directory"):
        ResumeCallback(trainer)
    with pytest.raises(ConfigurationError, match="s3://"):
        ResumeCallback(trainer, "s3://bucket/a")
    with pytest.raises(ConfigurationError, match="extras"):
        ResumeCallback(trainer, tmp_path, extras=[1])  # type: ignore[arg-type]
