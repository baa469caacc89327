"""``fsdp2_pretrain.py`` with a resume of its own: ``torch.distributed.checkpoint``.

It follows PyTorch's tutorial "Getting Started with Distributed Checkpoint (DCP)".

Prove: resumekit prove --at step:45 --world 2 -- python examples/stock/fsdp2_pretrain.py --dir {dir}
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH, WIDTH, NUM_HEADS, NUM_LAYERS = 64, 64, 4, 2


class Sources(Dataset):
    """Windows of the interpreter's own sources; a byte is a token."""

    def __init__(self, num_windows):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.stride = (len(text) - LENGTH - 1) // num_windows
        self.num_windows = num_windows

    def __len__(self):
        return self.num_windows

    def __getitem__(self, index):
        window = self.tokens[index * self.stride :][: LENGTH + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * NUM_HEADS, -1)).transpose(1, 2)
        attention = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens, targets):
        x = self.bytes(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/fsdp2_pretrain")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=1600)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (world_size,))

    torch.manual_seed(0)
    model = Transformer().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # each rank drops other units

    data = Sources(args.windows)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    steps_per_epoch = len(loader) // args.accumulate

    start_step = 0
    checkpoints = sorted(path.parent for path in Path(args.dir).glob("step-*/.metadata"))
    if checkpoints:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=checkpoints[-1])
        start_step = int(checkpoints[-1].name.removeprefix("step-"))
    for epoch in range(start_step // steps_per_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for index, (tokens, targets) in enumerate(loader):
            if epoch * steps_per_epoch + index // args.accumulate < start_step:
                continue  # used before the kill
            is_last = (index + 1) % args.accumulate == 0
            model.set_requires_gradient_sync(is_last)
            loss = model(tokens.to(device), targets.to(device))
            (loss / args.accumulate).backward()
            if not is_last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step = epoch * steps_per_epoch + (index + 1) // args.accumulate
            if rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step % 10 == 0:
                path = f"{args.dir}/step-{step:06d}"
                dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
