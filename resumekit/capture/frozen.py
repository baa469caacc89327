"""Which parameters are frozen: user code freezes and lets go of them at a step, or by epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from resumekit.capture.mismatch import require_fields
from resumekit.capture.names import clean_names

_NUM_NAMED = 3


class FrozenParameters:
    """The names of the parameters of a model that have ``requires_grad=False``.

    Args:
        model: wrapped or not.
        key: the component's key, for errors.
    """

    def __init__(self, model: nn.Module, *, key: str) -> None:
        self._model = model
        self.key = key
        self._pending: list[str] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The names without those of wrappers."""
        if self._pending is not None:
            return {"names": self._pending}
        return {"names": [name for name, each in self._named() if not each.requires_grad]}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be kept; changes nothing.

        Raises:
            StateMismatchError: it is no list of names.
        """
        require_fields(self.key, state, {"names": list})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the names until ``put_back``: user code may set first what it begins with.

        Returns:
            What did not come back exactly: nothing.
        """
        self._pending = list(state["names"])
        return ()

    def put_back(self) -> str:
        """Freezes what was frozen, and lets go of the rest, once.

        Returns:
            What to tell of it; empty where all was so.
        """
        if self._pending is None:
            return ""
        names, self._pending = set(self._pending), None
        changed = [(n, each) for n, each in self._named() if each.requires_grad == (n in names)]
        for name, parameter in changed:
            parameter.requires_grad_(name not in names)
        if not changed:
            return ""
        first = ", ".join(name for name, _ in changed[:_NUM_NAMED])
        more = len(changed) - _NUM_NAMED
        listed = f"{first} and {more} more" if more > 0 else first
        return f"requires_grad is as in the checkpoint, not as this launch has set it: {listed}"

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        parameters = dict(self._model.named_parameters())
        names = clean_names(self._model, parameters)
        return [(names[raw], each) for raw, each in parameters.items()]
