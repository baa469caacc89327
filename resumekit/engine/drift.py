"""What may differ between the run that saved and the one that resumes."""

from __future__ import annotations

from collections.abc import Sequence

from resumekit.capture import Difference, SchedulerState, Severity
from resumekit.contract import StateComponent
from resumekit.engine.options import Options, names_component
from resumekit.errors import DriftError


def accept_drift(
    changed: Sequence[Difference], components: Sequence[StateComponent], options: Options
) -> None:
    """Refuses a changed horizon; where it is allowed, schedulers keep the live one.

    Raises:
        DriftError: what the learning rate was planned for has changed.
    """
    refused = [
        each
        for each in changed
        if each.severity is Severity.HORIZON
        and not names_component(options.exclude, each.name.split(".", 1)[0])
    ]
    if "horizon" in options.allow_changes:
        for component in components:
            if isinstance(component.stateful, SchedulerState):
                component.stateful.keep_horizon = True
    elif refused:
        raise DriftError(
            "horizon",
            found="; ".join(str(each) for each in refused),
            expected="the horizon that the learning rate was planned for",
            remedy="Restore it, or pass allow_changes={'horizon'}",
        )
