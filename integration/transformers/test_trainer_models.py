"""The model of a Trainer's checkpoint, opened by the stock libraries."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from frozen_backbone import require_exact_and_linked
from preloads import TRAINER
from safetensors.torch import load_file
from trainer_workloads import LARGE, causal, make, train
from transformers import PreTrainedModel, set_seed

from resumekit.adapters.transformers import ResumeCallback
from resumekit.export import export_model
from resumekit.storage.store import Store
from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = TRAINER

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


@needs_peft
@of_peft
@pytest.mark.quick("True")
@pytest.mark.parametrize("async_save", [False, True])
def test_a_frozen_base_is_linked_and_continues_exactly(kit: Kit, async_save: bool) -> None:
    import peft

    newest = require_exact_and_linked(kit, frozen("large lora", async_save=async_save))
    set_seed(0)
    base = causal(LARGE)
    expected = {name: weight.clone() for name, weight in base.state_dict().items()}
    opened = peft.PeftModel.from_pretrained(base, newest / "model")
    found = opened.get_base_model().state_dict()
    assert all(
        torch.equal(found[key.replace("c_attn", "c_attn.base_layer")], expected[key])
        if "c_attn" in key
        else torch.equal(found[key], expected[key])
        for key in expected
    )


@pytest.mark.full
@pytest.mark.parametrize("async_save", [False, True])
def test_frozen_blocks_are_linked_and_opened_by_from_pretrained(
    kit: Kit, tmp_path: Path, async_save: bool
) -> None:
    newest = require_exact_and_linked(kit, frozen("frozen blocks", async_save=async_save))
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        newest / "model", output_loading_info=True
    )
    assert not any(info.values()), info
    store = Store(newest.parent)
    export_model(store.open_step(store.step_names()[0]), tmp_path / "model.safetensors")
    exported, found = load_file(tmp_path / "model.safetensors"), opened.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in exported.items())
    set_seed(0)
    begun = make("frozen blocks")[0].state_dict()
    same = {name for name, weight in begun.items() if torch.equal(weight, found[name])}
    assert same == {name for name in begun if name.startswith("transformer.h.")}


def frozen(kind: str, *, async_save: bool) -> Cell:
    options = {"kind": kind, "save_every": 1, "keep_latest": None, "async_save": async_save}
    return Cell(train, options, 1, (KillPoint.step(4), KillPoint.step(8)))
