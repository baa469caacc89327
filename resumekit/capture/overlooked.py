"""Objects of a user's script that look like training state and that nobody gave to the run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from resumekit.contract import CaptureLine, Fidelity, Slot

# ModelEmaV2, EMAModel, ExponentialMovingAverage, ...
_NAMED_LIKE_AN_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")


# How each is to be given; under some adapters otherwise.
REMEDIES = {
    Slot.LR_SCHEDULER: "that was not given; pass lr_scheduler={name}",
    Slot.EMA: "that was not given; pass ema={name}",
    Slot.MODEL: (
        "that was not given; resumekit.adapters.deepspeed takes a dict of engines: "
        '{{"{name}": {name}, ...}}'
    ),
}


def overlooked(
    variables: Mapping[str, Any],
    captured: Iterable[Any],
    *,
    remedies: Mapping[Slot, str] = REMEDIES,
) -> tuple[CaptureLine, ...]:
    """A line of the capture report for each scheduler, average and engine that would be lost.

    Args:
        variables: of the function that makes the Checkpointer, by name.
        captured: all objects that the run holds.
        remedies: what to say of such an object, by slot; ``{name}`` is the variable's.
    """
    known = {id(each) for holder in captured for each in _with_parts(holder)}
    found = ((name, each, _slot_of(each)) for name, each in variables.items())
    return tuple(
        CaptureLine(
            f"{slot.value}/{name}",
            Fidelity.LOST,
            f"a {type(each).__name__} {remedies[slot].format(name=name)}",
        )
        for name, each, slot in found
        if slot is not None and id(each) not in known
    )


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Of the function that makes the Checkpointer, and of the object whose method it is."""
    own = frame.f_locals
    return {**getattr(own.get("self"), "__dict__", {}), **own}


def _with_parts(holder: Any) -> list[Any]:
    """An object, and the schedulers that torch's SequentialLR and ChainedScheduler are made of."""
    parts = getattr(holder, "_schedulers", ())
    return [holder, *parts] if isinstance(parts, (list, tuple)) else [holder]


def _slot_of(value: Any) -> Slot | None:
    if isinstance(value, LRScheduler):
        return Slot.LR_SCHEDULER
    if _is_untrained_engine(value):
        return Slot.MODEL
    has_state = all(hasattr(type(value), name) for name in ("state_dict", "load_state_dict"))
    is_average = isinstance(value, AveragedModel) or (
        has_state and _NAMED_LIKE_AN_AVERAGE.search(type(value).__name__)
    )
    return Slot.EMA if is_average else None


def _is_untrained_engine(value: Any) -> bool:
    """Whether it is an engine of DeepSpeed that is to be trained; one of a former run has been."""
    is_engine = any(each.__name__ == "DeepSpeedEngine" for each in type(value).__mro__)
    return is_engine and value.optimizer is not None and value.global_steps == 0
