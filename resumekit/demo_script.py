"""A small transformer learns to read Python: the training script behind ``resumekit demo``.

It is an ordinary script, as you would write your own. Run it twice with the same command and kill
it in between: the second run continues where the first one stopped, to the last bit.

    python -m resumekit.demo_script runs/demo
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from resumekit.adapters.torch import Checkpointer

NUM_BYTES = 256
BLANK = 0  # the byte that a hidden character is replaced by


class PythonSources(Dataset[tuple[Tensor, Tensor]]):
    """Windows of the interpreter's own library sources, some of their bytes hidden at random.

    Args:
        num_windows: how many windows, evenly distributed over the sources.
        length: bytes in a window.
        hidden: the fraction of input bytes that is hidden, drawn again each time a window is read.
    """

    def __init__(self, num_windows: int, *, length: int, hidden: float) -> None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.stride = (len(text) - length - 1) // num_windows
        self.num_windows, self.length, self.hidden = num_windows, length, hidden

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.stride :][: self.length + 1].long()
        inputs, targets = window[:-1].clone(), window[1:]
        for position in random.sample(range(self.length), int(self.hidden * self.length)):
            inputs[position] = BLANK
        return inputs, targets


class Transformer(nn.Module):
    """A causal byte-level transformer with dropout.

    Args:
        width: features per position.
        num_layers: how many layers.
        length: the longest input in bytes.
        dropout: the fraction of activations that is dropped.
    """

    def __init__(self, *, width: int, num_layers: int, length: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=dropout, batch_first=True, norm_first=True
        )
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_BYTES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of each next byte, (batch, length, 256), from bytes, (batch, length)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.bytes(inputs) + self.positions(positions)
        logits: Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def main() -> None:
    """Trains until the last step, from wherever the run directory says the run is."""
    parser = argparse.ArgumentParser(description="Train a small transformer on Python's sources.")
    parser.add_argument("run_directory")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps-per-epoch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    if args.device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS needs it to be deterministic
        torch.use_deterministic_algorithms(True)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # enough for small matrices, also where cores are shared
    dataset = PythonSources(16 * args.steps_per_epoch, length=96, hidden=0.1)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)

    model = Transformer(width=96, num_layers=2, length=96, dropout=0.1).to(args.device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=args.epochs * args.steps_per_epoch
    )

    ckpt = Checkpointer(
        args.run_directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        ema=average,
        save_every=20,
    )
    for inputs, targets in ckpt.batches(loader, epochs=args.epochs):
        inputs, targets = inputs.to(args.device), targets.to(args.device)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        ckpt.step(loss=loss)
        if ckpt.progress.step % 20 == 0:
            print(f"step {ckpt.progress.step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
