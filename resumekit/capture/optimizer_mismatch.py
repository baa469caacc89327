"""What can be wrong between an optimizer's saved state and the live optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from resumekit.capture.restore import Mismatch, describe, fits, name_mismatches

Group = Mapping[str, Any]


def optimizer_mismatches(
    saved: Mapping[str, Any], live: Mapping[str, Any], *, is_order_bound: bool
) -> Iterator[Mismatch]:
    """Everything that a load could trip over or would do wrongly in silence.

    Args:
        saved: ``parameters`` (a description by name) and ``param_groups`` of the checkpoint.
        live: the same of this run.
        is_order_bound: whether the order of the parameters matters: it does to an optimizer that
            keeps one flat vector for all of them.
    """
    yield from name_mismatches(saved["parameters"], live["parameters"])
    for name, now in live["parameters"].items():
        then = saved["parameters"].get(name, now)
        if then != now:
            yield Mismatch(name, f"{then} in the checkpoint", f"{now}, as here")
    groups_then, groups_now = saved["param_groups"], live["param_groups"]
    if len(groups_then) != len(groups_now):
        then, now = f"{len(groups_then)} groups in the checkpoint", f"{len(groups_now)}, as here"
        yield Mismatch("param_groups", then, now)
        return
    yield from _membership_mismatches(groups_then, groups_now)
    for index, (group_then, group_now) in enumerate(zip(groups_then, groups_now, strict=True)):
        where = f"param_groups[{index}]"
        if is_order_bound and group_then["params"] != group_now["params"]:
            yield Mismatch(where, f"parameters {group_then['params']}", f"{group_now['params']}")
        differing = {k: v for k, v in group_then.items() if k != _scaled(group_then, group_now)}
        yield from _value_mismatches(where, differing, group_now)


def _scaled(then: Group, now: Group) -> str | None:
    """The hyperparameter that stands as a number until a first step makes a tensor of it.

    transformers 5.23 optimization.py AdafactorSchedule writes down the learning rate that Adafactor
    has scaled by the parameters.
    """
    rate = then.get("lr")
    is_scaled = bool(now.get("scale_parameter")) and not isinstance(now.get("lr"), Tensor)
    return "lr" if is_scaled and isinstance(rate, Tensor) and rate.dim() == 0 else None


def _membership_mismatches(then: Sequence[Group], now: Sequence[Group]) -> Iterator[Mismatch]:
    group_of = {name: index for index, group in enumerate(now) for name in group["params"]}
    for index, group in enumerate(then):
        for name in group["params"]:
            here = group_of.get(name, index)
            if here != index:
                yield Mismatch(name, f"in param group {index}", f"in group {here}, as here")


def _value_mismatches(where: str, then: Any, now: Any) -> Iterator[Mismatch]:
    """Tensors on one side only or of another kind: the live one could not hold the other value."""
    if isinstance(then, Tensor) or isinstance(now, Tensor):
        if not fits(now, then):
            yield Mismatch(
                where, f"{describe(then)} in the checkpoint", f"{describe(now)}, as here"
            )
    elif isinstance(then, dict) and isinstance(now, dict):
        for name in then:
            if name in now:
                yield from _value_mismatches(f"{where}[{name!r}]", then[name], now[name])
    elif isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)):
        for index, (each, partner) in enumerate(zip(then, now, strict=False)):
            yield from _value_mismatches(f"{where}[{index}]", each, partner)
