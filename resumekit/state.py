"""What a run's state is made of, who writes which part, and how exactly each part is restored.

Nothing here knows torch, a framework or a file system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from resumekit.errors import DeclarationError, InexactError, did_you_mean

if TYPE_CHECKING:
    from resumekit.distributed import WorldChange


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


class Validation(str, Enum):
    """How much is spent on proving that replicated state is the same on every rank."""

    OFF = "off"  # nothing
    DIGEST = "digest"  # at every save each rank digests what it holds
    FULL = "full"  # after a resume as well


@runtime_checkable
class Stateful(Protocol):
    """Any object with ``state_dict`` and ``load_state_dict``.

    It may have optional methods of ``ComponentState``, whose base class it need not inherit:
    ``check_state_dict``, ``resplit_state_dict``, ``comparable_state`` and the others.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


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
        object.__setattr__(self, "state", _with_hooks(self.stateful))
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


class ComponentState:
    """Base class of the state of one component: two methods to write, the others have defaults.

    A user's object that has only ``state_dict`` and ``load_state_dict`` needs no base class. An
    object that needs one of the other methods inherits this class.
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

    def overrides(self, hook: Callable[..., Any]) -> bool:
        """Whether an optional method is not the default one.

        Args:
            hook: of this class, e.g. ``ComponentState.before_save``.
        """
        return getattr(type(self), hook.__name__) is not hook

    # ---------------------------------------------------------------- content

    def check_state_dict(self, state: Any) -> None:
        """Validates a saved state before the first component is loaded; changes nothing.

        Raises:
            StateMismatchError: the state cannot be loaded.
        """

    def comparable_state(self) -> Any:
        """What two equal runs have in common: the state without times and paths."""
        return self.state_dict()

    def replicated_state(self) -> Any:
        """The part of a REPLICATED state that must be the same on all ranks."""
        return self.state_dict()

    def first_rank_only(self) -> frozenset[str]:
        """Dotted names of plain tensors that may differ between ranks; rank 0's are saved."""
        return frozenset()

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

    @property
    def requires_equal_batches(self) -> bool:
        """Whether every rank must get as many batches, because saving this state is collective."""
        return False

    # ---------------------------------------------------------------- events

    def configure(self, *, transient: Collection[str], limit_bytes: int) -> None:
        """Takes the run's options for user state.

        Args:
            transient: names that are deliberately not saved.
            limit_bytes: the most user state that is saved.
        """

    def before_save(self) -> None:
        """Called on every rank when a save begins; may be collective."""

    def after_resume(self) -> Iterable[str]:
        """Called on every rank when all components are loaded; may be collective.

        Returns:
            Messages, as from ``load_state_dict``.
        """
        return ()

    def after_rng_restore(self) -> None:
        """Called after the RNG states are restored, immediately before the next batch."""

    def start_fresh(self) -> Iterable[str] | None:
        """Called when the checkpoint lacks this component.

        Returns:
            Messages; None for the default one.
        """
        return None

    # ---------------------------------------------------------------- ranks

    def resplit_state_dict(
        self, states: Mapping[int, Any], change: WorldChange
    ) -> tuple[Any, Iterable[str]] | None:
        """The state of this rank made from those of another number of ranks.

        Args:
            states: of the former ranks that ``change.readable`` names.
            change: the ranks then and now.

        Returns:
            The state and messages; None where this cannot be done.
        """
        return None

    def pairs(self, state: Any) -> Iterable[tuple[Any, Any]] | None:
        """Each tensor of a saved SHARDED state with the live DTensor whose placements it gets.

        Args:
            state: its tensors are on the meta device.

        Returns:
            The pairs; None for those at the same position of ``state_dict()``.
        """
        return None

    def outline(self) -> Any:
        """Plain values that describe what this rank holds of a SHARDED state; None for all."""
        return None

    def join(self, outlines: Sequence[Any]) -> None:
        """Takes the outlines of all ranks of the group before the next ``state_dict()``."""

    def merge_state_dicts(self, states: Sequence[Any]) -> Any:
        """One state of those of all process groups; None to merge nested dicts by key."""
        return None

    def part_of(self, state: Any) -> Any:
        """What this object holds of a merged state; None to select by the keys of nested dicts."""
        return None

    # ---------------------------------------------------------------- optimizers

    def named_parameters(self) -> Mapping[str, Any] | None:
        """The trained parameters by FQN; None for a component that is no optimizer."""
        return None

    def trained_parameters(self) -> Iterable[Any]:
        """The parameters that an optimizer updates."""
        return ()

    def lost_parameters(self) -> Mapping[str, Any]:
        """Trained parameters that no component of the run can restore."""
        return {}


# The optional methods that an object of the user may have without the base class.
_DUCK_TYPED = frozenset(
    {
        "after_resume",
        "after_rng_restore",
        "before_save",
        "check_state_dict",
        "comparable_state",
        "findings",
        "fingerprint",
        "first_rank_only",
        "join",
        "merge_state_dicts",
        "outline",
        "pairs",
        "part_of",
        "replicated_state",
        "resplit_state_dict",
        "start_fresh",
    }
)


class _Wrapped(ComponentState):
    """An object without the base class: the optional methods are its own where it has them."""

    def __init__(self, stateful: Stateful) -> None:
        self._stateful = stateful
        for name in _DUCK_TYPED:
            hook = getattr(stateful, name, None)
            if callable(hook):
                setattr(self, name, hook)

    def overrides(self, hook: Callable[..., Any]) -> bool:
        return hook.__name__ in vars(self)

    def state_dict(self) -> Any:
        return self._stateful.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self._stateful.load_state_dict(state)

    @property
    def fidelity(self) -> tuple[Fidelity, str] | None:
        found = getattr(self._stateful, "fidelity", None)
        return found if isinstance(found, tuple) else None

    @property
    def requires_equal_batches(self) -> bool:
        return bool(getattr(self._stateful, "requires_equal_batches", False))


def _with_hooks(stateful: Stateful) -> ComponentState:
    return stateful if isinstance(stateful, ComponentState) else _Wrapped(stateful)


@dataclass(frozen=True)
class Progress:
    """How far the logical run is. All counts are of the whole run, whatever was restarted.

    Args:
        step: optimizer-step boundaries passed.
        micro_step: batches used.
        epoch: the epoch of the next batch, from 0.
        batch: the index of the next batch in that epoch.
        samples: samples used, summed over the data-parallel ranks.
        tokens: tokens used, summed over the data-parallel ranks.
    """

    step: int = 0
    micro_step: int = 0
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain values for the manifest."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Progress:
        """The inverse of ``as_dict``."""
        return cls(**{item.name: int(values[item.name]) for item in fields(cls)})


@dataclass(frozen=True)
class BestMetric:
    """The best value seen of the metric that selects checkpoints.

    Args:
        name: the keyword given to ``report``.
        mode: ``"min"`` or ``"max"``.
        value: the best value so far; None before the first report.
        step: the optimizer step it belongs to.
    """

    name: str
    mode: str = "min"
    value: float | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise DeclarationError("mode", found=repr(self.mode), expected="'min' or 'max'")

    def improved_by(self, value: float) -> bool:
        """Whether this value is better; a NaN never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def with_value(self, value: float, step: int) -> BestMetric:
        """The same metric with a new best value."""
        return replace(self, value=float(value), step=step)
