"""What a rank writes: its parts of the SHARDED components, and links to files that did not change.

Files of frozen tensors are linked, not written again. A save links to the checkpoint before the
last, never to the last. So two consecutive checkpoints have separate copies, and damage of one copy
leaves every other checkpoint intact. An earlier launch is never linked to: nobody has read its
files since. After a save that has failed, two are written again: where only its last sync failed,
its checkpoint stays, and may share a file. With ``keep_latest=1`` no second copy would stay, and
nothing is linked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from resumekit.capture.fsdp1 import FlatOptimizerState
from resumekit.capture.model import frozen_of
from resumekit.distributed import World
from resumekit.run.agreement import ComponentGroups
from resumekit.serialization.index import index_name
from resumekit.serialization.planning import (
    Assignment,
    Choice,
    HolderPositions,
    LocalState,
    Proposal,
    SavePlan,
    assign,
    encode_local,
)
from resumekit.serialization.writing import FrozenFiles, Payload
from resumekit.state import SharingPattern, Slot, StateComponent
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.retention import RetentionPolicy

# These have a folder of their own, readable by stock tools; the rest goes into one file a rank.
_OWN_DIRECTORY = frozenset({Slot.MODEL.value, Slot.OPTIMIZER.value})


def directory_of(component: StateComponent) -> str:
    """The folder inside a step directory that holds this component."""
    if component.sharing_pattern is SharingPattern.SHARDED:
        return component.key
    is_per_rank = component.sharing_pattern is SharingPattern.PER_RANK
    return component.key if component.slot in _OWN_DIRECTORY and not is_per_rank else "state"


class ShardPlanner:
    """Plans what each rank writes of the SHARDED components, and keeps the plan while it holds.

    Planning stays within the groups that hold a part together; where a component has several, it is
    in stages: each of them holds some entries of the state.

    Args:
        world: the ranks.
        components: of the run; the others are left out.
        membership: the ranks that share them.
    """

    def __init__(
        self, world: World, components: Sequence[StateComponent], membership: ComponentGroups
    ) -> None:
        self._world = world
        self._components = {
            each.key: each for each in components if each.sharing_pattern is SharingPattern.SHARDED
        }
        self._groups = {key: membership.groups(key) for key in self._components}
        self._within = {
            groups: world.within(groups) for groups in dict.fromkeys(self._groups.values())
        }
        self._layouts: dict[str, Any] = {}  # of the state that the assignments are for
        self._assigned: dict[str, Assignment] = {}

    def payloads(self) -> list[Payload]:
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
                own_tensors = each.state.first_rank_only()
                local[key] = encode_local(key, each.state.state_dict(), first_rank_only=own_tensors)
                layouts[key] = local[key].layout
            return layouts == self._layouts

        self._join_outlines()
        if not all(self._world.everywhere(encode)):
            self._layouts = {}
            self._assigned = self._plan(local)
            self._layouts = layouts
        return [
            Payload.of_shards(
                directory_of(each),
                self._world.rank,
                local[key],
                self._assigned[key],
                index_name=index_name(self._group(key).ranks[0], len(self._groups[key]) > 1),
                frozen=frozen_of(each.state),
            )
            for key, each in self._components.items()
        ]

    def _join_outlines(self) -> None:
        """Lets components whose state has holes on each rank know of the others'. Collective."""
        holed = {
            key: each.stateful
            for key, each in self._components.items()
            if isinstance(each.stateful, FlatOptimizerState)
        }
        if holed:
            outlines = self._world.everywhere(
                lambda: {key: state.outline() for key, state in holed.items()}
            )
            for key, state in holed.items():
                state.join([outlines[rank][key] for rank in self._group(key).ranks])

    def _plan(self, local: Mapping[str, LocalState]) -> dict[str, Assignment]:
        assigned: dict[str, Assignment] = {}
        for groups, world in self._within.items():
            keys = [key for key in self._components if self._groups[key] == groups]
            # A group that fails must not leave the others behind.
            self._world.everywhere(lambda: assigned.update(_plan_within(world, keys, local)))  # noqa: B023
        return assigned

    def _group(self, key: str) -> World:
        return self._within[self._groups[key]]


