"""A language model that carries its hidden state, with a learning rate annealed by hand.

``--bare`` keeps both in local variables.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from judged_script import arguments, record
from torch import nn
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer

VOCABULARY, WIDTH, BATCH_SIZE, PIECE, NUM_EPOCHS = 12, 12, 4, 5, 4

Hidden = tuple[torch.Tensor, torch.Tensor]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        outputs, hidden = self.rnn(self.dropout(self.tokens(tokens)), hidden)
        return self.head(outputs), hidden

    def init_hidden(self) -> Hidden:
        return torch.zeros(1, BATCH_SIZE, WIDTH), torch.zeros(1, BATCH_SIZE, WIDTH)


def make_corpus(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 4, (size * PIECE + 1, BATCH_SIZE), generator=generator)
    return steps.cumsum(0) % VOCABULARY


def get_batch(corpus: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    return corpus[start : start + PIECE], corpus[start + 1 : start + 1 + PIECE]


def repackage(hidden: Hidden) -> Hidden:
    return hidden[0].detach(), hidden[1].detach()


def loss_of(model: nn.Module, batch: Any, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
    outputs, hidden = model(batch[0], hidden)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten()), hidden


@torch.no_grad()
def evaluate(model: LanguageModel, corpus: torch.Tensor) -> float:
    model.eval()
    hidden, total = model.init_hidden(), 0.0
    for start in range(0, len(corpus) - 1, PIECE):
        loss, hidden = loss_of(model, get_batch(corpus, start), hidden)
        total += loss.item()
    model.train()
    return round(total, 1)  # coarse, so that some epochs do not improve


def train_bare(args: argparse.Namespace) -> None:
    corpus, validation = make_corpus(5, 1), make_corpus(2, 2)
    starts = DataLoader(range(0, len(corpus) - 1, PIECE), batch_size=None)
    model = LanguageModel()
    lr = 20.0
    best_val_loss = None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    ckpt = Checkpointer(
        args.directory,
        model=model,
        optimizer=optimizer,
        save_every=3,
        strict=args.strict,
        loop_variables=args.loop_variables,
    )
    for epoch in ckpt.epochs(NUM_EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = lr
        hidden = model.init_hidden()
        for start in ckpt.batches(starts):
            batch = get_batch(corpus, start)
            hidden = repackage(hidden)
            optimizer.zero_grad()
            loss, hidden = loss_of(model, batch, hidden)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            step = epoch * len(starts) + start // PIECE + 1
            state = {"hidden": hidden, "lr": lr, "best_val_loss": best_val_loss}
            record(step, loss=loss, optimizers=optimizer, inputs=batch, state=state)
            ckpt.step(loss=loss)
        val_loss = evaluate(model, validation)
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0


def train(args: argparse.Namespace) -> None:
    corpus, validation = make_corpus(5, 1), make_corpus(2, 2)
    starts = DataLoader(range(0, len(corpus) - 1, PIECE), batch_size=None)
    model = LanguageModel()
    extras: dict[str, Any] = {"lr": 20.0, "best_val_loss": None, "hidden": model.init_hidden()}
    optimizer = torch.optim.SGD(model.parameters(), lr=extras["lr"])
    ckpt = Checkpointer(
        args.directory,
        model=model,
        optimizer=optimizer,
        extras=extras,
        save_every=3,
        strict=args.strict,
        loop_variables=args.loop_variables,
    )
    for epoch in ckpt.epochs(NUM_EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = extras["lr"]
        batches = ckpt.batches(starts)
        if batches.initial == 0:  # not in the rest of an interrupted epoch
            extras["hidden"] = model.init_hidden()
        for start in batches:
            batch = get_batch(corpus, start)
            extras["hidden"] = repackage(extras["hidden"])
            optimizer.zero_grad()
            loss, extras["hidden"] = loss_of(model, batch, extras["hidden"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            step = epoch * len(starts) + start // PIECE + 1
            record(step, loss=loss, optimizers=optimizer, inputs=batch, state=extras)
            ckpt.step(loss=loss)
        val_loss = evaluate(model, validation)
        if extras["best_val_loss"] is None or val_loss < extras["best_val_loss"]:
            extras["best_val_loss"] = val_loss
        else:
            extras["lr"] /= 4.0


if __name__ == "__main__":
    args = arguments()
    torch.manual_seed(0)
    (train_bare if args.bare else train)(args)
