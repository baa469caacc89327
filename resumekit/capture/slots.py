"""The slot that an object of the script belongs to."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from resumekit.state import Slot

# ModelEmaV2, EMAModel, ExponentialMovingAverage, ...
_NAMED_LIKE_AN_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")


def slot_of(value: Any) -> Slot | None:
    """The slot for an object; None for one without training state."""
    if isinstance(value, LRScheduler):
        return Slot.LR_SCHEDULER
    if isinstance(value, Optimizer):
        return Slot.OPTIMIZER
    if isinstance(value, GradScaler):
        return Slot.GRAD_SCALER
    if isinstance(value, type):
        return None
    has_state = all(hasattr(type(value), name) for name in ("state_dict", "load_state_dict"))
    named_so = _NAMED_LIKE_AN_AVERAGE.search(type(value).__name__)
    if isinstance(value, AveragedModel) or (has_state and named_so):
        return Slot.EMA
    return Slot.MODEL if isinstance(value, nn.Module) else None


def is_training(value: Any, given: Container[int]) -> bool:
    """Whether a framework's object that was not given certainly has state of this training."""
    if isinstance(value, Optimizer):
        trained = [each for group in value.param_groups for each in group["params"]]
        return not all(id(each) in given for each in trained if each.requires_grad)
    if isinstance(value, nn.Module):  # an engine, before its first step: not one of a former run
        is_fresh = value.optimizer is not None and not value.global_steps
        return bool(is_fresh) and id(value.module) not in given
    return isinstance(value, LRScheduler)
