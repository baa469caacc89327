"""Training functions for exports: one saves a step in both ways, the other is a stock script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed_workloads import one_cycle, start_ranks
from digits import Digits
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.utils.data import DataLoader
from zero_workloads import (
    GLOBAL_BATCH,
    NUM_SAMPLES,
    Classifier,
    Plain,
    make_engine,
    whole_state,
)

SAVED_AT, NUM_MORE = 3, 3
NATIVE = "native"
# The ranks and engines that continue, each from its own kind.
SAME: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"stage": 0, "tied": True}),
    (2, {"stage": 0, "tied": True, "precision": "bf16"}),
    (1, {"stage": 0, "frozen": True, "precision": "fp16"}),
    (1, {"stage": 1, "precision": "bf16"}),
    (2, {"stage": 1, "frozen": True}),
    (1, {"stage": 2}),
    (2, {"stage": 2, "tied": True, "precision": "fp16"}),
    (2, {"stage": 3, "tied": True}),
    (2, {"stage": 3, "tied": True, "precision": "fp16"}),
    (2, {"stage": 3, "frozen": True}),
    (1, {"stage": 3, "frozen": True, "precision": "bf16"}),
)


class Scheduled(Plain):
    """Without DeepSpeed, with the scheduler that the engines have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.lr_scheduler = one_cycle(self.optimizer)

    def step(self) -> None:
        super().step()
        self.lr_scheduler.step()


def make_model(*, tied: bool, frozen: bool, stage: int | None) -> nn.Module:
    """A model whose frozen parameters are apart from its buffers at stage 3."""
    model = Classifier(tied=tied, frozen=frozen, unused=False)
    if frozen and stage == 3:
        del model.scale
    return model


def train(engine: Any, steps: Iterable[int]) -> Iterator[torch.Tensor]:
    """The loss of each step; its batch depends on its number alone."""
    digits = Digits(NUM_SAMPLES, augment=False)
    images, labels = digits.images, torch.tensor(digits.labels)
    if not isinstance(engine, Plain):
        images = images.to(engine.get_data_types()[0])
    for step in steps:
        chosen = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(step))
        mine = chosen[:GLOBAL_BATCH][get_rank() :: get_world_size()]
        loss = nn.functional.cross_entropy(engine(images[mine]).float(), labels[mine])
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().clone()


def whole_tensors(engine: Any) -> dict[str, Any]:
    """What DeepSpeed gathers: fp32 weights and moments by name, counts, buffers."""
    return dict(whole_state(engine, copied))


def save_both(
    directory: str,
    *,
    stage: int | None,
    precision: str = "fp32",
    tied: bool = False,
    frozen: bool = False,
    sub_group_size: int = 3000,
) -> None:
    """Saves a step by ``engine.save_checkpoint`` and as a checkpoint of resumekit."""
    from resumekit.adapters.deepspeed import Checkpointer
    from resumekit.adapters.torch import Checkpointer as PlainCheckpointer

    start_ranks()
    torch.manual_seed(0)
    model = make_model(tied=tied, frozen=frozen, stage=stage)
    where = Path(directory) / "run"
    if stage is None:
        engine: Any = Scheduled(model)
        checkpointer: Any = PlainCheckpointer(
            where, model=model, optimizer=engine.optimizer, lr_scheduler=engine.lr_scheduler
        )
    else:
        engine = make_engine(
            model, stage, precision, lr_scheduler=one_cycle, sub_group_size=sub_group_size
        )
        checkpointer = Checkpointer(engine, where)
    loader: Any = DataLoader(range(2 * SAVED_AT))  # type: ignore[arg-type]
    numbers = map(int, checkpointer.batches(loader, epochs=1))
    for loss in train(engine, numbers):
        checkpointer.step(loss=loss)
        if checkpointer.progress.step == SAVED_AT:
            break
    checkpointer.save()
    checkpointer.close()
    torch.save(whole_tensors(engine), Path(directory) / f"gathered-{get_rank()}.pt")
    if stage is not None:
        engine.save_checkpoint(str(Path(directory) / NATIVE))
    destroy_process_group()


def continue_from(
    directory: str,
    *,
    source: str,
    stage: int,
    precision: str = "fp32",
    tied: bool = False,
    frozen: bool = False,
    sub_group_size: int = 3000,
) -> None:
    """A script without resumekit, which begins from a directory of ``save_checkpoint``."""
    engine = other_engine(stage, precision, tied, frozen, sub_group_size)
    path, client_state = engine.load_checkpoint(str(Path(directory) / source))
    assert path is not None
    assert "step" not in client_state
    note(engine, range(SAVED_AT, SAVED_AT + NUM_MORE), Path(directory) / Path(source).name)


def continue_import(
    directory: str,
    *,
    source: str,
    stage: int | None,
    precision: str = "fp32",
    tied: bool = False,
    frozen: bool = False,
    sub_group_size: int = 3000,
) -> None:
    """The same with resumekit, in a run whose first step was imported in the middle of an epoch."""
    from resumekit.adapters.deepspeed import Checkpointer

    assert stage is not None
    engine = other_engine(stage, precision, tied, frozen, sub_group_size)
    loader: Any = DataLoader(range(2 * SAVED_AT))  # type: ignore[arg-type]
    with Checkpointer(engine, Path(directory) / source) as checkpointer:
        assert checkpointer.resume().resumed
        numbers = map(int, checkpointer.batches(loader, epochs=1))
        note(engine, numbers, Path(directory) / source)


def save_elastic(directory: str, *, stage: int, source: str = "", elastic: bool = True) -> None:
    """Saves partitions with ``elastic_checkpoint``, which no Checkpointer takes; or loads them."""
    start_ranks()
    model = make_model(tied=False, frozen=False, stage=stage)
    engine = make_engine(model, stage, "fp32", lr_scheduler=one_cycle, elastic=elastic)
    if source:
        engine.load_checkpoint(str(Path(directory) / source))
    else:
        for _ in train(engine, range(SAVED_AT)):
            pass
        engine.save_checkpoint(str(Path(directory) / NATIVE))
    destroy_process_group()


def other_engine(stage: int, precision: str, tied: bool, frozen: bool, sub_group_size: int) -> Any:
    """An engine with other weights than those of the run that saved."""
    start_ranks()
    torch.manual_seed(7)
    model = make_model(tied=tied, frozen=frozen, stage=stage)
    return make_engine(
        model, stage, precision, lr_scheduler=one_cycle, sub_group_size=sub_group_size
    )


def note(engine: Any, steps: Iterable[int], path: Path) -> None:
    """Writes down what an engine has loaded, and what it has after these steps."""
    counts = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    notes = {
        "loaded": whole_tensors(engine),
        "counts": counts,
        "scheduler": engine.lr_scheduler.state_dict(),
        "losses": [*train(engine, steps)],
        "trained": whole_tensors(engine),
    }
    torch.save(notes, path.with_name(f"{path.name}-{get_rank()}.pt"))
    destroy_process_group()
