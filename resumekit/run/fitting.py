"""Whether a checkpoint's components are those of this run, told before any of them loads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from resumekit.capture import GRADIENT_BUCKETS, RANK_BUFFERS
from resumekit.errors import StateMismatchError
from resumekit.run.belonging import frameworks_of, of_other_frameworks
from resumekit.run.membership import Membership
from resumekit.run.options import Options, names_component
from resumekit.state import Slot, StateComponent
from resumekit.storage import Manifest, StepName

# A run that turns AMP on continues with a fresh scaler rather than not at all; it is told.
_MAY_START_FRESH = frozenset({Slot.GRAD_SCALER.value})


def check_fit(
    manifest: Manifest,
    components: Sequence[StateComponent],
    options: Options,
    membership: Membership,
    *,
    world_size: int,
    empty: Collection[str] = (),
) -> tuple[str, ...]:
    """The components that start from their live state because the checkpoint has none.

    Args:
        manifest: the checkpoint's.
        components: of this run.
        options: of this run.
        membership: of the components.
        world_size: the ranks of this run.
        empty: the components on one side only in which there is nothing.

    Raises:
        StateMismatchError: a component on one side only, and nothing allows it.
    """
    regrouped = regrouped_buffers(manifest, components, membership)
    saved = {record.key for record in manifest.components} - regrouped
    live = {component.key for component in components}
    others, former = of_other_frameworks(manifest, components), frameworks_of(manifest)
    checkpoint = str(StepName(manifest.step, manifest.revision))
    fresh: list[str] = []
    for component in components:
        key = component.key
        if key in saved or names_component(options.exclude, key):
            continue
        allowed = names_component(options.allow_missing, key)
        allowed = allowed or key in regrouped
        # What a framework needs for its own loop, it begins anew where another one was left.
        is_others = component.framework != "" and component.framework not in former
        allowed = allowed or is_others or key in empty
        allowed = allowed or (_is_rank_buffers(key) and manifest.world_size == 1 < world_size)
        if not (allowed or component.slot in _MAY_START_FRESH or not component.required):
            raise StateMismatchError(
                key,
                found=f"{checkpoint} has no {key} (it has {', '.join(sorted(saved))})",
                expected="one, as this run uses it",
                remedy=f"Pass allow_missing={{{key!r}}} to start it from its live state",
            )
        fresh.append(key)
    for key in sorted(saved - live):
        goes_without = _is_rank_buffers(key) and world_size == 1 < manifest.world_size
        goes_without = goes_without or key.rpartition("/")[2] == GRADIENT_BUCKETS
        goes_without = goes_without or key in others or key in empty
        if not (names_component(options.exclude, key) or goes_without):
            raise StateMismatchError(
                key,
                found=f"{checkpoint} has {key}, and this run has none",
                expected="a live object to load it into",
                remedy=f"Give it to the Checkpointer, or pass exclude={{{key!r}}} to leave it out",
            )
    return tuple(fresh)


def regrouped_buffers(
    manifest: Manifest, components: Sequence[StateComponent], membership: Membership
) -> frozenset[str]:
    """The keys of each rank's own buffers of modules that other groups of ranks hold here.

    No rank can take them over: they start from the buffers that were saved with the module.
    """
    then = {record.key: record.groups for record in manifest.components}
    return frozenset(
        f"{each.key}/{RANK_BUFFERS}"
        for each in components
        if each.key in then and then[each.key] != membership.recorded(each)
    )


def _is_rank_buffers(key: str) -> bool:
    """Whether a component exists in runs of several ranks alone; one rank's are in the module."""
    return key.rpartition("/")[2] == RANK_BUFFERS


def check_states(states: Mapping[str, Any], components: Sequence[StateComponent]) -> None:
    """Lets every component refuse its state before any of them loads. Changes nothing."""
    for component in components:
        if component.key in states:
            component.state.check_state_dict(states[component.key])
