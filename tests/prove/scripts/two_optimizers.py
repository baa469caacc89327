"""Two models that step in turn, and resume by themselves: ``two_optimizers.py DIR [--forget]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

folder = Path(sys.argv[1])
torch.manual_seed(0)
first, second = (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (first, second)]
live: dict[str, Any] = {
    "first": first,
    "second": second,
    "adam": optimizers[0],
    "other": optimizers[1],
}
done = 0
if (folder / "checkpoint.pt").exists():
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    for name, each in live.items():
        if name != "other" or "--forget" not in sys.argv:
            each.load_state_dict(state[name])
    torch.set_rng_state(state["rng"])
    done = state["step"]

for step in range(done + 1, 31):
    optimizer = optimizers[(step + 1) % 2]
    optimizer.zero_grad()
    second(first(torch.randn(8, 2))).square().mean().backward()
    optimizer.step()
    if step % 5 == 0:
        state = {name: each.state_dict() for name, each in live.items()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, folder / "temporary")
        (folder / "temporary").rename(folder / "checkpoint.pt")
