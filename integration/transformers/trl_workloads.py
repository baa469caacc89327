"""TRL's Trainers by kind, and what only they are given."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

TRL = {
    "sft": "SFT",
    "preferences": "DPO",
    "reward": "Reward",
    "unpaired": "KTO",
    "odds": "experimental.orpo.ORPO",
    "completions": "GRPO",
    "leave one out": "RLOO",
    "unknown": "experimental.gmpo.GMPO",
}
# They answer a few prompts, and use each answer several times: half an epoch is generated at once.
GENERATING = ("completions", "leave one out", "unknown")
GENERATING_ARGUMENTS = {
    "num_generations": 2,
    "num_iterations": 2,
    "steps_per_generation": 2,
    "max_completion_length": 4,
    "beta": 0.0,
}


def unpaired(pairs: Any) -> Any:
    """Of pairs the chosen answers, good or bad, as a data set of ``datasets``."""
    pairs = pairs.rename_column("chosen", "completion").remove_columns("rejected")
    return pairs.add_column("label", [number % 3 == 0 for number in range(len(pairs))])


class Rising:
    """A reward for what is longer than the mean so far, which it holds."""

    __name__ = "rising"

    def __init__(self) -> None:
        self.mean = torch.zeros(())
        self.num_calls = 0

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        found = torch.tensor([float(sum(map(ord, each)) % 11) for each in completions])
        self.num_calls += 1
        self.mean = self.mean.lerp(found.mean(), 1 / self.num_calls)
        return (found - self.mean).square().tolist()


def trl_classes(path: str) -> tuple[type[Trainer], type[TrainingArguments]]:
    module, _, name = f"trl.{path}".rpartition(".")
    library = importlib.import_module(module)
    return getattr(library, f"{name}Trainer"), getattr(library, f"{name}Config")
