"""Trains and resumes by itself; nothing of resumekit is in it. It forgets one thing on request.

python unchanged_training.py DIRECTORY [--forget rng]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

NUM_STEPS, SAVE_EVERY, BATCH_SIZE = 20, 4, 8

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--forget", default="")
parser.add_argument("--resume")
parser.add_argument("--pause-seconds", type=float, default=0.0)
args = parser.parse_args()

args.directory.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
live: dict[str, Any] = {"model": model, "optimizer": optimizer, "averages": averages}
done = 0

paths = sorted(args.directory.glob("checkpoint-*"))
if args.resume or paths:
    state = torch.load(args.resume or paths[-1], weights_only=True)
    for name, each in live.items():
        if name == args.forget and name != "optimizer":
            continue
        if args.forget == "buffers" and name == "model":
            state[name] = {k: v for k, v in state[name].items() if "running" not in k}
        if args.forget == "head" and name == "model":
            state[name] = {k: v for k, v in state[name].items() if not k.startswith("3.")}
        each.load_state_dict(state[name], **({"strict": False} if name == "model" else {}))
    scheduler.load_state_dict(state["scheduler"])
    if args.forget == "optimizer":
        optimizer.state.clear()  # its learning rate is not forgotten
    if args.forget == "lr":
        for group in optimizer.param_groups:
            group["lr"] = 0.05
    if args.forget != "rng":
        torch.set_rng_state(state["rng"])
    done = state["step"]
    if args.forget == "everything":
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        optimizer.state.clear()
        done = 0

offset = 1 if done and args.forget == "batch" else 0
for step in range(done + 1, NUM_STEPS + 1):
    ids = torch.arange(BATCH_SIZE) * 5 + step + offset
    loss = model(data[ids % len(data)]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    averages.update_parameters(model)
    if step % SAVE_EVERY == 0:
        state = {name: each.state_dict() for name, each in live.items()}
        state |= {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(), "step": step}
        temporary = args.directory / "temporary"
        torch.save(state, temporary)
        temporary.rename(args.directory / f"checkpoint-{step:04d}.pt")
    time.sleep(args.pause_seconds)
