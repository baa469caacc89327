"""Settings that a program changes while it trains: a module of the user's with a global."""

from __future__ import annotations

temperature = 1.0


def cool(loss: float) -> None:
    """Moves the temperature towards the loss."""
    global temperature
    temperature = 0.6 * temperature + 0.4 * loss
