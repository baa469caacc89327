"""The user's objects that a stream reads: their state when the epoch began.

A resume inside an epoch iterates the stream again from there, so its objects need that state first.
What they held at the interruption is restored after the used batches, as user state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from resumekit.capture import Holder, UserState

# Makes the user state of some objects, without what other components of the run save.
Follow: TypeAlias = Callable[[Mapping[str, Holder]], UserState]


class StreamObjects:
    """Records what the objects of a stream hold when an epoch begins, and restores it.

    Args:
        state: their user state; its baseline is what the script made.
    """

    def __init__(self, state: UserState) -> None:
        self._state = state
        self._at_start: dict[str, Any] = {}

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """An epoch begins: records what differs from what the script made.

        Args:
            saved: what ``state_dict`` gave in the interrupted epoch, which is restored first; None
                where a new epoch begins.

        Raises:
            StateMismatchError: it does not fit the objects.
        """
        if saved is not None:
            self._state.check_state_dict(saved)
            self._state.load_state_dict(saved)
            self._state.restore_now()
        self._at_start = copy.deepcopy(self._state.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What the objects held when the epoch began, where the script had not made it."""
        return self._at_start
