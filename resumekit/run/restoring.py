"""Loading the states of a checkpoint into the live objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from resumekit.distributed import World
from resumekit.state import Slot, StateComponent
from resumekit.storage import StepName

# The order of a restore. The progress comes before it, as soon as the checkpoint is found; the data
# position and then the random state are only kept, and follow at the first fetch.
_RESTORE_ORDER = (
    Slot.MODEL,
    Slot.OPTIMIZER,
    Slot.LR_SCHEDULER,
    Slot.GRAD_SCALER,
    Slot.EMA,
    Slot.BEST_METRIC,
    Slot.CALLBACKS,
    Slot.EXTRAS,
    Slot.DATA,
    Slot.RNG,
)


def restore(components: Sequence[StateComponent], states: Mapping[str, Any]) -> tuple[str, ...]:
    """Loads in the order of a restore; gives what the components had to remark."""
    order = {slot.value: place for place, slot in enumerate(_RESTORE_ORDER)}
    given = [each for each in components if each.key in states and each.slot in order]
    remarks: list[str] = []
    for component in sorted(given, key=lambda each: order[each.slot]):
        remarks += _words(component.stateful.load_state_dict(states[component.key]))
    return tuple(remarks)


def _words(returned: Any) -> list[str]:
    """What a load had to remark; objects of other libraries return something else, or nothing."""
    is_ours = isinstance(returned, (tuple, list))
    return [each for each in returned if isinstance(each, str)] if is_ours else []


def start_fresh(
    components: Sequence[StateComponent], name: StepName, keys: Collection[str]
) -> list[str]:
    """What to tell about the components of these keys, which the checkpoint lacks."""
    remarks: list[str] = []
    for component in components:
        if component.key in keys:
            begin = getattr(component.stateful, "start_fresh", None)
            default = (f"{name} has no {component.key}: it starts from its live state",)
            remarks.extend(begin() if begin is not None else default)
    return remarks


def call_everywhere(
    world: World, components: Sequence[StateComponent], method: str
) -> tuple[str, ...]:
    """Calls a method of the components that have it; gives rank 0's remarks. Collective."""
    having = [each.stateful for each in components if hasattr(each.stateful, method)]
    if not having:
        return ()
    return world.everywhere(
        lambda: tuple(remark for each in having for remark in getattr(each, method)() or ())
    )[0]
