"""State that is spread over the ranks, on its way into a checkpoint and out of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.capture.spread import pairs_of
from resumekit.contract import SharingPattern, StateComponent, Stateful
from resumekit.distributed import World
from resumekit.payload.sharded import (
    Assignment,
    LocalState,
    Proposal,
    ShardedPayload,
    Source,
    assign,
    encode_local,
    read_sharded,
)
from resumekit.storage import ComponentRecord, StepReader


class Spreader:
    """Plans what each rank writes of the SHARDED components, and keeps the plan while it holds.

    Args:
        world: the ranks.
        components: the live object and the directory of each, by key.
    """

    def __init__(self, world: World, components: Mapping[str, tuple[Stateful, str]]) -> None:
        self._world = world
        self._components = components
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
        proposed: dict[str, Proposal] = {}
        layouts: dict[str, Any] = {}

        def encode() -> bool:
            for key, (stateful, _) in self._components.items():
                own = getattr(stateful, "first_rank_only", frozenset)
                local[key] = encode_local(key, stateful.state_dict(), first_rank_only=own())
                layouts[key] = local[key].layout
            return layouts == self._layouts

        def propose() -> None:
            for key, state in local.items():
                proposed[key] = Proposal.of(state, self._world.rank)

        def plan(proposals: list[dict[str, Proposal]]) -> list[dict[str, Assignment]]:
            plans = {key: assign(local[key], [each[key] for each in proposals]) for key in local}
            return [{key: plans[key][rank] for key in plans} for rank in range(len(proposals))]

        if not all(self._world.everywhere(encode)):
            self._layouts = {}
            self._world.everywhere(propose)
            self._assigned = self._world.exchange(proposed, plan)
            self._layouts = layouts
        return [
            ShardedPayload(directory, self._world.rank, local[key], self._assigned[key])
            for key, (_, directory) in self._components.items()
        ]


def is_spread(record: ComponentRecord, live: StateComponent | None) -> bool:
    """Whether a component is read part by part: it was saved in parts, or it is in parts here."""
    sharded = SharingPattern.SHARDED
    if record.pattern == sharded.value:
        return True
    was_whole = record.pattern in (SharingPattern.REPLICATED.value, SharingPattern.GLOBAL.value)
    return was_whole and live is not None and live.sharing_pattern is sharded


def read_spread(reader: StepReader, record: ComponentRecord, live: StateComponent | None) -> Any:
    """The state of a component, with this rank's part of what is in parts here.

    Raises:
        CheckpointError: damage, or an I/O error.
        StateMismatchError: it does not fit the live object; told before its tensors are read.
    """
    is_sharded = record.pattern == SharingPattern.SHARDED.value
    source = Source(reader, record.directory, record.key, is_sharded, record.writers[0])
    if live is None:
        return read_sharded(source, lambda state: ())
    check = getattr(live.stateful, "check_state_dict", lambda state: None)
    return read_sharded(source, lambda state: pairs_of(live.stateful, state), check)
