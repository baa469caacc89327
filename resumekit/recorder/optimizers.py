"""What an optimizer is seen to hold: parameters, state, learning rates and step counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from resumekit.recorder.alignment import Position
from resumekit.recorder.digests import combined, tensor_digest, value_digest

# Settings of a param group that are numbers: a schedule may change them.
_NUMBERS = (bool, int, float)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of every group."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def learning_rates(optimizer: Any) -> list[str]:
    """The learning rate of every group, to the bit."""
    return [float(group["lr"]).hex() for group in optimizer.param_groups if "lr" in group]


def position_of(optimizer: Any) -> Position:
    """What is true before a step of this optimizer, its number aside."""
    return Position(
        step=0,
        weights=combined(map(tensor_digest, parameters_of(optimizer))),
        counter=_counter(optimizer),
        lr=tuple(learning_rates(optimizer)),
    )


def parameter_digests(optimizer: Any, names: Mapping[int, str]) -> dict[str, str]:
    """The digests of the parameters that no module names: flat shards, parameters on their own."""
    return {
        name: tensor_digest(parameter)
        for name, parameter in _named(optimizer, names)
        if id(parameter) not in names
    }


def state_digests(optimizer: Any, names: Mapping[int, str]) -> dict[str, str]:
    """The digests of the optimizer's state.

    Args:
        optimizer: anything with ``param_groups`` and ``state``.
        names: of its parameters, by ``id``.
    """
    leaves: dict[str, str] = {}
    for name, parameter in _named(optimizer, names):
        # A defaultdict: asking for an absent key with [] would add it.
        state = optimizer.state.get(parameter) or {}
        leaves.update({f"{name}.{key}": value_digest(value) for key, value in state.items()})
    return leaves


def settings_of(optimizer: Any) -> dict[str, str]:
    """The numbers of the param groups, to the bit, but for the learning rates."""
    leaves: dict[str, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            if key not in ("params", "lr") and all(isinstance(one, _NUMBERS) for one in values):
                leaves[f"group{index}.{key}"] = ",".join(float(one).hex() for one in values)
    return leaves


def _named(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"group{index}.{number}"), parameter


def _counter(optimizer: Any) -> int:
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return max((int(step) for step in steps), default=0)
