"""What stands beside the weights of a checkpoint, so that ``from_pretrained`` opens it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from resumekit.state import SharingPattern, Slot, StateComponent

_WEIGHTS = "rank-00000.safetensors"


def with_files(component: StateComponent, model: nn.Module) -> StateComponent:
    """The component, with the files of its model if it is the Trainer's model.

    Args:
        component: of the run.
        model: the Trainer's.
    """
    if component.key != Slot.MODEL.value:
        return component
    is_whole = component.sharing_pattern is SharingPattern.REPLICATED
    model = getattr(model, "_fsdp_wrapped_module", model)  # torch 2.13: of the first FSDP
    return replace(component, files=lambda: _files(model, is_whole=is_whole))


def _files(model: Any, *, is_whole: bool) -> Mapping[str, bytes]:
    """By name; where the weights are in parts, only what an export needs beside its file."""
    files: dict[str, bytes] = {}
    if isinstance(model, PreTrainedModel):
        files.update(_configurations(model))
    if is_whole:
        # transformers 5.23 utils/hub.py get_checkpoint_shard_files: an index may name any file.
        index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), _WEIGHTS)}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
        if hasattr(model, "peft_config"):
            files.update(_adapter(model))
    return files


def _configurations(model: PreTrainedModel) -> Mapping[str, bytes]:
    """What ``PreTrainedModel.save_pretrained`` writes beside the weights."""
    config = deepcopy(model.config)
    # torch 2.13 distributed/fsdp/_fully_shard: fully_shard makes a class of its own of each model.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    texts = {"config.json": config.to_json_string()}
    if model.can_generate() and model.generation_config is not None:
        texts["generation_config.json"] = model.generation_config.to_json_string()
    return {name: text.encode() for name, text in texts.items()}


def _adapter(model: Any) -> Mapping[str, bytes]:
    """The adapter that is trained, as peft 0.21 ``PeftModel.save_pretrained`` writes it."""
    from peft import get_peft_model_state_dict

    name = model.active_adapters[0]
    weights = get_peft_model_state_dict(model, adapter_name=name)
    config = deepcopy(model.peft_config[name])
    config.inference_mode = True
    return {
        "adapter_model.safetensors": save(
            {key: value.detach().cpu().clone() for key, value in weights.items()},
            metadata={"format": "pt"},
        ),
        "adapter_config.json": json.dumps(config.to_dict(), indent=2, default=sorted).encode(),
    }
