"""Finds models, optimizers, schedulers and averages of the script that the run was not given."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.user_state import content_digest
from resumekit.state import CaptureLine, Fidelity, Slot, StateComponent

# ModelEmaV2, EMAModel, ExponentialMovingAverage, ...
_NAMED_LIKE_AN_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")

# How to pass each to the run; an adapter may have other remedies.
REMEDIES: Mapping[Slot, str] = {
    Slot.MODEL: "pass model={{..., {name!r}: {name}}}",
    Slot.OPTIMIZER: "pass optimizer={{..., {name!r}: {name}}}",
    Slot.LR_SCHEDULER: "pass lr_scheduler={name}",
    Slot.GRAD_SCALER: "pass grad_scaler={name}",
    Slot.EMA: "pass ema={name}",
}

# The most that is digested of a module that may have changed.
_SAMPLE_BYTES = 16 * 2**20
# Objects of these packages are searched for the objects of a component; others are user code.
_ENTERED = frozenset({"resumekit", "accelerate", "deepspeed", "torch"})
_MAX_DEPTH = 5
_MAX_OBJECTS = 20_000


class SavedObjects:
    """All objects of a run's components, and the parameters that are saved with them.

    Args:
        components: of the run.
        others: more objects that are saved, as the values of ``extras``.
        tracked: objects whose attributes are saved.

    Attributes:
        modules: the models among them.
        trained: the ids of the parameters that optimizers among them train.
    """

    def __init__(
        self,
        components: Iterable[StateComponent] = (),
        others: Iterable[Any] = (),
        tracked: Iterable[Any] = (),
    ) -> None:
        objects = list(_reachable([*(each.stateful for each in components), *others]))
        self._tracked = {id(each) for each in tracked}
        self._ids = {id(each) for each in objects}
        self._tensors: set[int] = set()
        self.modules = [each for each in objects if isinstance(each, nn.Module)]
        for each in self.modules:
            self._ids.update(map(id, each.modules()))
            self._tensors.update(map(id, (*each.parameters(), *each.buffers())))
        self.trained: set[int] = set()
        for each in objects:
            if isinstance(each, OptimizerState):
                self.trained.update(map(id, each.trained_parameters()))
            elif isinstance(each, Optimizer):
                self.trained.update(map(id, _parameters(each)))

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._ids

    def saves(self, value: Any) -> bool:
        """Whether the run saves an object, directly or with an optimizer that trains it."""
        return any(id(value) in ids for ids in (self._ids, self.trained, self._tracked))

    def saves_attributes_of(self, value: Any) -> bool:
        """Whether the run saves the attributes of an object."""
        return id(value) in self._tracked

    def misses(self, module: nn.Module) -> list[Tensor]:
        """The parameters and buffers of a module that no component saves."""
        every = (*module.parameters(), *module.buffers())
        return [each for each in every if id(each) not in self._tensors]


@dataclass(eq=False)
class Unconfirmed:
    """An object that is state only if training changes it.

    Args:
        line: of the capture report in that case.
        value: a module or an optimizer.
        digest: of its content at the start.
    """

    line: CaptureLine
    value: Any
    digest: int | None

    def has_changed(self) -> bool:
        """Whether its content has changed since the start."""
        return _digest(self.value) != self.digest


def not_given(
    variables: Mapping[str, Any], given: SavedObjects, remedies: Mapping[Slot, str] = REMEDIES
) -> tuple[list[CaptureLine], list[Unconfirmed]]:
    """Objects in the variables of a script that the run was not given.

    Args:
        variables: by name.
        given: the objects of the run.
        remedies: how to pass an object to the run, by slot; ``{name}`` is the variable's.

    Returns:
        The lines that are certain, and the objects that are state if training changes them.
    """
    lines: list[CaptureLine] = []
    unconfirmed: list[Unconfirmed] = []
    seen: set[int] = set()
    for name, value in variables.items():
        slot = slot_of(value)
        if slot is None or value in given or id(value) in seen:
            continue
        seen.add(id(value))
        certain = _is_certain(value, slot, given)
        if certain is None:
            continue
        line = CaptureLine(
            f"{slot.value}/{name}",
            Fidelity.LOST,
            f"a {type(value).__name__} that was not given; {remedies[slot].format(name=name)}",
        )
        if certain:
            lines.append(line)
        else:
            unconfirmed.append(Unconfirmed(line, value, _digest(value)))
    return lines, unconfirmed


def _is_certain(value: Any, slot: Slot, given: SavedObjects) -> bool | None:
    """Whether an object certainly is state; None if it is not.

    The values of parameters that a given optimizer trains are saved with that optimizer.
    """
    if slot is Slot.MODEL:
        if _is_untrained_engine(value):
            return True
        missed = given.misses(value)
        return False if missed else None
    if slot is Slot.OPTIMIZER:
        parameters = _parameters(value)
        if not any(each.requires_grad for each in parameters):
            return None
        return not all(id(each) in given.trained for each in parameters)
    if slot is Slot.LR_SCHEDULER:
        optimizer = getattr(value, "optimizer", None)
        return optimizer in given if optimizer is not None else False
    if slot is Slot.GRAD_SCALER:
        return True if value.is_enabled() else None
    return True


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


def _is_untrained_engine(value: Any) -> bool:
    """Whether it is a DeepSpeed engine before its first step, not one of a former run."""
    is_engine = any(each.__name__ == "DeepSpeedEngine" for each in type(value).__mro__)
    return is_engine and value.optimizer is not None and value.global_steps == 0


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _digest(value: Any) -> int | None:
    """Digest of a module's smallest tensors up to a limit, or of an optimizer's step counts."""
    if isinstance(value, nn.Module):
        tensors = sorted((*value.parameters(), *value.buffers()), key=lambda each: each.nbytes)
        num_bytes = accumulate(each.nbytes for each in tensors)
        num_sampled = sum(total <= _SAMPLE_BYTES for total in num_bytes)
        return content_digest(tensors[: max(1, num_sampled)], limit_bytes=2 * _SAMPLE_BYTES)
    if isinstance(value, Optimizer):
        steps = [state.get("step", 0) for state in value.state.values()]
        return content_digest([len(steps), *steps], limit_bytes=_SAMPLE_BYTES)
    if isinstance(value, LRScheduler):
        return hash(getattr(value, "last_epoch", None))
    return None


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """The objects that others refer to, through attributes and containers."""
    queue = deque((each, 0) for each in roots)
    seen: set[int] = set()
    while queue and len(seen) < _MAX_OBJECTS:
        value, depth = queue.popleft()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, Tensor, type(None))):
            continue
        seen.add(id(value))
        yield value
        if depth == _MAX_DEPTH:
            continue
        if isinstance(value, dict):
            queue.extend((each, depth + 1) for each in value.values())
        elif isinstance(value, (list, tuple, set, deque)):
            queue.extend((each, depth + 1) for each in value)
        elif isinstance(value, nn.Module) and not type(value).__module__.startswith("deepspeed"):
            continue  # only DeepSpeed's engines hold an optimizer and a scheduler
        elif type(value).__module__.partition(".")[0] in _ENTERED:
            attributes = getattr(value, "__dict__", {})
            queue.extend((v, depth + 1) for n, v in attributes.items() if n != "state")