def _plan_within(
    world: World, keys: Sequence[str], local: Mapping[str, LocalState]
) -> dict[str, Assignment]:
    """What this rank is to write of some components, as its group has agreed. Collective."""
    position = world.ranks.index(world.rank)
    proposed: dict[str, Proposal] = {}
    plans: dict[str, SavePlan] = {}

    def propose() -> dict[str, str]:
        for key in keys:
            proposed[key] = Proposal.of(local[key], position)
        return {key: each.kinds_digest for key, each in proposed.items()}

    def plan(proposals: list[dict[str, Proposal]]) -> list[dict[str, HolderPositions]]:
        for key in keys:
            plans[key] = assign(local[key], [each[key] for each in proposals], world.ranks)
        return [
            {key: each.positions[index] for key, each in plans.items()}
            for index in range(len(proposals))
        ]

    digests = world.everywhere(propose)
    sent = {
        key: each.sent_by(position, [of_rank[key] for of_rank in digests])
        for key, each in proposed.items()
    }
    positions = world.exchange(sent, plan)
    choices: dict[str, Choice] = world.broadcast({key: each.choice for key, each in plans.items()})
    return {
        key: Assignment.of(
            local[key], choices[key], positions[key], plans[key].tensors if key in plans else None
        )
        for key in keys
    }


# ---------------------------------------------------------------- links to earlier files


class FrozenLinks:
    """The files of frozen tensors in the last two checkpoints of this launch, on one rank.

    Args:
        retention: of the run.
    """

    def __init__(self, retention: RetentionPolicy) -> None:
        self._is_enabled = retention.keep_latest is None or retention.keep_latest > 1
        self._committed: deque[tuple[StepName, Mapping[str, FileEntry]]] = deque(maxlen=2)
        self._is_open = False  # a save has begun, and is not durable yet
        self._known: dict[str, tuple[object, Sequence[bytes]]] = {}  # digests of files, by path

    @contextmanager
    def compared(
        self, step: int, payloads: Sequence[Payload], *, num_threads: int
    ) -> Iterator[None]:
        """Compares frozen tensors with earlier files during the body, which links equal ones.

        Args:
            step: of the new checkpoint.
            payloads: of this rank; those without frozen tensors are left alone.
            num_threads: that digest.
        """
        if self._is_open:  # that save has failed, and may have left its checkpoint all the same
            self._committed.clear()
        self._is_open = True
        frozen = [each for each in payloads if isinstance(each, FrozenFiles)]
        try:
            for each in frozen:
                source = self._source(step, each.path)
                if source is not None:
                    each.compare(*source, self._known, num_threads=num_threads)
            yield
        finally:
            for each in frozen:
                each.stop()

    def committed(self, name: StepName, files: Iterable[FileEntry]) -> None:
        """A checkpoint is durable.

        Args:
            name: of the checkpoint.
            files: that this rank has written or linked.
        """
        self._is_open = False
        self._committed.append((name, {entry.path: entry for entry in files}))

    def _source(self, step: int, path: str) -> tuple[StepName, FileEntry] | None:
        if not self._is_enabled or len(self._committed) < 2:
            return None
        (name, before), (last, latest) = self._committed
        entry = before.get(path)
        # The same step saved again replaces the last checkpoint, and its copy.
        if entry is None or entry != latest.get(path) or last.step == step:
            return None
        return name, entry


def finish_comparing(payloads: Iterable[Payload]) -> None:
    """Waits for the comparisons: only then is it known which files need memory."""
    for each in payloads:
        if isinstance(each, FrozenFiles):
            each.finish_comparing()


def link(staging: Staging, payloads: Iterable[Payload]) -> None:
    """Links the files that are equal; one that cannot be linked will be written."""
    for each in payloads:
        if isinstance(each, FrozenFiles):
            each.link(staging)


def with_frozen(payloads: Sequence[Payload]) -> list[Payload]:
    """The payloads, then the files of their frozen tensors, which are digested meanwhile."""
    return [*payloads, *(each.frozen for each in payloads if each.frozen is not None)]
