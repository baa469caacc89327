"""How far a run is to go: the same when it is resumed, or told."""

from __future__ import annotations

from collections.abc import Mapping

from resumekit.errors import DriftError

HORIZON = "horizon"


def changed_horizon(
    then: Mapping[str, int], now: Mapping[str, int], *, allowed: bool, elsewhere: bool
) -> str:
    """What to tell about a horizon that changed; empty where it did not.

    Args:
        then: the horizon in the checkpoint by unit; empty where there was none.
        now: that of this run.
        allowed: whether the user allows it to change.
        elsewhere: another framework may have written the checkpoint. Frameworks count in steps, in
            epochs or in both: what both count must agree.

    Raises:
        DriftError: it changed, and is not allowed to.
    """
    common = then.keys() & now.keys() if elsewhere else set[str]()
    is_same = all(then[unit] == now[unit] for unit in common) if common else then == now
    if is_same or not then:
        return ""
    if not allowed:
        raise DriftError(
            HORIZON,
            found=_words(now),
            expected=f"{_words(then)}, as in the checkpoint",
            remedy="Restore it, or pass allow_changes={'horizon'}",
        )
    return f"horizon: was {_words(then)} in the checkpoint, the script's {_words(now)} is used"


def _words(horizon: Mapping[str, int]) -> str:
    return ", ".join(f"{unit}={count}" for unit, count in horizon.items())
