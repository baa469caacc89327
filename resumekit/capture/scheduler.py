"""A learning-rate scheduler's state, and what shapes its schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.horizon import (
    callable_attributes,
    callables,
    horizon,
    horizon_attributes,
    parts,
    settings,
)
from resumekit.capture.restore import (
    Mismatch,
    Restorer,
    class_name,
    describe,
    is_same_class,
    refuse,
    require_fields,
)

_REMEDY = "Build the scheduler as it was when the checkpoint was written"

# Under this name SequentialLR and ChainedScheduler keep their parts. torch 2.13 lr_scheduler.py.
_PARTS = "_schedulers"


class SchedulerState:
    """The state of a learning-rate scheduler, its parts and the classes of both.

    Callables that shape a schedule (LambdaLR's, CyclicLR's) are code: the attributes of a callable
    object are saved, a plain function is the script's own.

    Args:
        scheduler: any ``torch.optim.lr_scheduler`` class, or an object with ``state_dict`` and
            ``load_state_dict``.
        key: the component's key, for errors.
        keep_horizon: load only how far the schedule is; how long it is stays as this run built it.
            For ``allow_changes={"horizon"}``.
    """

    def __init__(
        self, scheduler: Any, *, key: str = "lr_scheduler", keep_horizon: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.key = key
        self.keep_horizon = keep_horizon

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state, and its class and those of its parts by place."""
        return {"classes": _classes(self.scheduler), "state": self.scheduler.state_dict()}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: another class (of the scheduler or of a part of it), another number
                of parts or of param groups, or a callable object where there was a function.
        """
        require_fields(self.key, state, {"classes": dict})
        mismatches = list(_class_mismatches(state["classes"], _classes(self.scheduler)))
        if not mismatches:
            live = self.scheduler.state_dict()
            mismatches += _state_mismatches("", state.get("state"), live)
        refuse(self.key, mismatches, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Puts the scheduler where it was; the learning rates themselves are the optimizer's.

        Returns:
            What did not come back exactly: attributes that the checkpoint lacks.
        """
        live = self.scheduler.state_dict()
        saved = state["state"]
        remarks = tuple(
            f"{name} is not in the checkpoint and stays as built" for name in _absent(saved, live)
        )
        kept = _horizons(self.scheduler) if self.keep_horizon else []
        # torch's schedulers adopt what they are given, and some take it apart: they get their own.
        self.scheduler.load_state_dict(_own(saved, live))
        for owner, attributes in kept:
            vars(owner).update(attributes)
        return remarks

    def fingerprint(self) -> dict[str, Any]:
        """The classes, the horizon, and the settings that are not part of it."""
        return {
            "classes": _classes(self.scheduler),
            "horizon": horizon(self.scheduler),
            "settings": settings(self.scheduler),
        }


def _classes(scheduler: Any, where: str = "") -> dict[str, str]:
    """The classes of the scheduler and of its parts, by place; the outermost is at ``""``."""
    found = {where: class_name(scheduler)}
    for name, part in parts(scheduler):
        found.update(_classes(part, f"{where}.{name}" if where else name))
    return found


def _class_mismatches(then: Mapping[str, Any], now: Mapping[str, str]) -> Iterator[Mismatch]:
    for where in [*now, *(where for where in then if where not in now)]:
        saved, live = str(then.get(where, "nothing")), now.get(where, "nothing")
        if not is_same_class(saved, live):
            yield Mismatch(where, f"{saved} in the checkpoint", f"{live}, as here")


def _state_mismatches(where: str, then: Any, now: Any) -> Iterator[Mismatch]:
    """What torch's load would trip over, or do wrongly in silence."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        if type(then) is not type(now):
            yield Mismatch(where, f"{describe(then)} in the checkpoint", f"{describe(now)}")
        return
    for name in ("base_lrs", "lr_lambdas", "_last_lr", "min_lrs"):
        num_then, num_now = _length(then.get(name)), _length(now.get(name))
        if name in now and num_then != num_now:
            yield Mismatch(f"{where}{name}", f"{num_then} entries", f"{num_now}: one a param group")
    functions_then = [*_listed(then.get("lr_lambdas")), then.get("_scale_fn_custom")]
    functions_now = [*_listed(now.get("lr_lambdas")), now.get("_scale_fn_custom")]
    for saved, live in zip(functions_then, functions_now, strict=False):
        # A function has no entry (None), a callable object has its attributes.
        if bool(saved) != bool(live):
            yield Mismatch(
                f"{where}lr_lambdas",
                "a callable object" if saved else "a plain function or one without attributes",
                "the other, as here",
            )
    parts = zip(_listed(then.get(_PARTS)), _listed(now.get(_PARTS)), strict=False)
    for index, (part, partner) in enumerate(parts):
        yield from _state_mismatches(f"{where}{_PARTS}[{index}].", part, partner)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 0


def _absent(saved: Any, live: Any) -> list[str]:
    if not isinstance(saved, dict) or not isinstance(live, dict):
        return []
    return [str(name) for name in live if name not in saved]


def _own(saved: Any, live: Any) -> Any:
    """A copy of the saved state whose tensors are where the live state has tensors."""
    devices = {value.device for value in _tensors(live)}
    device = devices.pop() if len(devices) == 1 else None

    def new_tensor(value: Tensor) -> Tensor:
        return value.detach().to(device or value.device, copy=True)

    return Restorer()(None, saved, new_tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _horizons(scheduler: Any) -> list[tuple[Any, dict[str, Any]]]:
    """What a load may not change, by the object that holds it: scheduler, parts, callables."""
    kept = [(scheduler, copy.deepcopy(horizon_attributes(scheduler)))]
    kept += [(function, callable_attributes(function)) for _, function in callables(scheduler)]
    return kept + [entry for _, part in parts(scheduler) for entry in _horizons(part)]
