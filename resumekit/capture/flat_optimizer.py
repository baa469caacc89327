"""Optimizers of parameters under the first FSDP, whose state has holes on each rank.

A rank that holds nothing of a parameter has no state for it, not even a count of steps. So that all
ranks have parts of one state, each tells the others which values there are (``outline``), and adds
empty parts for those that it does not have (``join``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.flat import flat_parts
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.restore import describe, pairs_in
from resumekit.errors import UnsupportedValueError
from resumekit.serialization import FlatPart, part_like


@dataclass(frozen=True)
class Moment:
    """A value of a parameter's state that has the parameter's shape."""

    dtype: torch.dtype


Outline = dict[str, dict[str, Any]]


class FlatOptimizerState(OptimizerState):
    """The state of an optimizer some of whose parameters are stretches. No collectives."""

    _joined: Outline | None = None

    def outline(self) -> Outline:
        """What this rank has for each stretch: plain values, and ``Moment`` for what is cut."""
        parts = self._parts()
        return {
            fqn: {
                name: Moment(value.dtype) if isinstance(value, FlatPart) else value
                for name, value in values.items()
            }
            for fqn, values in self._own_state()["state"].items()
            if fqn in parts
        }

    def join(self, outlines: Sequence[Outline]) -> None:
        """Takes what the ranks have told one another for the next ``state_dict``."""
        joined: Outline = {}
        for each in outlines:
            for fqn, values in each.items():
                joined.setdefault(fqn, values)
        self._joined = joined

    def state_dict(self) -> dict[str, Any]:
        """The live values, moments as stretches.

        The first one after a ``join`` has empty ones for what only other ranks have.
        """
        given = self._own_state()
        joined, self._joined = self._joined, None
        if "opaque" in given or joined is None:
            return given
        parts, state = self._parts(), given["state"]
        for fqn, values in joined.items():
            if fqn in parts and fqn not in state:
                state[fqn] = {
                    name: parts[fqn].like(torch.empty(0, dtype=value.dtype))
                    if isinstance(value, Moment)
                    else value
                    for name, value in values.items()
                }
        order = [name for group in given["param_groups"] for name in group["params"]]
        given["state"] = {fqn: state[fqn] for fqn in order if fqn in state}
        return given

    def replicated_state(self) -> dict[str, Any]:
        """The moments of which other ranks have a copy, and those of whole parameters."""
        parts, given = self._parts(), self._own_state()
        if "opaque" in given:
            return given
        return {
            "state": {
                fqn: values
                for fqn, values in given["state"].items()
                if fqn not in parts or parts[fqn].copies is not None
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Makes the live state that of the checkpoint; a rank keeps none for what it does not hold.

        Returns:
            What did not come back exactly: nothing.
        """
        if "opaque" in state:
            return super().load_state_dict(state)
        parts = self._parts()
        held = {
            fqn: {name: _local(name, value, parts.get(fqn)) for name, value in values.items()}
            for fqn, values in state["state"].items()
            if fqn not in parts or parts[fqn].local.numel()
        }
        return super().load_state_dict({**state, "state": held})

    def pairs(self, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        """Each saved moment with the stretch of its parameter."""
        live = self._own_state()
        if "opaque" in live:
            yield from pairs_in(state, live)
            return
        parts = self._parts()
        for fqn, values in state["state"].items():
            for name, value in values.items() if fqn in parts else ():
                if _is_moment(name, value, parts[fqn].shape):
                    yield value, parts[fqn]

    def _own_state(self) -> dict[str, Any]:
        """The state with what this rank has alone."""
        given = super().state_dict()
        parts = self._parts()
        for fqn, values in given.get("state", {}).items():
            if fqn in parts:
                given["state"][fqn] = {
                    name: self._as_part(fqn, name, value, parts[fqn])
                    for name, value in values.items()
                }
        return given

    def _as_part(self, fqn: str, name: str, value: Any, part: FlatPart) -> Any:
        if name == "step" or not _holds_rows(value):
            return value
        if not isinstance(value, Tensor) or value.shape != part.local.shape:
            raise UnsupportedValueError(
                f"{self.key}: {fqn}.{name}",
                found=f"{describe(value)} for a stretch of {part.local.numel()} elements",
                expected="moments of the parameter's shape, or single numbers",
                remedy="Use torch.distributed.fsdp.fully_shard with this optimizer",
            )
        return part.like(value)

    def _parts(self) -> dict[str, FlatPart]:
        """The stretches by the names that this optimizer's parameters have."""
        found: dict[str, FlatPart] = {}
        several = len(self.modules) > 1
        for home, module in self.modules.items():
            for name, part in flat_parts(home, module).items():
                found.setdefault(name, part)
                if several:
                    found.setdefault(f"{home}.{name}", part)
        return found

    def _parameters(self, names: list[list[str]]) -> dict[str, str]:
        parts = self._parts()
        said = super()._parameters(names)
        return {
            name: describe(parts[name]) if name in parts else words for name, words in said.items()
        }


def _holds_rows(value: Any) -> bool:
    """Whether a tensor that may be cut stands anywhere in a value."""
    if isinstance(value, Mapping):
        return any(map(_holds_rows, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_rows, value))
    return isinstance(value, Tensor) and value.dim() > 0


def _is_moment(name: str, value: Any, shape: torch.Size) -> bool:
    # As for DTensors: made from the parameter, as every optimizer makes its moments.
    return isinstance(value, Tensor) and value.shape == shape and name != "step"


def _local(name: str, value: Any, part: FlatPart | None) -> Any:
    if part is None:
        return value
    if isinstance(value, Tensor) and _is_moment(name, value, part.shape):
        value = part_like(part, value)
    return value.local if isinstance(value, FlatPart) else value
