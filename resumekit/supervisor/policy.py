"""Whether a command that has ended is started again, and when."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from resumekit.attach import EXIT_USAGE

_MAX_DELAY_SECONDS = 60.0
_MAX_EARLY_EXITS = 2

# 128 + each is the status of a run that has saved and left, see docs/how-to/preemption.md.
_PREEMPTING = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


@dataclass(frozen=True)
class Decision:
    """What follows the end of a launch.

    Args:
        restarts: whether the command is started again.
        reason: why, or why not; for the user.
        delay_seconds: before the restart.
    """

    restarts: bool
    reason: str
    delay_seconds: float = 0.0


class RestartPolicy:
    """Decides after each launch, and counts the restarts without progress.

    Args:
        max_restarts: the restarts in a row without a new checkpoint; 0 allows no restart at all.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_restarts = 0  # since the newest checkpoint
        self._num_early_exits = 0

    def after(
        self, status: int, *, has_progress: bool, has_stepped: bool, received: str | None = None
    ) -> Decision:
        """What follows a launch.

        Args:
            status: its exit status, see ``exit_status``.
            has_progress: whether it has committed a checkpoint.
            has_stepped: whether it has trained a step.
            received: the signal that was forwarded to it.
        """
        final = _final_reason(status, received)
        if final is not None:
            return Decision(False, final)
        self._num_early_exits = 0 if has_stepped else self._num_early_exits + 1
        if has_progress:
            self._num_restarts = 0
        if self._num_early_exits >= _MAX_EARLY_EXITS:
            return Decision(False, f"{self._num_early_exits} launches ended before the first step")
        if self._num_restarts >= self._max_restarts:
            limit = f"--max-restarts {self._max_restarts}"
            return Decision(False, f"{limit}: no new checkpoint since that many restarts")
        delay = min(2.0**self._num_restarts, _MAX_DELAY_SECONDS)
        self._num_restarts += 1
        return Decision(True, f"restart {self._num_restarts} of {self._max_restarts}", delay)


def exit_status(returncode: int) -> int:
    """The exit status as a shell gives it, from what ``subprocess`` gives."""
    return 128 - returncode if returncode < 0 else returncode


def _final_reason(status: int, received: str | None) -> str | None:
    """Why there is no restart, whatever happened before; None where there may be one."""
    if status == 0:
        return "done"
    if received is not None:
        return f"{received} was forwarded"
    if status == EXIT_USAGE:
        return "a usage error"
    names = {128 + getattr(signal, name): name for name in _PREEMPTING}
    return f"preempted by {names[status]}" if status in names else None
