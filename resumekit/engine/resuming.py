"""Finding the newest good checkpoint, reading it whole, and only then changing live objects.

Each rank reads and verifies the bytes that it needs; the ranks vote; a bad checkpoint is told and
the next one is tried. Nothing live changes before every check has passed on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from resumekit.capture.buffers import RANK_BUFFERS
from resumekit.capture.gradient_buckets import GRADIENT_BUCKETS
from resumekit.contract import SharingPattern, Slot, StateComponent
from resumekit.distributed import World, from_rank
from resumekit.engine.membership import Membership
from resumekit.engine.options import Options, names_component
from resumekit.engine.report import Rejection, tell
from resumekit.engine.spreading import is_spread, read_spread
from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryError,
    NoUsableCheckpointError,
    OwnershipLostError,
    ResumekitError,
    StateMismatchError,
)
from resumekit.layout import Groups, WorldChange
from resumekit.payload import read_payload
from resumekit.storage import ComponentRecord, Manifest, StepName, StepReader, Store

# A run that turns AMP on continues with a fresh scaler rather than not at all; it is told.
_MAY_START_FRESH = frozenset({Slot.GRAD_SCALER.value})

# One state for the job.
_OF_THE_JOB = frozenset({SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value})


@dataclass(frozen=True)
class Found:
    """A checkpoint that every rank has read and verified.

    Args:
        name: its directory's name.
        reader: the open step directory.
        states: the states this rank needs, by component key.
        former: of components of which each rank or group has its own, the states of former ones by
            number, where it is not plain which one this rank takes; ``resplit`` makes its states
            of them.
        left: of components in stages, the names of the tensors that this rank does not hold.
        rejected: newer checkpoints that were passed over.
    """

    name: StepName
    reader: StepReader
    states: dict[str, Any]
    former: dict[str, dict[int, Any]]
    left: dict[str, frozenset[str]]
    rejected: tuple[Rejection, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's inventory."""
        return self.reader.manifest

    def leave(self, keys: Iterable[str]) -> None:
        """Forgets the states of some components."""
        for key in keys:
            self.states.pop(key, None)
            self.former.pop(key, None)


