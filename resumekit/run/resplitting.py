"""The states of former ranks or groups, split anew among those of this job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resumekit.distributed import World
from resumekit.errors import StateMismatchError
from resumekit.layout import WorldChange
from resumekit.run.resuming import Found
from resumekit.run.sources import Sources
from resumekit.state import SharingPattern, StateComponent
from resumekit.storage import ComponentRecord


def resplit(
    found: Found, components: Sequence[StateComponent], sources: Sources, world: World
) -> tuple[str, ...]:
    """Makes this rank's states of those of the former ranks; gives the remarks of all. Collective.

    Args:
        found: the checkpoint.
        components: of this run.
        sources: whose state this rank takes.
        world: the ranks.

    Raises:
        StateMismatchError: the number of ranks has changed, and a component cannot follow.
        DataPositionError: the former ranks were not at one place in the data.
    """
    manifest = found.manifest
    records = {record.key: record for record in manifest.components}

    def of_this_rank() -> tuple[str, ...]:
        remarks: list[str] = []
        for component in components:
            if component.key not in found.former:
                continue
            record, former = records[component.key], found.former[component.key]
            number = sources.own(record, manifest)
            if number is not None:  # it was not known yet when it was read
                found.states[component.key] = former[number]
                continue
            state, own = _resplit(component, former, sources.change(record, manifest), record)
            found.states[component.key] = state
            remarks.extend(own)
        return tuple(remarks)

    remarks: list[str] = []
    if manifest.world_size != world.world_size:
        remarks.append(f"number of ranks was {manifest.world_size}, now {world.world_size}")
    if any(world.gather(bool(found.former))):
        remarks += [remark for own in world.everywhere(of_this_rank) for remark in own]
    return tuple(dict.fromkeys(remarks))


def require_taken(found: Found, world: World) -> None:
    """Returns when every saved tensor of a component in stages has a stage that holds it here.

    Raises:
        StateMismatchError: on every rank; it names the first tensor that nobody holds.
    """
    every = world.gather(found.left)
    for key, left in found.left.items():
        nobody = sorted(left.intersection(*(each.get(key, frozenset()) for each in every)))
        if nobody:
            more = f" (and {len(nobody) - 1} more)" if len(nobody) > 1 else ""
            raise StateMismatchError(
                f"{key}: {nobody[0]}",
                found=f"in the checkpoint{more}",
                expected="a stage that holds it",
                remedy="Build the stages of the whole model",
            )


def _resplit(
    component: StateComponent,
    former: Mapping[int, Any],
    change: WorldChange,
    record: ComponentRecord,
) -> tuple[Any, tuple[str, ...]]:
    found = component.state.resplit_state_dict(former, change)
    if found is None:
        noun = "ranks" if record.pattern == SharingPattern.PER_RANK.value else "groups of ranks"
        raise StateMismatchError(
            component.key,
            found=f"a state of its own on each of {change.former_world_size} {noun}, for "
            f"{change.world_size} of them",
            expected="a method resplit_state_dict, which makes of them the state of another rank",
            remedy=f"Pass exclude={{{component.key!r}}} to leave it as it is, or launch the job as "
            "it was",
        )
    state, remarks = found
    return state, tuple(remarks)
