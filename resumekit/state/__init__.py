"""What a run's state is made of: components, what the state of each implements, how it is reported.

- ``StateComponent``: the declaration; who writes the state follows from it.
- ``Stateful``: the two methods of the state. Any object that has them can be a component.
- ``ComponentState``: the base class with the optional methods that any state may override.
- ``Checked``, ``Renamed``, ``Adopting``, ``InPlace``, ``BeforeSave``, ``AfterResume``,
  ``AfterRng``: base classes of states that follow one event or one change more.

Nothing here knows torch, a framework or a file system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

from resumekit.errors import DeclarationError, InexactError, did_you_mean
from resumekit.state.renaming import Renaming as Renaming
from resumekit.state.renaming import common_prefix_change as common_prefix_change
from resumekit.state.renaming import nearest_prefixes as nearest_prefixes
from resumekit.state.schema import Count as Count
from resumekit.state.schema import Misfit as Misfit
from resumekit.state.schema import Rule as Rule
from resumekit.state.schema import Variants as Variants
from resumekit.state.schema import check_schema as check_schema
from resumekit.state.schema import misfits as misfits


class SharingPattern(str, Enum):
    """How a component's state is distributed over the ranks; it alone decides who writes."""

    GLOBAL = "global"  # one state for the job, held by rank 0
    REPLICATED = "replicated"  # the same state on every rank, written once
    PER_RANK = "per_rank"  # every rank has its own
    PER_GROUP = "per_group"  # one state for each process group, the same on all of its ranks
    PER_NODE = "per_node"  # one state for each node, the same on all of its ranks
    SHARDED = "sharded"  # every rank holds a part of one logical state


class Fidelity(str, Enum):
    """How a component is restored, from the best to the worst."""

    EXACT = "exact"  # the same bits
    EQUIVALENT = "equivalent"  # the same distribution
    UNKNOWN = "unknown"  # nothing shows whether it changes, or whether it is restored
    LOST = "lost"  # not at all


