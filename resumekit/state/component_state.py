"""What the state of a component implements: two methods, and optional ones with defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from resumekit.state.capture_report import CaptureLine, Fidelity
from resumekit.state.renaming import Renaming
from resumekit.state.world_change import WorldChange

# How the names of times in the logs of frameworks end; equal runs differ in them. transformers 5.23
# trainer_utils.py speed_metrics, trainer.py evaluation_loop; the last is TRL's.
CLOCK_SUFFIXES = ("_runtime", "_per_second", "_model_preparation_time", "step_time")


@runtime_checkable
class Stateful(Protocol):
    """Any object with ``state_dict`` and ``load_state_dict``.

    No other method of it is called, whatever its name: the optional methods need the base class
    ``ComponentState``.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


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

    def state_and_copies(self) -> Any:
        """The same, with live copies of it that code may change, such as rounded weights."""
        return self.comparable_state()

    def replicated_state(self) -> Any:
        """The part of a REPLICATED state that must be the same on all ranks."""
        return self.state_dict()

    def first_rank_only(self) -> frozenset[str]:
        """Dotted names of plain tensors that may differ between ranks; rank 0's are saved."""
        return frozenset()

    def frozen(self) -> frozenset[str]:
        """Dotted names of tensors that training does not change; their files may be shared.

        A wrong name costs time and nothing else: a file is shared only if its bytes are the same.
        """
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

    def live_objects(self) -> Iterable[Any]:
        """The user's objects whose state this is; no other component saves them again."""
        return (self,)

    def live_tensors(self, state: Any) -> Iterable[tuple[Any, Any]]:
        """Each tensor of a saved state with the live one that ``load_state_dict`` copies it into.

        Only where it copies the values as they are, keeps no reference to the saved tensor, and
        gives the same result when the live tensor already has these values.

        Args:
            state: its tensors may be on the meta device.
        """
        return ()

    # ---------------------------------------------------------------- names of parameters

    def entries(self, state: Any) -> Mapping[str, Any] | None:
        """The entries of a module's state by name; None for a component that holds no module."""
        return None

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        """A saved state with the names that parameters and modules have in this run."""
        return state

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


class _Wrapped(ComponentState):
    """An object without the base class; the optional methods have their defaults."""

    def __init__(self, stateful: Stateful) -> None:
        self._stateful = stateful

    def state_dict(self) -> Any:
        return self._stateful.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self._stateful.load_state_dict(state)

    def live_objects(self) -> Iterable[Any]:
        return (self._stateful,)


def with_hooks(stateful: Stateful) -> ComponentState:
    """The object with every optional method, wrapped where it lacks the base class."""
    return stateful if isinstance(stateful, ComponentState) else _Wrapped(stateful)
