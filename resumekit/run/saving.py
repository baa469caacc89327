"""One save, from the agreement of the ranks to the commit. See docs/format.md for what it leaves.

Every rank calls ``Saver.save`` at the same safe point. Any rank's failure aborts the save on all
of them: the staging is removed and the previous checkpoint is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from resumekit.distributed import World
from resumekit.errors import ResumekitError, SaveError
from resumekit.log import logger
from resumekit.run.agreement import ComponentGroups
from resumekit.run.progress import Progress
from resumekit.serialization import (
    Assignment,
    ExtraFiles,
    LocalState,
    Payload,
    Proposal,
    ShardedPayload,
    assign,
    encode_local,
    index_name,
)
from resumekit.state import CaptureReport, ComponentState, SharingPattern, Slot, StateComponent
from resumekit.storage import (
    ComponentRecord,
    FileEntry,
    Manifest,
    RetentionPolicy,
    Staging,
    StepName,
    Store,
)

# These have a folder of their own, readable by stock tools; the rest goes into one file a rank.
_OWN_DIRECTORY = frozenset({Slot.MODEL.value, Slot.OPTIMIZER.value})

Payloads = Sequence[Payload | ShardedPayload | ExtraFiles]


def directory_of(component: StateComponent) -> str:
    """The folder inside a step directory that holds this component."""
    if component.sharing_pattern is SharingPattern.SHARDED:
        return component.key
    is_per_rank = component.sharing_pattern is SharingPattern.PER_RANK
    return component.key if component.slot in _OWN_DIRECTORY and not is_per_rank else "state"


@dataclass
class Saver:
    """Writes checkpoints of a list of components into a store. Every method is collective."""

    world: World
    store: Store
    components: Sequence[StateComponent]
    membership: ComponentGroups
    retention: RetentionPolicy
    parent: str | None = None

    def __post_init__(self) -> None:
        self._shard_planner = ShardPlanner(self.world, self.components, self.membership)

    def save(
        self,
        progress: Progress,
        capture: CaptureReport,
        *,
        finished: str | None,
        metric: dict[str, str] | None,
        fingerprint: dict[str, Any],
        details: dict[str, Any],
    ) -> StepName:
        """Writes and commits one checkpoint, and then lets the retention policy delete old ones.

        Args:
            progress: of the run.
            capture: how exactly each component is restored.
            finished: why the run is over, or None.
            metric: the manifest's record of the metric, if there is one.
            fingerprint: the settings of the run.
            details: what else the manifest holds; plain values.

        Raises:
            UnsupportedValueError: a value cannot be stored; nothing was written.
            InsufficientSpaceError: there is no room; nothing was written.
            SharedDirectoryError: a rank does not see what rank 0 has made.
            RankLostError: a rank has died, or does not answer.
            SaveError: writing failed; nothing was committed.
            OwnershipLostError: another attempt owns the directory now.
        """
        payloads = self._payloads()
        name, staging = self._stage(progress.step, payloads)
        try:
            written = self.world.everywhere(lambda: self._write(staging(), payloads))
            manifest = Manifest(
                run_id=self.store.run_id,
                attempt=self.store.attempt,
                step=name.step,
                revision=name.revision,
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                parent=self.parent,
                world_size=self.world.world_size,
                progress=progress.as_dict(),
                finished=finished,
                metric=metric,
                components=tuple(self._record(each, capture) for each in self.components),
                files=tuple(entry for entries in written for entry in entries),
                capture=capture.as_dict(),
                fingerprint=fingerprint,
                details=details,
            )
            self.world.on_first(lambda: str(self.store.commit(staging(), manifest)))
        except ResumekitError:
            if self.world.is_first:
                self.store.abandon(staging())
            raise
        self.parent = str(name)
        self.world.on_first(self._retain)
        return name

    def _payloads(self) -> Payloads:
        encoded: list[Payload | ExtraFiles] = []
        self.world.everywhere(lambda: encoded.extend([*self._encode(), *self._files()]))
        return [*encoded, *self._shard_planner.payloads()]

    def _files(self) -> list[ExtraFiles]:
        if not self.world.is_first:
            return []
        return [
            ExtraFiles(directory_of(component), self.world.rank, component.files())
            for component in self.components
            if component.files is not None
        ]

    def _encode(self) -> list[Payload]:
        by_directory: dict[str, dict[str, Any]] = {}
        for component in self.components:
            if component.sharing_pattern is SharingPattern.SHARDED:
                continue
            if self.world.rank in self.membership.writers(component):
                states = by_directory.setdefault(directory_of(component), {})
                states[component.key] = component.stateful.state_dict()
        return [
            Payload(directory, self.world.rank, states)
            for directory, states in by_directory.items()
        ]

    def _stage(self, step: int, payloads: Payloads) -> tuple[StepName, Callable[[], Staging]]:
        """Its name, and what looks for the staging: a rank may find that it does not see it."""
        demands = self.world.gather(
            (sum(p.num_bytes for p in payloads), sum(p.num_files for p in payloads))
        )
        directories = sorted({directory_of(component) for component in self.components})
        mine: list[Staging] = []

        def stage() -> tuple[StepName, str]:
            name = self.store.next_name(step)
            staging = self.store.stage(
                name,
                num_bytes=sum(num_bytes for num_bytes, _ in demands),
                num_files=sum(num_files for _, num_files in demands),
                directories=directories,
            )
            mine.append(staging)
            return name, staging.name

        name, staging_name = self.world.on_first(stage)
        return name, lambda: mine[0] if mine else self.store.attach(staging_name)

    def _write(self, staging: Staging, payloads: Payloads) -> list[FileEntry]:
        return [entry for payload in payloads for entry in payload.write(staging)]

    def _record(self, component: StateComponent, capture: CaptureReport) -> ComponentRecord:
        assert isinstance(component.sharing_pattern, SharingPattern)
        line = next(line for line in capture.lines if line.key == component.key)
        assert line.fidelity is not None
        return ComponentRecord(
            key=component.key,
            pattern=component.sharing_pattern.value,
            fidelity=line.fidelity.value,
            reason=line.reason,
            directory=directory_of(component),
            writers=self.membership.writers(component),
            groups=self.membership.recorded(component),
        )

    def _retain(self) -> None:
        # The new checkpoint is committed: an old one that cannot be removed does not undo that.
        try:
            self.store.retain(self.retention)
        except SaveError as error:
            logger.warning("old checkpoints could not be removed: %s", error)


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
            ShardedPayload(
                directory_of(each),
                self._world.rank,
                local[key],
                self._assigned[key],
                index_name=index_name(self._group(key).ranks[0], len(self._groups[key]) > 1),
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
    proposed: dict[str, Proposal] = {}

    def propose() -> None:
        for key in keys:
            proposed[key] = Proposal.of(local[key], world.ranks.index(world.rank))

    def plan(proposals: list[dict[str, Proposal]]) -> list[dict[str, Assignment]]:
        plans = {
            key: assign(local[key], [each[key] for each in proposals], world.ranks) for key in keys
        }
        return [{key: plans[key][index] for key in keys} for index in range(len(proposals))]

    world.everywhere(propose)
    return world.exchange(proposed, plan)
