"""The Trainer with FSDP2 and with DeepSpeed's ZeRO: killed, it continues with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from preloads import TRAINER

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

import torch
from safetensors.torch import load_file
from trainer_sharded_workloads import train
from trainer_workloads import NUM_VIRTUAL, causal, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from resumekit.errors import StateMismatchError
from resumekit.export import export_model
from resumekit.storage.store import Store
from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = TRAINER
# An epoch has 6 steps on two ranks.
KILLS = {
    "mid-epoch 0": (KillPoint.step(4),),
    "on the boundary": (KillPoint.checkpoint(6),),
    "twice in one epoch": (KillPoint.step(8), KillPoint.step(11)),
}


def cell(kills: tuple[KillPoint, ...], **options: Any) -> Cell:
    return Cell(train, {"save_every": 3, **options}, 2, kills)


@pytest.mark.quick("FSDP2-twice in one epoch")
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_a_killed_run_continues_exactly(kit: Kit, sharding: str, kill: str) -> None:
    kit.assert_exact(cell(KILLS[kill], sharding=sharding))


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_accumulated_and_evaluated_it_continues_exactly(kit: Kit, sharding: str) -> None:
    options = {"sharding": sharding, "accumulate": 4, "evaluate": "epoch", "save_every": 1}
    kit.assert_exact(cell((KillPoint.step(2), KillPoint.step(3)), **options))


@pytest.mark.quick("FSDP2-optimizer")
@pytest.mark.parametrize("component", ["optimizer", "rng"])
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, sharding: str, component: str) -> None:
    kit.assert_caught(cell((KillPoint.step(5),), sharding=sharding), component)


@pytest.mark.quick("FSDP2")
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_from_pretrained_opens_what_the_export_wrote(
    kit: Kit, tmp_path: Path, sharding: str
) -> None:
    run = kit.run_uninterrupted(cell((), sharding=sharding)).directory / "training"
    step = run / "run" / "step-00000012"
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(step / "model")
    store = Store(run / "run")
    written, exported = store.open_step(store.step_names()[0]), tmp_path / "exported"
    export_model(written, exported, to="pretrained", max_shard_bytes=20_000)
    assert len([*exported.glob("*.safetensors")]) > 1
    opened, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    expected = load_file(run / "expected-0.safetensors")
    found = opened.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(expected[key], value) for key, value in found.items())


def trained_with(kit: Kit, sharding: str, adapter: str) -> Path:
    """The directory of a run with an adapter of PEFT."""
    run = kit.run_again(kit.new_run(cell((), sharding=sharding, adapter=adapter)))
    assert not run.failure, run.failure
    return run.directory / "training"


# peft 0.21 peft_model.py asks for a property that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.full
@pytest.mark.parametrize(
    ("sharding", "adapter"),
    [("FSDP2", "lora"), ("ZeRO-2", "lora"), ("FSDP2", "prompt"), ("FSDP2", "prefix")],
)
def test_the_adapter_of_a_sharded_model_is_exported_with_the_tokenizer(
    kit: Kit, tmp_path: Path, sharding: str, adapter: str
) -> None:
    peft = pytest.importorskip("peft")
    training, exported = trained_with(kit, sharding, adapter), tmp_path / "exported"
    store = Store(training / "run")
    export_model(store.open_step(store.step_names()[0]), exported, to="pretrained")
    assert not (exported / "model.safetensors").exists()
    set_seed(0)  # the base has the weights that it had
    base = causal(more=0 if adapter == "lora" else NUM_VIRTUAL)
    found = peft.PeftModel.from_pretrained(base, exported).state_dict()
    expected = load_file(training / "expected-0.safetensors")
    trained = [n for n in expected if "lora_B" in n or "prompt_encoder" in n]
    assert any(expected[name].count_nonzero() for name in trained)
    assert found.keys() == expected.keys()
    assert all(torch.equal(expected[key], value) for key, value in found.items())
    opened = AutoTokenizer.from_pretrained(exported)
    assert opened("7 8 9") == tokenizer()("7 8 9")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.full
@pytest.mark.parametrize(("sharding", "adapter"), [("FSDP2", "p"), ("FSDP1", "lora")])
def test_an_adapter_that_is_computed_or_not_found_is_refused(
    kit: Kit, tmp_path: Path, sharding: str, adapter: str
) -> None:
    pytest.importorskip("peft")
    store = Store(trained_with(kit, sharding, adapter) / "run")
    with pytest.raises(StateMismatchError, match=r"no config\.json"):
        export_model(store.open_step(store.step_names()[0]), tmp_path / "out", to="pretrained")
