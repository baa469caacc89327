"""Finding the newest good checkpoint, reading it whole, and only then changing live objects.

Each rank reads and verifies the bytes that it needs; the ranks vote; a bad checkpoint is logged and
the next one is tried. Nothing live changes before every check has passed on every rank.

Parameters may have other names than in the run that wrote them. Each component that holds a module
compares the names. Optimizers, gradients, buffers and attributes follow the module that they belong
to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from resumekit.capture.nested_state import merge_states
from resumekit.capture.optimizer import pairs_of, part_of
from resumekit.distributed import World, from_rank
from resumekit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    IncompleteLoadError,
    NoUsableCheckpointError,
    OwnershipLostError,
    ResumekitError,
    SaveError,
    StateMismatchError,
)
from resumekit.log import logger, warn
from resumekit.places.copies import Copies
from resumekit.progress_display import human_bytes, show_progress
from resumekit.run.agreement import ComponentGroups
from resumekit.run.options import Options, names_component
from resumekit.run.report import Rejection
from resumekit.run.resuming.candidates import CandidateSearch
from resumekit.run.resuming.contents import check_contents
from resumekit.run.resuming.state_origins import StateOrigins
from resumekit.run.saving.snapshot import Snapshot
from resumekit.serialization.deferral import Deferral, LoadMemory
from resumekit.serialization.index import stem_of
from resumekit.serialization.reading import StoredSource, read_payload, read_sharded
from resumekit.serialization.subclasses import Builder
from resumekit.state import (
    Adopting,
    InPlace,
    Renamed,
    Renaming,
    SharingPattern,
    Slot,
    StateComponent,
    check_state,
    common_prefix_change,
    nearest_prefixes,
)
from resumekit.storage.directories import StepName
from resumekit.storage.imported import import_of
from resumekit.storage.manifest import ComponentRecord, Manifest, StepReader, is_pruned
from resumekit.storage.store import Store


class LoadBuffer:
    """The memory of this run's saves; without async saves it is given back after the load.

    Args:
        world: the ranks. Collective.
        snapshot: the memory of the saves; none is in flight.
        is_kept: whether saves will use it.

    Attributes:
        num_ranks_here: the ranks on this node.
    """

    def __init__(self, world: World, snapshot: Snapshot, *, is_kept: bool) -> None:
        self.num_ranks_here = world.gather(world.node).count(world.node)
        self._snapshot = snapshot
        self._is_kept = is_kept
        self._memory: LoadMemory | None = None

    def memory(self, num_bytes: int) -> LoadMemory | None:
        """Memory for tensors of a checkpoint; None where there is not so much of it.

        Args:
            num_bytes: of all its tensors together. Other ranks on this node may need as many.
        """
        self._memory = None
        if num_bytes == 0:
            return None
        if not self._snapshot.fits(num_bytes, (self.num_ranks_here - 1) * num_bytes):
            size = human_bytes(num_bytes)
            logger.debug("no memory for %s of tensors: they are read twice, by blocks", size)
            return None
        try:
            self._memory = LoadMemory(self._snapshot.lend(num_bytes))
        except SaveError:
            logger.debug("the system grants no %s of memory", human_bytes(num_bytes))
        return self._memory

    def give_back(self) -> None:
        """The load is over, and its state is not used any more."""
        memory, self._memory = self._memory, None
        is_free = memory is None or memory.is_free()
        if not (self._is_kept and is_free):
            self._snapshot.release()


# ---------------------------------------------------------------- renamed parameters

_NUM_NAMED = 3


class Renames:
    """The changes of names in one checkpoint.

    Args:
        prefixes: that the user gave, saved to live; empty to find them.

    Attributes:
        renamed: the keys of the components whose state has live names already.
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self._prefixes = prefixes
        self._found: dict[str, Renaming] = {}  # by key of the component that holds a module
        self.renamed: set[str] = set()

    def again(self) -> Renames:
        """The same changes, to read some of the components a second time."""
        made = Renames(self._prefixes)
        made._found = dict(self._found)
        return made

    def messages(self) -> tuple[str, ...]:
        """One line for each change that was found."""
        return tuple(dict.fromkeys(f"parameter names: {each}" for each in self._found.values()))

    def of(self, component: StateComponent, state: Any) -> Any:
        """A saved state with the names of the live objects. A model comes before its optimizer.

        Args:
            component: of this run.
            state: as it was read.

        Raises:
            StateMismatchError: names have no partner after the change.
        """
        stateful = component.stateful
        if not isinstance(stateful, Renamed):
            return state
        saved = stateful.entries(state)
        if saved is not None:
            live = stateful.entries(stateful.state_dict()) or {}
            renaming = self._change(component.key, saved.keys(), live.keys())
        else:
            renaming = self._of_owner(component)
        try:
            return state if renaming is None else stateful.renamed(state, renaming)
        except (AttributeError, LookupError, TypeError, ValueError):
            return state  # damaged: its component says in which way when it checks the state

    def _change(self, key: str, saved: Set[str], live: Set[str]) -> Renaming | None:
        # Of a pipeline stage the live names are some of the saved ones.
        if live <= saved:
            return None
        renaming = common_prefix_change(saved, live)
        if self._prefixes:
            renaming = Renaming.of(self._prefixes, saved)
            _require_partners(key, renaming, live)
        elif renaming is None:
            _refuse_near(key, saved, live)
        if renaming is not None:
            self._found[key] = renaming
        return renaming

    def _of_owner(self, component: StateComponent) -> Renaming | None:
        """The change in the module that a state belongs to; of an optimizer in all modules."""
        if component.slot == Slot.OPTIMIZER.value:
            return _of_modules(self._found)
        owners = [key for key in self._found if component.key.startswith(f"{key}/")]
        return self._found[max(owners, key=len)] if owners else None


