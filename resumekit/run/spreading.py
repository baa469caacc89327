"""State that is spread over the ranks, on its way into a checkpoint and out of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from resumekit.capture import merged, pairs_of, part_of
from resumekit.distributed import World
from resumekit.layout import Groups
from resumekit.serialization import (
    Assignment,
    LocalState,
    Proposal,
    ShardedPayload,
    Source,
    assign,
    encode_local,
    index_name,
    read_sharded,
)
from resumekit.state import ComponentState, SharingPattern, StateComponent
from resumekit.storage import ComponentRecord, StepReader


@dataclass(frozen=True)
class Spread:
    """A SHARDED component.

    Args:
        state: of the live object.
        directory: of its files, relative to the step directory.
        groups: the ranks that hold a part of it together; one group where it has no stages.
    """

    state: ComponentState
    directory: str
    groups: Groups

    @property
    def is_in_stages(self) -> bool:
        """Whether each group holds some entries of the state."""
        return len(self.groups) > 1


class Spreader:
    """Plans what each rank writes of the SHARDED components, and keeps the plan while it holds.

    Planning stays within the groups that hold a part together.

    Args:
        world: the ranks.
        components: by key; the same groups on all ranks.
    """

    def __init__(self, world: World, components: Mapping[str, Spread]) -> None:
        self._world = world
        self._components = components
        self._within = {groups: world.within(groups) for groups in _distinct_groups(components)}
        self._layouts: dict[str, Any] = {}  # of the state that the assignments are for
        self._assigned: dict[str, Assignment] = {}

    def payloads(self) -> list[ShardedPayload]:
        """What this rank is to write. Collective.

        Raises:
            UnsupportedValueError: a value cannot be stored, or the ranks do not hold all of a
                tensor.
            RankDisagreementError: the ranks' states are not parts of one state.
        """
        if not self._components:
            return []
        local: dict[str, LocalState] = {}
        layouts: dict[str, Any] = {}

        def encode() -> bool:
            for key, each in self._components.items():
                own = each.state.first_rank_only()
                local[key] = encode_local(key, each.state.state_dict(), first_rank_only=own)
                layouts[key] = local[key].layout
            return layouts == self._layouts

        self._join_outlines()
        if not all(self._world.everywhere(encode)):
            self._layouts = {}
            self._assigned = self._plan(local)
            self._layouts = layouts
        return [
            ShardedPayload(
                each.directory,
                self._world.rank,
                local[key],
                self._assigned[key],
                index_name=self._index_name(each),
            )
            for key, each in self._components.items()
        ]

    def _join_outlines(self) -> None:
        """Lets components whose state has holes on each rank know of the others'. Collective."""
        holed = {
            key: each.state
            for key, each in self._components.items()
            if each.state.overrides(ComponentState.outline)
        }
        if holed:
            outlines = self._world.everywhere(
                lambda: {key: state.outline() for key, state in holed.items()}
            )
            for key, state in holed.items():
                ranks = self._within[self._components[key].groups].ranks
                state.join([outlines[rank][key] for rank in ranks])

    def _plan(self, local: Mapping[str, LocalState]) -> dict[str, Assignment]:
        assigned: dict[str, Assignment] = {}
        for groups, world in self._within.items():
            keys = [key for key, each in self._components.items() if each.groups == groups]
            # A group that fails must not leave the others behind.
            self._world.everywhere(lambda: assigned.update(_plan_within(world, keys, local)))  # noqa: B023
        return assigned

    def _index_name(self, component: Spread) -> str:
        return index_name(self._within[component.groups].ranks[0], component.is_in_stages)


def _distinct_groups(components: Mapping[str, Spread]) -> list[Groups]:
    return list(dict.fromkeys(each.groups for each in components.values()))


def _plan_within(
    world: World, keys: Sequence[str], local: Mapping[str, LocalState]
) -> dict[str, Assignment]:
    """What this rank is to write of some components, as its group has agreed. Collective."""
    proposed: dict[str, Proposal] = {}

    def propose() -> None:
        for key in keys:
            proposed[key] = Proposal.of(local[key], world.ranks.index(world.rank))

    def plan(proposals: list[dict[str, Proposal]]) -> list[dict[str, Assignment]]:
        plans = {
            key: assign(local[key], [each[key] for each in proposals], world.ranks) for key in keys
        }
        return [{key: plans[key][place] for key in keys} for place in range(len(proposals))]

    world.everywhere(propose)
    return world.exchange(proposed, plan)


def is_spread(record: ComponentRecord, live: StateComponent | None) -> bool:
    """Whether a component is read part by part: it was saved in parts, or it is in parts here."""
    sharded = SharingPattern.SHARDED
    if record.pattern == sharded.value:
        return True
    was_whole = record.pattern in (SharingPattern.REPLICATED.value, SharingPattern.GLOBAL.value)
    return was_whole and live is not None and live.sharing_pattern is sharded


def read_spread(
    reader: StepReader, record: ComponentRecord, live: StateComponent | None, *, in_stages: bool
) -> tuple[Any, frozenset[str]]:
    """The state of a component, with this rank's part of what is in parts here.

    Args:
        reader: the checkpoint.
        record: of the component in it.
        live: the component here, if it is known yet.
        in_stages: whether each group of ranks holds some entries of it here.

    Returns:
        The state, and the names of the tensors that this rank's stage does not hold.

    Raises:
        CheckpointError: damage, or an I/O error.
        StateMismatchError: it does not fit the live object; told before its tensors are read.
    """
    indices: tuple[str, ...] = ()
    if record.pattern == SharingPattern.SHARDED.value:
        firsts = [group[0] for group in record.groups] or [0]
        indices = tuple(index_name(first, len(firsts) > 1) for first in firsts)
    source = Source(reader, record.directory, record.key, indices, record.writers[0])
    if live is None:
        return read_sharded(source, lambda state: (), merge=partial(merged, None, record.key))
    return read_sharded(
        source,
        lambda state: pairs_of(live.stateful, state),
        live.state.check_state_dict,
        merge=partial(merged, live.stateful, record.key),
        part_of=partial(part_of, live.stateful) if in_stages else None,
    )
