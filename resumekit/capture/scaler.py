"""The gradient scaler of a mixed-precision run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.capture.restore import Mismatch, class_name, refuse, require_fields
from resumekit.state import ComponentState


class ScalerState(ComponentState):
    """The state of a ``torch.amp.GradScaler`` or of any object with its methods.

    Where the checkpoint has no scaler or a disabled one, the live one keeps its initial state, and
    that is reported.

    Args:
        scaler: the scaler, enabled or not.
        key: the component's key, for errors.
    """

    def __init__(self, scaler: Any, *, key: str = "grad_scaler") -> None:
        self.scaler = scaler
        self.key = key

    def live_objects(self) -> tuple[Any, ...]:
        return (self.scaler,)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's own state; its values are empty when it is disabled."""
        return {"class": class_name(self.scaler), "values": self.scaler.state_dict()}

    def check_state_dict(self, state: Any) -> None:
        """Refuses a state that lacks values of an enabled scaler."""
        require_fields(self.key, state, {"values": dict})
        live, saved = self.scaler.state_dict(), state["values"]
        absent = [name for name in live if name not in saved] if saved else []
        refuse(
            self.key,
            [Mismatch(name, "not in the checkpoint", "a value, as in this run") for name in absent],
            remedy=f"Pass exclude={{{self.key!r}}} to start with a fresh scaler",
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores all values; reports a scaler that is enabled on one side only."""
        saved, live = state["values"], self.scaler.state_dict()
        if live and not saved:
            return self.start_fresh()
        if saved and not live:
            return ("the checkpoint has a scaler, but this run's is disabled: its state is unused",)
        self.scaler.load_state_dict(saved)
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """The live scaler keeps its initial state."""
        if not self.scaler.state_dict():
            return ()
        return ("the checkpoint was written without a gradient scaler: this one starts afresh",)

    def fingerprint(self) -> dict[str, Any]:
        """The class, and whether it is enabled."""
        return {"class": class_name(self.scaler), "enabled": bool(self.scaler.state_dict())}