def models_first(keys: Iterable[str]) -> list[str]:
    """Component keys in the order in which states are renamed: owners before what they own."""
    return sorted(keys, key=lambda key: (key.partition("/")[0] != Slot.MODEL.value, key))


def _of_modules(found: Mapping[str, Renaming]) -> Renaming | None:
    """One change for an optimizer, which names a parameter ``<model>.<name>`` if it has several."""
    names: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    for key, each in found.items():
        slot, _, home = key.partition("/")
        if slot == Slot.MODEL.value:
            home = home or key
            names |= {f"{home}.{then}": f"{home}.{now}" for then, now in each.names.items()}
            names |= each.names
            prefixes |= each.prefixes
    return Renaming(prefixes, names) if names else None


def _require_partners(key: str, renaming: Renaming, live: Set[str]) -> None:
    """Raises StateMismatchError unless every live name is that of one saved entry."""
    twice = renaming.merged_names()
    if twice:
        raise StateMismatchError(
            f"{key}: rename",
            found=f"{_listed(twice)} would get the names of other parameters",
            expected="one parameter for one name",
        )
    renamed = set(renaming.names.values())
    if live <= renamed:
        return
    raise StateMismatchError(
        f"{key}: rename",
        found=f"with {renaming} nothing in the checkpoint becomes {_listed(live - renamed)}; "
        f"left over: {_listed(renamed - live) or 'nothing'}",
        expected="a partner for each parameter",
        remedy="Change rename, or leave it out to have the prefix found",
    )