class Finder:
    """Chooses the checkpoint to continue from. Every method is collective.

    Args:
        left_out: component keys or slots that are not read.
        components: of this run, as far as they are known yet; of state that is spread over the
            ranks they say which part this rank needs.
        membership: of those components.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        options: Options,
        left_out: frozenset[str],
        components: Sequence[StateComponent] = (),
        membership: Membership | None = None,
    ) -> None:
        self._world = world
        self._store = store
        self._options = options
        self._left_out = left_out
        self._live = {component.key: component for component in components}
        self._membership = membership or Membership(world.rank, {})

    def find(self) -> Found | None:
        """The newest good checkpoint, or None in a directory that never held one.

        Raises:
            CheckpointNotFoundError: ``resume_from`` names one that is not there.
            NoUsableCheckpointError: checkpoints are there, and none can be used.
        """
        rejected: list[Rejection] = []
        for name in self._world.on_first(self._candidates):
            outcome = self._read(name)
            if isinstance(outcome, Found):
                for rejection in rejected:
                    self._tell(f"passed over {rejection.name}: {rejection.reason}")
                return replace(outcome, rejected=tuple(rejected))
            rejected.append(Rejection(str(name), str(outcome)))
        if rejected:
            raise NoUsableCheckpointError(
                str(self._store.directory),
                found="; ".join(each.reason.rstrip(".") for each in rejected),
                expected="at least one checkpoint that verifies",
                remedy="Restore one from a copy, or start afresh in an empty directory",
            )
        return None

    def _candidates(self) -> list[StepName]:
        names = self._store.step_names()
        wanted = self._options.resume_from
        if wanted is not None:
            return self._continuations(StepName.from_text(wanted), names)
        set_aside = self._store.quarantined() if not names else []
        if set_aside:
            raise NoUsableCheckpointError(
                str(self._store.directory),
                found=f"no checkpoint but damaged ones ({', '.join(sorted(set_aside))})",
                expected="at least one checkpoint that verifies, or an empty directory",
                remedy=f"Restore one from a copy, or remove {self._store.directory / 'quarantine'}",
            )
        return names

    def _continuations(self, wanted: StepName, names: list[StepName]) -> list[StepName]:
        """The named checkpoint, after what an earlier launch of this command made of it."""
        if wanted not in names:
            raise CheckpointNotFoundError(
                f"resume_from={self._options.resume_from!r}",
                found=f"no such checkpoint in {self._store.directory}",
                expected=", ".join(str(name) for name in names) or "a directory with checkpoints",
            )
        made_of_it = [name for name in names if name > wanted and self._origin(name) == str(wanted)]
        return [*made_of_it, wanted]

    def _origin(self, name: StepName) -> Any:
        try:
            return self._store.open_step(name).manifest.details.get("resume_from")
        except CheckpointError:
            return None

    def _read(self, name: StepName) -> Found | CheckpointError:
        """What this checkpoint holds for this rank, or what any rank found wrong with it."""
        found: Found | None = None
        error: ResumekitError | None = None
        try:
            reader = self._store.open_step(name)
            found = self._states(name, reader)
        except ResumekitError as problem:
            error = problem
        errors = self._world.gather(error)
        worst = next((each for each in errors if isinstance(each, CheckpointError)), None)
        if worst is None:
            for rank, other in enumerate(errors):
                if other is not None:
                    raise error or from_rank(rank, other)
            assert found is not None
            return found
        if isinstance(worst, CorruptCheckpointError):
            self._tell(self._world.on_first(lambda: self._put_aside(name, worst)))
        return worst

    def _put_aside(self, name: StepName, error: CorruptCheckpointError) -> str:
        """Moves a damaged checkpoint out of the way; gives what to tell about it."""
        try:
            return f"{error} It was moved to {self._store.quarantine(name, error)}"
        except OwnershipLostError:
            raise
        except DirectoryError as trouble:  # an older checkpoint may be good all the same
            return f"{error} It stays where it is: {trouble}"

    def _states(self, name: StepName, reader: StepReader) -> Found:
        found = Found(name, reader, {}, {}, {})
        wanted: dict[tuple[str, int], list[str]] = {}
        numbers: dict[tuple[str, int], int] = {}  # of the former rank or group that wrote
        for record in reader.manifest.components:
            if names_component(self._left_out, record.key):
                continue
            live = self._live.get(record.key)
            if is_spread(record, live):
                in_stages = record.key in self._membership and self._membership.is_in_stages(live)
                state, left = read_spread(reader, record, live, in_stages=in_stages)
                found.states[record.key], found.left[record.key] = state, left
                continue
            own = self._own_number(record, reader.manifest)
            if own is None:
                found.former[record.key] = {}
            for number in self._needed(record, reader.manifest) if own is None else (own,):
                numbers[record.key, record.writers[number]] = number
                wanted.setdefault((record.directory, record.writers[number]), []).append(record.key)
        for (directory, writer), keys in wanted.items():
            for key, state in read_payload(reader, directory, writer, keys).items():
                if key in found.former:
                    found.former[key][numbers[key, writer]] = state
                else:
                    found.states[key] = state
        return found

    def _own_number(self, record: ComponentRecord, manifest: Manifest) -> int | None:
        """Which of the writers this rank takes its state from; None where that is not plain yet."""
        if record.pattern in _OF_THE_JOB:
            return 0
        if record.pattern == SharingPattern.PER_RANK.value:
            return self._world.rank if self._is_same_world(record, manifest) else None
        if record.key not in self._membership:
            return None
        return own_group(record, manifest, self._membership, self._world)

    def _is_same_world(self, record: ComponentRecord, manifest: Manifest) -> bool:
        if manifest.world_size == self._world.world_size:
            return True
        if "world_size" not in self._options.allow_changes:
            raise StateMismatchError(
                record.key,
                found=f"a job of {self._world.world_size} ranks",
                expected=f"{manifest.world_size} ranks, as in the checkpoint",
                remedy=f"Launch with {manifest.world_size} ranks, or pass "
                "allow_changes={'world_size'}",
            )
        return False

    def _needed(self, record: ComponentRecord, manifest: Manifest) -> tuple[int, ...]:
        """The writers whose states may become this rank's state."""
        if record.pattern == SharingPattern.PER_RANK.value:
            return self._change(manifest).readable
        return tuple(range(len(record.writers)))

    def _change(self, manifest: Manifest) -> WorldChange:
        return WorldChange(self._world.rank, self._world.world_size, manifest.world_size)

    def _tell(self, message: str) -> None:
        if self._world.is_first:
            tell(message)


