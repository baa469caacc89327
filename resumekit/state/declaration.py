"""The components of a run, which rank writes each, and how exactly each is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from resumekit.errors import DeclarationError, did_you_mean
from resumekit.state.component_state import (
    ComponentState,
    Fidelity,
    SharingPattern,
    Stateful,
    Unextended,
)

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
