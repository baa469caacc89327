"""The steps of DeepSpeed's engines, whose optimizers are not torch optimizers."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.optim import Optimizer

from resumekit.recorder.hooks import current_recorder


def install() -> None:
    """Wraps ``deepspeed.initialize``: the optimizer of each engine that it makes is recorded."""
    deepspeed: Any = sys.modules["deepspeed"]
    initialize = deepspeed.initialize

    @functools.wraps(initialize)
    def initialize_and_listen(*arguments: Any, **keywords: Any) -> Any:
        made = initialize(*arguments, **keywords)
        _listen_to(made[0])
        return made

    deepspeed.initialize = initialize_and_listen


def _listen_to(engine: Any) -> None:
    recorder, optimizer = current_recorder(), engine.optimizer
    if recorder is None or optimizer is None or isinstance(optimizer, Optimizer):
        return  # a torch optimizer calls the hooks itself
    recorder.saw_engine(engine.module)
    step = optimizer.step

    @functools.wraps(step)
    def recorded(*arguments: Any, **keywords: Any) -> Any:
        # The inner optimizer has the partitions of this rank. The wrapper may call its step once
        # for each group, and changes its groups while it does: the whole is one step.
        inner = getattr(optimizer, "optimizer", optimizer)
        recorder.before_step(optimizer, inner)
        done = step(*arguments, **keywords)
        recorder.after_step(optimizer, inner, is_skipped=getattr(optimizer, "overflow", False))
        return done

    optimizer.step = recorded
