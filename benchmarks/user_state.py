"""What a check of user state costs: at a save, and after the first two steps of a launch.

The check is compared with the bare step and the bare save (``torch.save`` of model and optimizer)
of the same model in the same process, and with the speed of memory: xxh3 over as many bytes.

Run: python benchmarks/user_state.py [--quick]
"""

from __future__ import annotations

import io
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from measuring import Findings, durations, parser_for
from torch import nn

from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.user_state import UserState

Transition = namedtuple("Transition", "obs action reward")
Row = tuple[str, ...]
HEADINGS = ("workload", "modules", "check ms", "save ms", "check/step", "save/bare", "xxh3 ms")


class Block(nn.Module):
    """A layer with as many modules as one of the real model has."""

    def __init__(self, width: int, num_modules: int) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.ModuleList(
            nn.Linear(width, width) if index % 2 else nn.Dropout(0.1)
            for index in range(num_modules)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(num_layers: int, num_modules: int, width: int) -> nn.Sequential:
    """A model with this number of layers and modules."""
    return nn.Sequential(*(Block(width, num_modules) for _ in range(num_layers)))


def buffer_of(num_bytes: int, obs_bytes: int) -> deque[Transition]:
    """A replay buffer of transitions."""
    count = num_bytes // obs_bytes
    return deque(
        (Transition(np.full(obs_bytes, i % 256, np.uint8), i, 0.5) for i in range(count)),
        maxlen=count,
    )


def measure(name: str, model: nn.Module, width: int, repeats: int, buffer: Any = None) -> Row:
    """One row: a check and the state of a save, compared with the bare step and save."""
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(8, width)

    def best_of(action: Callable[[], Any]) -> float:
        return min(durations(action, repeats))

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def save() -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], io.BytesIO())

    step()
    if buffer is not None:
        model.replay = buffer  # type: ignore[assignment]
    state = UserState({"model": Holder(model, is_component=True)}, key="model/attributes")
    if buffer is not None:
        buffer.append(buffer[0])  # it has changed, so a save holds it
    check, encode = best_of(state.findings), best_of(state.state_dict)
    bare_step, bare_save = best_of(step), best_of(save)
    num_bytes = sum(p.nbytes for p in model.parameters()) if buffer is None else 10**8
    raw = bytes(num_bytes)
    limit = best_of(lambda: xxhash.xxh3_128_digest(raw))
    num_modules = sum(1 for _ in model.modules())
    return (
        name,
        str(num_modules),
        f"{check * 1e3:.1f}",
        f"{encode * 1e3:.1f}",
        f"{check / bare_step:.2f}",
        f"{encode / bare_save:.2f}",
        f"{limit * 1e3:.2f}",
    )


def main() -> None:
    """Measures modules and replay buffers."""
    parser = parser_for(__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat, smaller models")
    arguments = parser.parse_args()
    quick = arguments.quick
    repeats, width = (1, 32) if quick else (5, 128)
    rows = [
        measure("BERT-base modules", model_of(12, 18, width), width, repeats),
        measure("Llama-7B modules", model_of(32, 14, width), width, repeats),
    ]
    for obs_bytes in (84 * 84, 1024):
        buffer = buffer_of(10**7 if quick else 10**8, obs_bytes)
        name = f"replay buffer, {obs_bytes} B each"
        rows.append(measure(name, model_of(1, 2, width), width, repeats, buffer))
    Findings(
        "user-state",
        heading="What the search for user state costs",
        before=[
            "`python benchmarks/user_state.py --record`: a check and the state of a save, compared",
            "with a bare training step and with `torch.save` of the model and AdamW; xxh3 over the",
            "same bytes is the limit.",
        ],
        title=f"the search for user state, width {width}, the best of {repeats}",
        headings=HEADINGS,
        rows=rows,
        packages=("torch", "numpy", "xxhash"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
