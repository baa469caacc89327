"""Two ranks under a wrapper, with a resume of their own; nothing of resumekit is in it.

torchrun --nproc-per-node=2 wrapped_training.py DIRECTORY {ddp,fsdp1,fsdp2} [--forget]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

folder, kind = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
if kind == "fsdp2":
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
elif kind == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
torch.manual_seed(rank)


def local_parameters() -> list[torch.Tensor]:
    """What this rank has of each parameter."""
    parameters: list[Any] = list(model.parameters())
    return [each.to_local() if kind == "fsdp2" else each for each in parameters]


done = 0
path = folder / f"checkpoint-{rank}.pt"
if path.exists():
    state = torch.load(path, weights_only=False)
    with torch.no_grad():
        for mine, saved in zip(local_parameters(), state["parameters"], strict=True):
            mine.copy_(saved)
    if "--forget" not in sys.argv:
        optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    done = state["step"]

for step in range(done + 1, 16):
    optimizer.zero_grad()
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    if step % 5 == 0:
        state = {
            "parameters": [each.detach().clone() for each in local_parameters()],
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, folder / f"temporary-{rank}")
        dist.barrier()
        (folder / f"temporary-{rank}").rename(path)
        dist.barrier()
dist.destroy_process_group()
