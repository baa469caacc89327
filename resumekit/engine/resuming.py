"""Finding the newest good checkpoint, reading it whole, and only then changing live objects.

Each rank reads and verifies the bytes that it needs; the ranks vote; a bad checkpoint is told and
the next one is tried. Nothing live changes before every check has passed on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from resumekit.capture.buffers import RANK_BUFFERS
from resumekit.contract import SharingPattern, Slot, StateComponent
from resumekit.distributed import World, from_rank
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
from resumekit.layout import WorldChange
from resumekit.payload import read_payload
from resumekit.storage import ComponentRecord, Manifest, StepName, StepReader, Store

# A run that turns AMP on continues with a fresh scaler rather than not at all; it is told.
_MAY_START_FRESH = frozenset({Slot.GRAD_SCALER.value})


@dataclass(frozen=True)
class Found:
    """A checkpoint that every rank has read and verified.

    Args:
        name: its directory's name.
        reader: the open step directory.
        states: the states this rank needs, by component key.
        former: of components of which each rank has its own, the states of former ranks by rank,
            where the number of ranks has changed; ``resplit`` makes this rank's states of them.
        rejected: newer checkpoints that were passed over.
    """

    name: StepName
    reader: StepReader
    states: dict[str, Any]
    former: dict[str, dict[int, Any]]
    rejected: tuple[Rejection, ...]

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's inventory."""
        return self.reader.manifest


class Finder:
    """Chooses the checkpoint to continue from. Every method is collective.

    Args:
        left_out: component keys or slots that are not read.
        components: of this run, as far as they are known yet; of state that is spread over the
            ranks they say which part this rank needs.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        options: Options,
        left_out: frozenset[str],
        components: Sequence[StateComponent] = (),
    ) -> None:
        self._world = world
        self._store = store
        self._options = options
        self._left_out = left_out
        self._live = {component.key: component for component in components}

    def find(self, *, up_to: int | None = None) -> Found | None:
        """The newest good checkpoint, or None in a directory that never held one.

        Args:
            up_to: of those up to this step, if there are such; counts on rank 0.

        Raises:
            CheckpointNotFoundError: ``resume_from`` names one that is not there.
            NoUsableCheckpointError: checkpoints are there, and none can be used.
        """
        rejected: list[Rejection] = []
        for name in self._world.on_first(lambda: self._candidates(up_to)):
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

    def _candidates(self, up_to: int | None) -> list[StepName]:
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
        asked_for = [name for name in names if up_to is None or name.step <= up_to]
        return asked_for or names

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
            found = Found(name, reader, *self._states(reader), ())
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

    def _states(self, reader: StepReader) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
        wanted: dict[tuple[str, int], list[str]] = {}
        former: dict[str, dict[int, Any]] = {}
        states: dict[str, Any] = {}
        for record in reader.manifest.components:
            if names_component(self._left_out, record.key):
                continue
            live = self._live.get(record.key)
            if is_spread(record, live):
                states[record.key] = read_spread(reader, record, live)
                continue
            ranks = self._source_ranks(record, reader.manifest)
            if ranks is None:
                former[record.key] = {}
                ranks = self._change(reader.manifest).readable
            for rank in ranks:
                wanted.setdefault((record.directory, rank), []).append(record.key)
        for (directory, rank), keys in wanted.items():
            for key, state in read_payload(reader, directory, rank, keys).items():
                if key in former:
                    former[key][rank] = state
                else:
                    states[key] = state
        return states, former

    def _source_ranks(self, record: ComponentRecord, manifest: Manifest) -> tuple[int, ...] | None:
        """Who wrote what this rank needs; None where it takes several of another job's ranks."""
        if record.pattern != SharingPattern.PER_RANK.value:
            return record.writers[:1]
        if manifest.world_size == self._world.world_size:
            return (self._world.rank,)
        if "world_size" not in self._options.allow_changes:
            raise StateMismatchError(
                record.key,
                found=f"a job of {self._world.world_size} ranks",
                expected=f"{manifest.world_size} ranks, as in the checkpoint",
                remedy=f"Launch with {manifest.world_size} ranks, or pass "
                "allow_changes={'world_size'}",
            )
        return None

    def _change(self, manifest: Manifest) -> WorldChange:
        return WorldChange(self._world.rank, self._world.world_size, manifest.world_size)

    def _tell(self, message: str) -> None:
        if self._world.is_first:
            tell(message)


def resplit(found: Found, components: Sequence[StateComponent], world: World) -> tuple[str, ...]:
    """Makes this rank's states of those of the former ranks; gives the remarks of all. Collective.

    Raises:
        StateMismatchError: the number of ranks has changed, and a component cannot follow.
        DataPositionError: the former ranks were not at one place in the data.
    """
    change = WorldChange(world.rank, world.world_size, found.manifest.world_size)
    if change.world_size == change.former_world_size:
        return ()

    def of_this_rank() -> tuple[str, ...]:
        remarks: list[str] = []
        for component in components:
            if component.key in found.former:
                state, own = _resplit(component, found.former[component.key], change)
                found.states[component.key] = state
                remarks.extend(own)
        return tuple(remarks)

    words = f"number of ranks was {change.former_world_size}, now {change.world_size}"
    return (words, *(remark for own in world.everywhere(of_this_rank) for remark in own))


def _resplit(
    component: StateComponent, former: Mapping[int, Any], change: WorldChange
) -> tuple[Any, tuple[str, ...]]:
    method = getattr(component.stateful, "resplit_state_dict", None)
    if method is None:
        raise StateMismatchError(
            component.key,
            found=f"a state of its own on each of {change.former_world_size} ranks, for a job of "
            f"{change.world_size}",
            expected="a method resplit_state_dict, which makes of them the state of another rank",
            remedy=f"Pass exclude={{{component.key!r}}} to leave it as it is, or launch with "
            f"{change.former_world_size} ranks",
        )
    state, remarks = method(former, change)
    return state, tuple(remarks)


def check_fit(
    manifest: Manifest,
    components: Sequence[StateComponent],
    options: Options,
    *,
    world_size: int,
) -> tuple[str, ...]:
    """The components that start from their live state because the checkpoint has none.

    Args:
        manifest: the checkpoint's.
        components: of this run.
        options: of this run.
        world_size: the ranks of this run.

    Raises:
        StateMismatchError: a component on one side only, and nothing allows it.
    """
    saved = {record.key for record in manifest.components}
    live = {component.key for component in components}
    checkpoint = str(StepName(manifest.step, manifest.revision))
    fresh: list[str] = []
    for component in components:
        key = component.key
        if key in saved or names_component(options.exclude, key):
            continue
        allowed = names_component(options.allow_missing, key)
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
        if not (names_component(options.exclude, key) or goes_without):
            raise StateMismatchError(
                key,
                found=f"{checkpoint} has {key}, and this run has none",
                expected="a live object to load it into",
                remedy=f"Give it to the Checkpointer, or pass exclude={{{key!r}}} to leave it out",
            )
    return tuple(fresh)


def _is_rank_buffers(key: str) -> bool:
    """Whether a component exists in runs of several ranks alone; one rank's are in the module."""
    return key.rpartition("/")[2] == RANK_BUFFERS


def check_states(states: Mapping[str, Any], components: Sequence[StateComponent]) -> None:
    """Lets every component refuse its state before any of them loads. Changes nothing."""
    for component in components:
        check = getattr(component.stateful, "check_state_dict", None)
        if check is not None and component.key in states:
            check(states[component.key])
