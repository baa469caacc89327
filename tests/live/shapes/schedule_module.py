"""A module of the user with a global that its function changes."""

from __future__ import annotations

factor = 1.0


def update(loss: float) -> None:
    """Changes the global of this module."""
    global factor
    factor = 0.8 * factor + 0.3 * loss
