"""Finding the newest good checkpoint, reading it whole, and only then changing live objects.

Each rank reads and verifies the bytes that it needs; the ranks vote; a bad checkpoint is told and
the next one is tried. Nothing live changes before every check has passed on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resumekit.contract import SharingPattern, Slot, StateComponent
from resumekit.distributed import World
from resumekit.engine.options import Options, names_component
from resumekit.engine.report import Rejection, tell
from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryError,
    NoUsableCheckpointError,
    OwnershipLostError,
    StateMismatchError,
)
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
        rejected: newer checkpoints that were passed over.
    """

    name: StepName
    reader: StepReader
    states: dict[str, Any]
    rejected: tuple[Rejection, ...]

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's inventory."""
        return self.reader.manifest


class Finder:
    """Chooses the checkpoint to continue from. Every method is collective.

    Args:
        left_out: component keys or slots that are not read.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        options: Options,
        left_out: frozenset[str],
    ) -> None:
        self._world = world
        self._store = store
        self._options = options
        self._left_out = left_out

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
                return Found(outcome.name, outcome.reader, outcome.states, tuple(rejected))
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
        error: CheckpointError | None = None
        try:
            reader = self._store.open_step(name)
            found = Found(name, reader, self._states(reader), ())
        except CheckpointError as problem:
            error = problem
        errors = self._world.gather(error)
        worst = next((each for each in errors if each is not None), None)
        if worst is None:
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

    def _states(self, reader: StepReader) -> dict[str, Any]:
        wanted: dict[tuple[str, int], list[str]] = {}
        for record in reader.manifest.components:
            if not names_component(self._left_out, record.key):
                source = (record.directory, self._source_rank(record, reader.manifest))
                wanted.setdefault(source, []).append(record.key)
        states: dict[str, Any] = {}
        for (directory, rank), keys in wanted.items():
            states.update(read_payload(reader, directory, rank, keys))
        return states

    def _source_rank(self, record: ComponentRecord, manifest: Manifest) -> int:
        if record.pattern != SharingPattern.PER_RANK.value:
            return record.writers[0]
        if manifest.world_size != self._world.world_size:
            raise StateMismatchError(
                record.key,
                found=f"a job of {self._world.world_size} ranks",
                expected=f"{manifest.world_size} ranks, as in the checkpoint",
                remedy=f"Launch with {manifest.world_size} ranks",
            )
        return self._world.rank

    def _tell(self, message: str) -> None:
        if self._world.is_first:
            tell(message)


def check_fit(
    manifest: Manifest, components: Sequence[StateComponent], options: Options
) -> tuple[str, ...]:
    """The components that start from their live state because the checkpoint has none.

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
        if not (allowed or component.slot in _MAY_START_FRESH or not component.required):
            raise StateMismatchError(
                key,
                found=f"{checkpoint} has no {key} (it has {', '.join(sorted(saved))})",
                expected="one, as this run uses it",
                remedy=f"Pass allow_missing={{{key!r}}} to start it from its live state",
            )
        fresh.append(key)
    for key in sorted(saved - live):
        if not names_component(options.exclude, key):
            raise StateMismatchError(
                key,
                found=f"{checkpoint} has {key}, and this run has none",
                expected="a live object to load it into",
                remedy=f"Give it to the Checkpointer, or pass exclude={{{key!r}}} to leave it out",
            )
    return tuple(fresh)


def check_states(states: Mapping[str, Any], components: Sequence[StateComponent]) -> None:
    """Lets every component refuse its state before any of them loads. Changes nothing."""
    for component in components:
        check = getattr(component.stateful, "check_state_dict", None)
        if check is not None and component.key in states:
            check(states[component.key])