@dataclass(frozen=True)
class CaptureLine:
    """One line of the capture report.

    Args:
        key: the component, or what is not in the checkpoint.
        fidelity: how it is restored; None where the run has no such state.
        reason: why it is not exact.
        sharing_pattern: the component's.
        is_hint: a warning that ``strict=True`` accepts: the source could not be read.
        is_at_source: about a location in the user's source; the reason is the whole message.
    """

    key: str
    fidelity: Fidelity | None
    reason: str = ""
    sharing_pattern: SharingPattern | None = None
    is_hint: bool = False
    is_at_source: bool = False

    def __str__(self) -> str:
        if self.is_at_source:
            return f"{self.key}: {self.reason}"
        word = self.fidelity.value if self.fidelity else "none"
        return f"{self.key}: {word}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class CaptureReport:
    """What a checkpoint of this run will hold and how exactly each part is restored."""

    lines: tuple[CaptureLine, ...]

    @property
    def inexact(self) -> tuple[CaptureLine, ...]:
        """The lines that are present and not exact."""
        return tuple(line for line in self.lines if line.fidelity not in (None, Fidelity.EXACT))

    def require_exact(self) -> None:
        """Raises InexactError when any part of the run would not be restored exactly."""
        refused = [line for line in self.inexact if not line.is_hint]
        if refused:
            raise InexactError(
                "strict=True",
                found="; ".join(map(str, refused)),
                expected="every part of the run exact",
                remedy="Follow the reasons, or drop strict",
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return {
            line.key: {
                "fidelity": line.fidelity.value if line.fidelity else None,
                "reason": line.reason,
            }
            for line in self.lines
        }

    def __str__(self) -> str:
        return "; ".join(str(line) for line in self.lines)


# ---------------------------------------------------------------- changes of the ranks


@dataclass(frozen=True)
class WorldChange:
    """A checkpoint is resumed on another number of ranks.

    Ranks that take the same data count as one; so do the ranks of a group that has one state.

    Args:
        rank: this rank.
        world_size: the ranks now.
        former_world_size: the ranks that wrote the checkpoint.
    """

    rank: int
    world_size: int
    former_world_size: int

    @property
    def is_new(self) -> bool:
        """Whether the checkpoint has no state of this very rank."""
        return self.rank >= self.former_world_size

    @property
    def model_rank(self) -> int:
        """The former rank whose state this rank starts from: its own, where it existed."""
        return self.rank % self.former_world_size

    @property
    def inherited(self) -> tuple[int, ...]:
        """The former ranks whose state this rank reshards; each belongs to exactly one new rank."""
        return tuple(range(self.rank, self.former_world_size, self.world_size))

    @property
    def readable(self) -> tuple[int, ...]:
        """The former ranks whose states this rank reads."""
        two = range(min(2, self.former_world_size))  # two show whether the ranks were alike
        return tuple(sorted({*two, self.model_rank, *self.inherited}))


# ---------------------------------------------------------------- what a component implements

# How the names of times in the logs of frameworks end; equal runs differ in them. transformers 5.23
# trainer_utils.py speed_metrics, trainer.py evaluation_loop; the last is TRL's.
CLOCK_SUFFIXES = ("_runtime", "_per_second", "_model_preparation_time", "step_time")


@runtime_checkable
class Stateful(Protocol):
    """Any object with ``state_dict`` and ``load_state_dict``.

    No other method of it is called, whatever its name: the optional methods need a base class.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


# The state of a rank, and messages about it.
Resplit: TypeAlias = tuple[Any, Iterable[str]]


class ComponentState:
    """Base class of the state of one component: two methods to write, the others have defaults.

    The library calls the optional methods of objects that inherit it, and of no others.
    """

    def state_dict(self) -> Any:
        """The state: nested plain values and live tensors, not copies."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> Any:
        """Restores the state in place.

        Returns:
            One message for each thing that is not restored exactly; None or empty when all is.
        """
        raise NotImplementedError

    def check_state_dict(self, state: Any) -> None:
        """Validates a saved state before the first component is loaded; changes nothing.

        Raises:
            StateMismatchError: the state cannot be loaded.
        """

    def start_fresh(self) -> Iterable[str] | None:
        """Called when the checkpoint lacks this component.

        Returns:
            Messages; None for the default one.
        """
        return None

    def live_objects(self) -> Iterable[Any]:
        """The user's objects whose state this is; no other component saves them again."""
        return (self,)

    # ---------------------------------------------------------------- comparisons and reports

    def comparable_state(self) -> Any:
        """What two equal runs have in common: the state without times and paths."""
        return self.state_dict()

    def fingerprint(self) -> Mapping[str, Any] | None:
        """Plain values that a resume compares with those of the checkpoint; None for none."""
        return None

    @property
    def fidelity(self) -> tuple[Fidelity, str] | None:
        """How exactly this state is restored, and why; None for what its component declares."""
        return None

    def findings(self) -> Iterable[CaptureLine]:
        """Lines of the capture report for state that was found and is not in the checkpoint."""
        return ()

    # ---------------------------------------------------------------- ranks

    def replicated_state(self) -> Any:
        """The part of a REPLICATED or SHARDED state that must be the same on all ranks."""
        return self.state_dict()

    def first_rank_only(self) -> frozenset[str]:
        """Dotted names of plain tensors that may differ between ranks; rank 0's are saved."""
        return frozenset()

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit | None:
        """The state of this rank made from those of another number of ranks.

        Args:
            states: of the former ranks that ``change.readable`` names.
            change: the ranks then and now.

        Returns:
            The state and messages; None where this cannot be done.
        """
        return None

    def merge_state_dicts(self, states: Sequence[Any]) -> Any:
        """One SHARDED state of those of all process groups; None to merge nested dicts by key.

        Of this library's states optimizers alone need it. A state of the user's may: values that
        differ between groups are refused without it.
        """
        return None


class Checked(ComponentState):
    """A state whose content is checked when a checkpoint is read, before an object changes.

    Attributes:
        schema: the type of its states, see ``resumekit.state.schema``.
    """

    schema: ClassVar[Any]

    def check_content(self, key: str, state: Any) -> None:
        """Checks what does not depend on the live objects. A misfit passes the checkpoint over.

        Args:
            key: of the component.
            state: as it was read; tensors may be on the meta device.

        Raises:
            InvalidStateError: it is not what ``state_dict`` gives.
        """
        check_schema(key, self.schema, state)

    def progress_in(self, state: Any) -> Mapping[str, tuple[Any, str]]:
        """What a state of the right type has of the run's progress, as the framework counts it.

        Returns:
            The path of each count in the state, its value, and the name of the same in ``Progress``
            of the checkpoint; any other value there passes the checkpoint over.
        """
        return {}


class OfType(Checked):
    """Stands in for a state whose objects do not exist when its checkpoint is read.

    Args:
        schema: the type of its states.
    """

    def __init__(self, schema: Any) -> None:
        self.schema = schema  # type: ignore[misc]  # of one state here


class Renamed(ComponentState):
    """A state that has the names of a module's parameters, which may have other prefixes now."""

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        """A saved state with the names that parameters and modules have in this run.

        By default of a state by the names of parameters or buffers.
        """
        return renaming.keys(state) if isinstance(state, Mapping) else state

    def entries(self, state: Any) -> Mapping[str, Any] | None:
        """The entries of a module's state by name; None for a state that holds no module."""
        return None


class Adopting(ComponentState):
    """A state that can be made of what another program has saved of the same objects."""

    def adopted(self, given: Any) -> Any:
        """The state of this component.

        Args:
            given: what ``state_dict`` of the object gave there. It may be of any other object:
                what does not fit is refused by ``check_state_dict``.

        Raises:
            StateMismatchError: it is no state of such an object.
        """
        raise NotImplementedError


class InPlace(ComponentState):
    """A state that is loaded by copying its tensors, as they are, into live ones."""

    def live_tensors(self, state: Any) -> Iterable[tuple[Any, Any]]:
        """Each tensor of a saved state with the live one that ``load_state_dict`` copies it into.

        Only where it keeps no reference to the saved tensor, and gives the same result when the
        live tensor already has these values.

        Args:
            state: its tensors may be on the meta device.
        """
        raise NotImplementedError


class BeforeSave(ComponentState):
    """A state that prepares for a save."""

    def before_save(self) -> None:
        """Called on every rank when a save begins; may be collective."""
        raise NotImplementedError


class AfterResume(ComponentState):
    """A state that is complete only when all components are loaded."""

    def after_resume(self) -> Iterable[str]:
        """Called on every rank when all components are loaded; may be collective.

        Returns:
            Messages, as from ``load_state_dict``.
        """
        raise NotImplementedError


class AfterRng(ComponentState):
    """A state that is set last: code before the next batch may change or use it."""

    def after_rng_restore(self) -> None:
        """Called after the RNG states are restored, immediately before the next batch."""
        raise NotImplementedError


class Unextended(ComponentState):
    """An object without the base class; the optional methods have their defaults."""

    def __init__(self, stateful: Stateful) -> None:
        self._stateful = stateful

    def state_dict(self) -> Any:
        return self._stateful.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self._stateful.load_state_dict(state)

    def live_objects(self) -> Iterable[Any]:
        return (self._stateful,)


# ---------------------------------------------------------------- declaration

T = TypeVar("T")


class Validation(str, Enum):
    """How much is spent on proving that replicated state is the same on every rank."""

    OFF = "off"  # nothing
    DIGEST = "digest"  # at every save each rank digests what it holds
    FULL = "full"  # after a resume as well


class Slot(str, Enum):
    """The canonical slots of a training run; the values are the manifest's keys."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    LR_SCHEDULER = "lr_scheduler"
    GRAD_SCALER = "grad_scaler"
    EMA = "ema"
    DATA = "data"
    RNG = "rng"
    PROGRESS = "progress"
    BEST_METRIC = "best_metric"
    CALLBACKS = "callbacks"
    EXTRAS = "extras"
    VARIABLES = "variables"


# State of which every rank has its own, whatever the declaration says.
_ALWAYS_PER_RANK = frozenset({Slot.RNG.value})

# Patterns for which a process group means something.
_OF_GROUPS = frozenset({SharingPattern.PER_GROUP, SharingPattern.SHARDED})


@dataclass(frozen=True)
class StateComponent:
    """One part of a run's state, declared once; who writes it follows from the declaration.

    Args:
        key: ``slot`` or ``slot/name``, e.g. ``"optimizer"`` or ``"model/generator"``.
        stateful: the object that holds the state.
        sharing_pattern: a pattern, or a callable that gives one when the run starts.
        required: whether a checkpoint without it is refused.
        process_group: the ranks that hold one state together, for PER_GROUP and SHARDED: a torch
            process group, a one-dimensional DeviceMesh, their global ranks, or a name that the
            ``Checkpointer`` was given in ``groups``. All ranks of the job are in one such group.
        validate: how replicated state is compared between the ranks.
        fidelity: how exactly it is restored.
        reason: why it is not exact; empty when it is.
        files: gives small files for other tools by name, e.g. a model's ``config.json``; rank 0
            writes them into the component's folder, and no resume reads them. Models alone have
            a folder for them.
        framework: whose own loop alone needs this state, e.g. ``"DeepSpeed"``: a run without it
            leaves the state out, and logs that. Empty for state of the training itself.

    Attributes:
        state: the object with every optional method, see ``ComponentState``.
    """

    key: str
    stateful: Stateful
    sharing_pattern: SharingPattern | Callable[[], SharingPattern] = SharingPattern.REPLICATED
    required: bool = True
    process_group: Any = None
    validate: Validation = Validation.DIGEST
    fidelity: Fidelity = Fidelity.EXACT
    reason: str = ""
    files: Callable[[], Mapping[str, bytes]] | None = None
    framework: str = ""
    state: ComponentState = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_key(self.key)
        if self.files is not None and self.slot != Slot.MODEL.value:
            raise DeclarationError(
                self.key, found="files of its own", expected="a component of the slot 'model'"
            )
        if not isinstance(self.stateful, Stateful):
            raise DeclarationError(
                self.key,
                found=f"a {type(self.stateful).__name__} without state_dict and load_state_dict",
                expected="an object with both",
            )
        has_base = isinstance(self.stateful, ComponentState)
        state = self.stateful if has_base else Unextended(self.stateful)
        object.__setattr__(self, "state", state)
        if isinstance(self.sharing_pattern, SharingPattern):
            self._check_pattern(self.sharing_pattern)
        if self.fidelity is not Fidelity.EXACT and not self.reason:
            raise DeclarationError(
                self.key, found=f"fidelity {self.fidelity.value} without a reason"
            )

    @property
    def slot(self) -> str:
        """The part of the key before the first ``/``."""
        return self.key.split("/", 1)[0]

    def resolved(self) -> StateComponent:
        """The same component with its pattern known.

        Raises:
            DeclarationError: the pattern found at run time cannot be right for this component.
        """
        if isinstance(self.sharing_pattern, SharingPattern):
            return self
        return replace(self, sharing_pattern=SharingPattern(self.sharing_pattern()))

    def _check_pattern(self, pattern: SharingPattern) -> None:
        if self.slot in _ALWAYS_PER_RANK and pattern is not SharingPattern.PER_RANK:
            raise DeclarationError(
                self.key,
                found=f"declared {pattern.value}",
                expected="per_rank: every rank draws its own random numbers",
            )
        if pattern is SharingPattern.PER_GROUP and self.process_group is None:
            raise DeclarationError(
                self.key,
                found="declared per_group without a process group",
                expected="process_group=<the group whose first rank writes>",
            )
        if self.process_group is not None and pattern not in _OF_GROUPS:
            raise DeclarationError(
                self.key,
                found=f"declared {pattern.value} with a process group",
                expected="per_group or sharded",
            )


def _check_key(key: str) -> None:
    parts = key.split("/")
    if not key or any(not part or part in (".", "..") or "\0" in part for part in parts):
        raise DeclarationError(
            repr(key), found="not a component key", expected="'slot' or 'slot/name'"
        )
    slots = [slot.value for slot in Slot]
    if parts[0] not in slots:
        raise DeclarationError(
            repr(key),
            found=f"no slot is called {parts[0]!r}",
            expected=f"one of {', '.join(slots)}, or e.g. 'extras/name'",
            remedy=did_you_mean(parts[0], slots),
        )


def check_state(component: StateComponent, state: Any) -> None:
    """Checks a saved state of a component; changes nothing.

    Raises:
        InvalidStateError: it is none that such a component writes.
        StateMismatchError: it does not fit the live objects.
    """
    if isinstance(component.stateful, Checked):
        component.stateful.check_content(component.key, state)
    component.state.check_state_dict(state)


def check_components(components: Iterable[StateComponent]) -> tuple[StateComponent, ...]:
    """The components with their patterns resolved.

    Raises:
        DeclarationError: two components share one key.
    """
    resolved = tuple(component.resolved() for component in components)
    seen: set[str] = set()
    for component in resolved:
        if component.key in seen:
            raise DeclarationError(
                component.key, found="declared twice", remedy="Give each component its own key"
            )
        seen.add(component.key)
    return resolved


def states_of(components: Iterable[StateComponent], kind: type[T]) -> list[T]:
    """The states of one kind among those of some components."""
    return [each.stateful for each in components if isinstance(each.stateful, kind)]