def _refuse_near(key: str, saved: Set[str], live: Set[str]) -> None:
    """Raises StateMismatchError where a change of one prefix fits a part of the names."""
    prefixes = nearest_prefixes(saved, live)
    renaming = Renaming.of(prefixes, saved)
    if not prefixes or renaming.merged_names():
        return
    renamed = set(renaming.names.values())
    if 2 * len(renamed & live) < len(live):
        return
    missing, left = live - renamed, renamed - live
    sides = [("the checkpoint", missing), ("the run", left)]
    if not missing and not left:
        raise StateMismatchError(
            key,
            found=f"a part of the parameters has other names: {renaming}",
            expected="equal names, or one prefix before all of them",
            remedy=f"If they are the same layers, pass rename={prefixes}",
        )
    lacks = [f"{side} lacks {_listed(names)}" for side, names in sides if names]
    raise StateMismatchError(
        key,
        found=f"with {renaming} most names are equal, but {' and '.join(lacks)}",
        expected="the same parameters on both sides",
        remedy="Build the model with the parts that it had",
    )


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = len(found) - _NUM_NAMED
    return ", ".join(found[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


# ---------------------------------------------------------------- the search


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
        deferral: what is read when a component is loaded, straight into its tensors.
        renames: the changes of parameter names; states that were read whole have the saved names.
        rejected: newer checkpoints that were passed over.
        aliases: the key in the files of an imported component whose key here is another one.
    """

    name: StepName
    reader: StepReader
    states: dict[str, Any]
    former: dict[str, dict[int, Any]]
    left: dict[str, frozenset[str]]
    deferral: Deferral
    renames: Renames
    rejected: tuple[Rejection, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's inventory."""
        return self.reader.manifest

    @property
    def as_given(self) -> Collection[str]:
        """The components whose states are as another program has saved them."""
        imported = import_of(self.manifest)
        return () if imported is None else imported.as_given

    def every_state(self) -> Iterator[tuple[str, Any]]:
        """The states that were read, each with the key of its component."""
        yield from self.states.items()
        yield from ((key, each) for key, found in self.former.items() for each in found.values())

    def leave(self, keys: Iterable[str]) -> None:
        """Forgets the states of some components."""
        for key in keys:
            self.states.pop(key, None)
            self.former.pop(key, None)


@dataclass(frozen=True)
class Finder:
    """Chooses the checkpoint to continue from. Every method is collective.

    Args:
        left_out: component keys or slots that are not read.
        components: of this run, as far as they are known yet; of state that is sharded over the
            ranks they say which part this rank needs.
        membership: of those components.
        sources: whose state this rank takes.
        buffer: memory for what is copied into live tensors.
        checked: the components whose states are checked, with those that a run always has.
        copies: in other places; rank 0 has found them.
        keys: the components that are read; None for all.
        renames: of this checkpoint, where it was read before.
    """

    world: World
    store: Store
    options: Options
    left_out: frozenset[str]
    components: Sequence[StateComponent]
    membership: ComponentGroups
    sources: StateOrigins
    buffer: LoadBuffer
    checked: Sequence[StateComponent]
    copies: Copies
    keys: Collection[str] | None = None
    renames: Renames | None = None

    def find(self, *, up_to: int | None = None) -> Found | None:
        """The newest good checkpoint, or None in a directory that never held one.

        Args:
            up_to: of those up to this step, if there are such; counts on rank 0.

        Raises:
            CheckpointNotFoundError: ``resume_from`` names one that is not there.
            NoUsableCheckpointError: checkpoints are there, and none can be used.
            PlaceError: there is none, and a place does not answer.
        """
        rejected: list[Rejection] = []
        search = CandidateSearch(self.store, self.copies, self.options.resume_from)
        for each in self.world.on_first(lambda: search.candidates(up_to)):
            name = each.name
            outcome = self.world.on_first(partial(search.fetch, each)) or self._read(name)
            if isinstance(outcome, Found):
                for rejection in rejected if self.world.is_first else ():
                    warn("RK-831", "passed over %s: %s", rejection.name, rejection.reason)
                return replace(outcome, rejected=tuple(rejected))
            rejected.append(Rejection(str(name), outcome))
        if rejected:
            raise NoUsableCheckpointError(
                str(self.store.directory),
                found="; ".join(each.reason.rstrip(".") for each in rejected),
                expected="at least one checkpoint that verifies",
                remedy="Restore one from a copy, or start a new run in an empty directory",
            )
        self.world.on_first(self.copies.require_answers)
        return None

    def read(self, name: StepName) -> Found:
        """A checkpoint that was read before.

        Raises:
            IncompleteLoadError: it cannot be read any more.
        """
        outcome = self._read(name)
        if isinstance(outcome, Found):
            return outcome
        raise IncompleteLoadError(
            str(name),
            found=f"it was loaded, and cannot be read a second time ({outcome.rstrip('.')})",
            remedy="End this process, and start it again when nothing changes the checkpoint",
        )

    def _read(self, name: StepName) -> Found | str:
        """What this checkpoint holds for this rank, or what any rank found wrong with it."""
        found: Found | None = None
        error: ResumekitError | None = None
        try:
            reader = self.store.open_step(name)
            if is_pruned(reader.manifest):
                raise CheckpointError(
                    str(name), found="only its weights are left (resumekit prune)"
                )
            with self._shown(reader):
                found = self._states(name, reader)
            plain = (pair for pair in found.every_state() if pair[0] not in found.as_given)
            check_contents(reader.manifest, plain, self.checked)
        except ResumekitError as problem:
            error = problem
        errors = self.world.gather(error)
        worst = next((each for each in errors if isinstance(each, CheckpointError)), None)
        if worst is None:
            for rank, other in enumerate(errors):
                if other is not None:
                    raise error or from_rank(rank, other)
            assert found is not None
            return found
        if isinstance(worst, CorruptCheckpointError):
            return self.world.on_first(lambda: self._put_aside(name, worst))
        return str(worst)

    @contextmanager
    def _shown(self, reader: StepReader) -> Iterator[None]:
        """Shows how much of a checkpoint rank 0 has read."""
        alone = self.world.world_size == 1
        total = sum(entry.size for entry in reader.manifest.files) if alone else None
        what, first = f"reading {reader.path}", self.world.is_first
        with show_progress(what, total, shown=first) as advance, self.store.observed(advance):
            yield

    def _put_aside(self, name: StepName, error: CorruptCheckpointError) -> str:
        """Moves a damaged checkpoint out of the way; gives the reason."""
        try:
            return f"{error} It was moved to {self.store.quarantine(name, error)}"
        except OwnershipLostError:
            raise
        except DirectoryError as trouble:  # an older checkpoint may be good all the same
            return f"{error} It stays where it is: {trouble}"

    def _states(self, name: StepName, reader: StepReader) -> Found:
        components = {component.key: component for component in self.components}
        sharded = {
            record.key: record
            for record in reader.manifest.components
            if is_sharded(record, components.get(record.key)) and self._reads(record.key)
        }
        former, wanted = self._wanted(reader, sharded)
        renames = Renames(self.options.rename) if self.renames is None else self.renames.again()
        deferral = self._deferral(reader, wanted, former)
        found = Found(name, reader, {}, former, {}, deferral, renames)
        for key in models_first(sharded):
            self.sources.check_option(sharded[key], reader.manifest)
            state, left = self._read_sharded(found, sharded[key], components.get(key))
            found.states[key], found.left[key] = state, left
        for (directory, writer), numbers in wanted.items():
            states = read_payload(reader, directory, writer, list(numbers), found.deferral)
            for key, state in states.items():
                if key in found.former:
                    found.former[key][numbers[key]] = state
                else:
                    found.states[key] = state
        return found

    def _read_sharded(
        self, found: Found, record: ComponentRecord, live: StateComponent | None
    ) -> tuple[Any, frozenset[str]]:
        """The state of a component, with this rank's shard of what is sharded here.

        Args:
            found: the checkpoint.
            record: of the component in it.
            live: the component here, if it is known yet.

        Returns:
            The state, and the names of the tensors that this rank's stage does not hold.

        Raises:
            CheckpointError: damage, or an I/O error.
            StateMismatchError: it does not fit the live object; found before its tensors are read.
        """
        key, source = record.key, StoredSource.of_record(found.reader, record)
        if live is None:
            return read_sharded(source, lambda state: (), merge=partial(merge_states, None, key))
        found.renames.renamed.add(key)
        in_stages = key in self.membership and self.membership.is_in_stages(live)

        def merge(states: Sequence[Any]) -> Any:
            state = merge_states(live.state, key, states)
            state = adopted(live, state) if key in found.as_given else state
            return found.renames.of(live, state)

        return read_sharded(
            source,
            lambda state: pairs_of(live.state, state),
            lambda state: check_state(live, built(live, state)),
            merge=merge,
            part_of=partial(part_of, live.state) if in_stages else None,
        )

    def _wanted(
        self, reader: StepReader, but: Collection[str]
    ) -> tuple[dict[str, dict[int, Any]], dict[tuple[str, int], dict[str, int]]]:
        """The components of which it is not plain yet which state this rank takes; what it reads.

        The second is by directory and writer: of each component the number of the former rank or
        group.
        """
        former: dict[str, dict[int, Any]] = {}
        wanted: dict[tuple[str, int], dict[str, int]] = {}
        for record in reader.manifest.components:
            if record.key in but or not self._reads(record.key):
                continue
            origin = self.sources.of(record, reader.manifest)
            readable: tuple[int, ...] = origin.readable
            if origin.own_number is None:
                former[record.key] = {}
            else:
                readable = (origin.own_number,)
            for number in readable:
                of_writer = wanted.setdefault((record.directory, origin.writers[number]), {})
                of_writer[record.key] = number
        return former, wanted

    def _reads(self, key: str) -> bool:
        is_asked = self.keys is None or key in self.keys
        return is_asked and not names_component(self.left_out, key)

    def _deferral(
        self,
        reader: StepReader,
        wanted: Mapping[tuple[str, int], Collection[str]],
        former: Collection[str],
    ) -> Deferral:
        """Which tensors have live ones that they are copied into, and memory for them."""
        live = {
            component.key: component.stateful.live_tensors
            for component in self.components
            if component.key not in former and isinstance(component.stateful, InPlace)
        }
        stems = {
            stem_of(*source, is_frozen=is_frozen)
            for source, keys in wanted.items()
            if not live.keys().isdisjoint(keys)
            for is_frozen in (False, True)
        }
        sizes = [
            entry.size
            for entry in reader.manifest.files
            if entry.path.removesuffix(".safetensors") in stems
        ]
        return Deferral(live, self.buffer.memory(sum(sizes)))


def is_sharded(record: ComponentRecord, live: StateComponent | None) -> bool:
    """Whether a component is read by shard: it was saved sharded, or it is sharded here."""
    sharded = SharingPattern.SHARDED
    if record.pattern == sharded.value:
        return True
    was_whole = record.pattern in (SharingPattern.REPLICATED.value, SharingPattern.GLOBAL.value)
    return was_whole and live is not None and live.sharing_pattern is sharded


def built(component: StateComponent, state: Any) -> Any:
    """The saved state of a component, with its tensors of classes of their own."""
    return Builder(component.key, component.stateful.state_dict).build(state)


def adopted(component: StateComponent, given: Any) -> Any:
    """The state of a component that another program has saved.

    Raises:
        StateMismatchError: it is not one of such an object.
    """
    if not isinstance(component.stateful, Adopting):
        raise StateMismatchError(
            component.key,
            found="a state as torch's own classes give it, of the checkpoint that was imported",
            expected=f"one of a {type(component.stateful).__name__}",
        )
    return component.stateful.adopted(given)
