"""Averaged weights and any other object with a state of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from resumekit.capture.model import ModelState
from resumekit.capture.restore import (
    Mismatch,
    Restorer,
    class_name,
    describe,
    fits,
    refuse,
    require_class,
    require_fields,
)
from resumekit.state import ComponentState, Renamed, Renaming, WorldChange

_REMEDY = "Build the object as it was when the checkpoint was written"


class ObjectState(Renamed):
    """The state of one averaged model, module or user object.

    ``AveragedModel`` is stored as its weights and ``n_averaged``; its averaging function is code
    of the script. A module is stored like a model. Any other object gives its own state.

    Args:
        given: an ``AveragedModel``, a module, or an object with ``state_dict`` and
            ``load_state_dict``.
        key: the component's key, for errors.
    """

    def __init__(self, given: Any, *, key: str = "ema") -> None:
        self.given = given
        self.key = key
        weights = given.module if isinstance(given, AveragedModel) else given
        self.weights = ModelState(weights, key=key) if isinstance(weights, nn.Module) else None

    def live_objects(self) -> tuple[Any, ...]:
        return (self.given,)

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies."""
        if self.weights is None:
            return {"class": class_name(self.given), "opaque": self.given.state_dict()}
        return {"weights": self.weights.state_dict(), "counters": self._counters()}

    def replicated_state(self) -> dict[str, Any]:
        """Of a module the parameters, else everything."""
        if self.weights is None:
            return self.state_dict()
        return {"weights": self.weights.replicated_state(), "counters": self._counters()}

    def check_state_dict(self, state: Any) -> None:
        """Refuses weights that do not fit (see ``ModelState``), and the state of another class."""
        if self.weights is None:
            require_fields(self.key, state, {"class": str, "opaque": object})
            require_class(self.key, state["class"], self.given, remedy=_REMEDY)
            return
        require_fields(self.key, state, {"weights": dict, "counters": dict})
        self.weights.check_state_dict(state["weights"])
        saved, live = state["counters"], self._counters()
        refuse(
            self.key,
            [
                Mismatch(name, describe(saved.get(name)), f"{describe(value)}, as in this run")
                for name, value in live.items()
                if not fits(value, saved.get(name))
            ],
            remedy=_REMEDY,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live objects."""
        if self.weights is None:
            self.given.load_state_dict(Restorer()(None, state["opaque"]))
            return ()
        live = self._counters()
        restore = Restorer()
        for name, value in state["counters"].items():
            if name in live:
                restore(live[name], value)
        return self.weights.load_state_dict(state["weights"])

    def resplit_state_dict(
        self, states: Mapping[int, Any], change: WorldChange
    ) -> tuple[dict[str, Any], Iterable[str]] | None:
        """Calls the object's own method; None if it has none."""
        if not isinstance(self.given, ComponentState) or self.weights is not None:
            return None
        opaque = {rank: each["opaque"] for rank, each in states.items()}
        resplit = self.given.resplit_state_dict(opaque, change)
        if resplit is None:
            return None
        state, messages = resplit
        return {"class": class_name(self.given), "opaque": state}, messages

    def entries(self, state: Any) -> Mapping[str, Any] | None:
        """The weights of a module."""
        given = state.get("weights") if isinstance(state, Mapping) else None
        return given if self.weights is not None and isinstance(given, Mapping) else None

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        weights = self.entries(state)
        return state if weights is None else {**state, "weights": renaming.keys(weights)}

    def first_rank_only(self) -> frozenset[str]:
        """The unsharded buffers of a module."""
        names = frozenset() if self.weights is None else self.weights.first_rank_only()
        return frozenset(f"weights.{name}" for name in names)

    def _counters(self) -> dict[str, Any]:
        """How many models were averaged; empty for other objects."""
        if not isinstance(self.given, AveragedModel):
            return {}
        return {"n_averaged": self.given.n_averaged}
