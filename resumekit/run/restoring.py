"""Loading the states of a checkpoint into the live objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from resumekit.distributed import World
from resumekit.state import ComponentState, Slot, StateComponent
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
            own = component.state.start_fresh()
            default = (f"{name} has no {component.key}: it starts from its live state",)
            remarks.extend(default if own is None else own)
    return remarks


def call_everywhere(
    world: World,
    components: Sequence[StateComponent],
    hook: Callable[[ComponentState], Iterable[str] | None],
) -> tuple[str, ...]:
    """Calls a method of the components that override it; gives rank 0's remarks. Collective.

    Without such a component there is no collective.
    """
    states = [each.state for each in components if each.state.overrides(hook)]
    if not states:
        return ()
    return world.everywhere(
        lambda: tuple(
            remark for state in states for remark in getattr(state, hook.__name__)() or ()
        )
    )[0]
