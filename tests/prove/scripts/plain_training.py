"""A training script with a hand-made resume that is right, or wrong in one known way.

It does not use resumekit, apart from the one line that traces it. Each launch continues from the
newest checkpoint in its directory.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import resumekit

NUM_SAMPLES, BATCH_SIZE = 48, 8


class OddOptimizer(torch.optim.Optimizer):
    """Its learning rate is no number."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], {"lr": "high"})

    def step(self, closure: Any = None) -> Any:
        """Changes nothing."""


def train(
    directory: str,
    *,
    wrong: str = "",
    num_epochs: int = 3,
    save_every: int = 4,
    pause_seconds: float = 0.0,
) -> None:
    """Trains a tiny model with dropout, momentum and a falling learning rate.

    Args:
        wrong: what the resume forgets: ``model``, ``optimizer``, ``lr``, ``rng``, ``order``,
            ``step`` (one batch is skipped) or ``everything``.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank)
    data = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    if world_size > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.97**done)
    live = {"model": model, "optimizer": optimizer, "lr": scheduler}
    done = resume(Path(directory), live, rank, world_size, wrong)

    global_batch = BATCH_SIZE * world_size
    batches_per_epoch = NUM_SAMPLES // global_batch
    for step in range(done + 1, num_epochs * batches_per_epoch + 1):
        epoch, batch = divmod(step - 1, batches_per_epoch)
        seed = epoch if wrong != "order" else 1000 * done + epoch
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed))
        ids = order[batch * global_batch + rank :][: global_batch - rank : world_size]
        optimizer.zero_grad()
        loss = model(data[ids]).square().mean()
        loss.backward()
        for parameter in model.parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        scheduler.step()
        time.sleep(pause_seconds)
        resumekit.trace(
            step,
            epoch=epoch,
            batch=batch,
            samples=ids,
            loss=loss,
            model=model,
            optimizer=optimizer,
        )
        if step % save_every == 0:
            save(Path(directory), live, rank, step)
    if world_size > 1:
        dist.destroy_process_group()


def save(directory: Path, live: dict[str, Any], rank: int, step: int) -> None:
    state: dict[str, Any] = {name: value.state_dict() for name, value in live.items()}
    state["rng"] = torch.get_rng_state()
    path = directory / f"checkpoint-{step:04d}-rank-{rank}.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def resume(directory: Path, live: dict[str, Any], rank: int, world_size: int, wrong: str) -> int:
    """Loads the newest checkpoint that every rank has written; gives its step, or 0."""
    names = [path.name for path in directory.glob("checkpoint-*.pt")]
    steps = [name.split("-")[1] for name in names]
    complete = [step for step in steps if steps.count(step) == world_size]
    if not complete or wrong == "everything":
        return 0
    newest = max(complete)
    state = torch.load(directory / f"checkpoint-{newest}-rank-{rank}.pt", weights_only=True)
    for name, value in live.items():
        if name != wrong:
            value.load_state_dict(state[name])
    if wrong == "lr":
        for group in live["optimizer"].param_groups:
            group["lr"] = 0.1
    if wrong != "rng":
        torch.set_rng_state(state["rng"])
    return int(newest) + (1 if wrong == "step" else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--wrong", default="")
    parser.add_argument("--odd-optimizer", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause-seconds", type=float, default=0.02)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    if args.odd_optimizer:
        OddOptimizer().step()
    train(
        args.directory,
        wrong=args.wrong,
        num_epochs=args.epochs,
        pause_seconds=args.pause_seconds,
    )