def own_group(
    record: ComponentRecord, manifest: Manifest, membership: Membership, world: World
) -> int | None:
    """The number of the group whose state this rank takes; None where their number has changed.

    Raises:
        StateMismatchError: as many ranks form other groups than in the checkpoint.
    """
    groups = membership.groups(record.key)
    if manifest.world_size == world.world_size and groups != record.groups:
        raise StateMismatchError(
            record.key,
            found=f"the groups of ranks {_listed(groups)}",
            expected=f"{_listed(record.groups)}, as in the checkpoint",
            remedy="Form the groups as when it was saved",
        )
    return membership.ordinal(record.key) if len(groups) == len(record.groups) else None


def _listed(groups: Groups) -> str:
    return ", ".join(str(list(group)) for group in groups)


def resplit(
    found: Found, components: Sequence[StateComponent], membership: Membership, world: World
) -> tuple[str, ...]:
    """Makes this rank's states of those of the former ranks; gives the remarks of all. Collective.

    Raises:
        StateMismatchError: the number of ranks has changed, and a component cannot follow.
        DataPositionError: the former ranks were not at one place in the data.
    """
    manifest = found.manifest
    records = {record.key: record for record in manifest.components}
    change = WorldChange(world.rank, world.world_size, manifest.world_size)

    def of_this_rank() -> tuple[str, ...]:
        remarks: list[str] = []
        for component in components:
            key = component.key
            if key not in found.former:
                continue
            former, of_groups = found.former[key], change
            if records[key].pattern != SharingPattern.PER_RANK.value:
                number = own_group(records[key], manifest, membership, world)
                if number is not None:
                    found.states[key] = former[number]
                    continue
                num_groups = len(membership.groups(key))
                of_groups = WorldChange(membership.ordinal(key), num_groups, len(former))
            noun = "ranks" if of_groups is change else "groups of ranks"
            found.states[key], own = _resplit(component, former, of_groups, noun)
            remarks.extend(own)
        return tuple(remarks)

    if not any(world.gather(bool(found.former))):
        return ()
    remarks = [remark for own in world.everywhere(of_this_rank) for remark in own]
    if change.world_size != change.former_world_size:
        words = f"number of ranks was {change.former_world_size}, now {change.world_size}"
        remarks.insert(0, words)
    return tuple(remarks)


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
    component: StateComponent, former: Mapping[int, Any], change: WorldChange, noun: str
) -> tuple[Any, tuple[str, ...]]:
    method = getattr(component.stateful, "resplit_state_dict", None)
    if method is None:
        raise StateMismatchError(
            component.key,
            found=f"a state of its own on each of {change.former_world_size} {noun}, for "
            f"{change.world_size} of them",
            expected="a method resplit_state_dict, which makes of them the state of another rank",
            remedy=f"Pass exclude={{{component.key!r}}} to leave it as it is, or launch the job as "
            "it was",
        )
    state, remarks = method(former, change)
    return state, tuple(remarks)


def check_fit(
    manifest: Manifest,
    components: Sequence[StateComponent],
    options: Options,
    membership: Membership,
    *,
    world_size: int,
) -> tuple[str, ...]:
    """The components that start from their live state because the checkpoint has none.

    Args:
        manifest: the checkpoint's.
        components: of this run.
        options: of this run.
        membership: of the components.
        world_size: the ranks of this run.

    Raises:
        StateMismatchError: a component on one side only, and nothing allows it.
    """
    regrouped = regrouped_buffers(manifest, components, membership)
    saved = {record.key for record in manifest.components} - regrouped
    live = {component.key for component in components}
    checkpoint = str(StepName(manifest.step, manifest.revision))
    fresh: list[str] = []
    for component in components:
        key = component.key
        if key in saved or names_component(options.exclude, key):
            continue
        allowed = names_component(options.allow_missing, key)
        allowed = allowed or key in regrouped
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
        check = getattr(component.stateful, "check_state_dict", None)
        if check is not None and component.key in states:
            check(states[component.key])
