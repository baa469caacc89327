"""The model of a Trainer's checkpoint, opened by the stock libraries."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from trainer_workloads import causal, make
from transformers import PreTrainedModel, set_seed

from resumekit.adapters.transformers import ResumeCallback

needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="pip install peft")
# peft 0.21 asks for what transformers 5.23 has given another name.
of_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

# All but the classifier have weights under two names.
KINDS = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "classified": transformers.AutoModelForSequenceClassification,
}


def trained(directory: Path, kind: str, **arguments: Any) -> Any:
    set_seed(0)
    model, data, collator, trainer_class, arguments_class = make(kind)
    settings = arguments_class(
        output_dir=str(directory / "output"),
        max_steps=3,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    trainer = trainer_class(
        model, settings, train_dataset=data, eval_dataset=data, data_collator=collator
    )
    trainer.args.load_best_model_at_end = "metric_for_best_model" in arguments
    trainer.add_callback(ResumeCallback(trainer, directory / "run"))
    trainer.train()
    return trainer


def model_folder(directory: Path, step: int) -> Path:
    return directory / "run" / f"step-{step:08}" / "model"


def require_equal(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    states = found.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())


@pytest.mark.quick("causal")
@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_opens_the_step_directory(tmp_path: Path, kind: str) -> None:
    trainer = trained(tmp_path, kind)
    opened, info = KINDS[kind].from_pretrained(model_folder(tmp_path, 3), output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(opened, PreTrainedModel)
    assert type(opened) is type(trainer.model)
    require_equal(opened, trainer.model)


@needs_peft
@of_peft
def test_an_adapter_is_opened_over_its_base(tmp_path: Path) -> None:
    import peft

    trainer = trained(tmp_path, "lora")
    trainer.model.save_pretrained(tmp_path / "own")
    set_seed(0)  # the base has the weights that it had
    opened = peft.PeftModel.from_pretrained(causal(), model_folder(tmp_path, 3), is_trainable=True)
    require_equal(opened, trainer.model)
    set_seed(0)
    require_equal(peft.PeftModel.from_pretrained(causal(), tmp_path / "own"), trainer.model)


@pytest.mark.full
@needs_peft
@of_peft
def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the loss falls: the first one stays the best
    }
    trainer = trained(tmp_path, "lora", **best)
    folder = model_folder(tmp_path, 1)
    assert trainer.state.best_model_checkpoint == str(folder)
    import peft

    set_seed(0)
    require_equal(peft.PeftModel.from_pretrained(causal(), folder), trainer.model)
    assert not list(tmp_path.glob("output/checkpoint-*"))
