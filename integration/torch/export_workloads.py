"""A training of two steps, whose model an export is compared with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from digits import Digits
from sharded_workloads import Classifier, in_a_process_group
from tensor_classes import plain_parts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from resumekit.adapters.torch import Checkpointer


def made(kind: str) -> nn.Module:
    """A tied, frozen, bf16, adapted (LoRA) or quantized (int8) classifier."""
    model: Any = Classifier(tied=kind == "tied")
    if kind == "frozen":
        model.expand.requires_grad_(False)
    elif kind == "bf16":
        model.to(torch.bfloat16)
    elif kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["expand", "squeeze"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, before the first step
                nn.init.normal_(parameter)
    elif kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.expand, Int8WeightOnlyConfig())
        model.expand.weight.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def train(directory: str, *, kind: str) -> None:
    """Trains two steps, under FSDP2 where there are several ranks; saves each.

    Rank 0 writes the model of each step as torch gives it, beside the run directory.

    Args:
        directory: the run directory.
        kind: see ``made``; a quantized one is under DDP, because FSDP2 does not shard its class.
    """
    in_a_process_group(_train)(directory, layout="plain", kind=kind)


def _train(directory: str, *, layout: str, kind: str) -> None:
    torch.manual_seed(0)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model: Any = made(kind)
    if num_ranks > 1 and kind == "int8":
        # Its class has no view, which the first synchronisation needs; all ranks are alike.
        model = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=True, init_sync=False
        )
    elif num_ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, save_every=1, keep_latest=None)
    loader = torch.utils.data.DataLoader(Digits(16, augment=False), 8)
    with ckpt:
        for images, labels in ckpt.batches(loader, epochs=1):
            loss = nn.functional.cross_entropy(model(images.to(dtype)).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
            bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            whole = {
                name: each.full_tensor() if isinstance(each, DTensor) else each
                for name, each in bare.state_dict().items()
            }
            if os.environ.get("RANK", "0") == "0":
                path = Path(f"{directory}-step-{ckpt.progress.step}.pt")
                parts = {n: p for k, v in whole.items() for n, p in plain_parts(v, k).items()}
                torch.save({name: part.clone() for name, part in parts.items()}, path)
