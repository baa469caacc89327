"""A small causal transformer and the batches of ``nanogpt.py`` and ``nanogpt_bare.py``."""

from __future__ import annotations

import math

import torch
from torch import nn

BLOCK_SIZE, VOCABULARY, WIDTH = 12, 16, 16
MAX_LR, WARMUP, LAST_STEP = 2e-2, 3, 16


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK_SIZE, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, nhead=2, dim_feedforward=32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        size = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions(torch.arange(size))
        mask = nn.Transformer.generate_square_subsequent_mask(size)
        hidden = self.block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def make_data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = (torch.randint(0, 3, (600,), generator=generator).cumsum(0)) % VOCABULARY
    return {"train": tokens[:500], "val": tokens[500:]}


def get_batch(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces at offsets that the global generator draws, and the same shifted by one token."""
    offsets = torch.randint(len(tokens) - BLOCK_SIZE - 1, (4,)).tolist()
    inputs = torch.stack([tokens[i : i + BLOCK_SIZE] for i in offsets])
    targets = torch.stack([tokens[i + 1 : i + 1 + BLOCK_SIZE] for i in offsets])
    return inputs, targets


def learning_rate(step: int) -> float:
    """A warmup and half a cosine, by the number of the step alone."""
    if step < WARMUP:
        return MAX_LR * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (LAST_STEP - WARMUP)
    return MAX_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def estimate_loss(model: nn.Module, tokens: torch.Tensor) -> float:
    """The mean loss of three batches, drawn by the global generator."""
    model.eval()
    losses = [model(*get_batch(tokens)).item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)
