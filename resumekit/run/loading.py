"""Validates, reshards and loads a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resumekit.capture import Difference, differences, gradient_keys
from resumekit.data import SEED, check_randomness
from resumekit.distributed import World, WorldChange
from resumekit.errors import StateMismatchError
from resumekit.run.agreement import ComponentGroups
from resumekit.run.compatibility import (
    accept_drift,
    check_fit,
    check_states,
    is_empty,
    not_needed,
    of_other_frameworks,
    regrouped_buffers,
)
from resumekit.run.options import Options, names_component
from resumekit.run.resuming import Found
from resumekit.run.world_change import StateOrigins
from resumekit.state import ComponentState, SharingPattern, Slot, StateComponent
from resumekit.storage import ComponentRecord, StepName


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's components compare with those of the run.

    Args:
        differences: what differs between the run that saved and this one.
        not_needed: messages about components that only another framework needs.
        fresh: the keys of components that the checkpoint lacks; they start from their live state.
    """

    differences: tuple[Difference, ...]
    not_needed: tuple[str, ...]
    fresh: tuple[str, ...]


@dataclass(frozen=True)
class Loading:
    """Brings the components of a run to a checkpoint that was found; to be called in this order.

    Args:
        world: the ranks.
        options: the run's.
        components: the run's, whose objects exist.
        membership: which ranks share them.
        sources: whose state each rank loads.
    """

    world: World
    options: Options
    components: Sequence[StateComponent]
    membership: ComponentGroups
    sources: StateOrigins

    def fit(self, found: Found, live: Mapping[str, Any]) -> Fit:
        """Holds the checkpoint against the run, and leaves out the components that this run lacks.

        Args:
            found: the checkpoint.
            live: the fingerprint of this run.

        Raises:
            ConfigurationError: ``randomness`` was another.
            DriftError: what the learning rate was planned for has changed.
            StateMismatchError: a component is on one side only.
        """
        manifest, components, options = found.manifest, self.components, self.options
        if not names_component(options.exclude, SEED):
            check_randomness({each.key for each in manifest.components}, options.randomness)
        others = of_other_frameworks(manifest, components)
        then = {key: value for key, value in manifest.fingerprint.items() if key not in others}
        changed = differences(then, live)
        accept_drift(changed, components, options)
        num_ranks = self.world.world_size
        fresh = check_fit(
            manifest,
            components,
            options,
            self.membership,
            world_size=num_ranks,
            empty=self._empty(found),
        )
        found.leave(regrouped_buffers(manifest, components, self.membership))
        found.leave(set(found.states) - {each.key for each in components})
        found.leave(others)
        return Fit(tuple(changed), not_needed(manifest, others), fresh)

    def _empty(self, found: Found) -> frozenset[str]:
        """The keys on one side only in which there is nothing. Collective.

        Of callbacks' states, and of gradients that training did not need.
        """
        live = {each.key: each for each in self.components if each.slot == Slot.CALLBACKS.value}
        every = {each.key for each in found.manifest.components}
        saved = {key for key in every if key.partition("/")[0] == Slot.CALLBACKS.value}
        saved |= gradient_keys(every) - {each.key for each in self.components}
        if saved == live.keys():
            return frozenset()

        def empty_here() -> frozenset[str]:
            states = {key: found.states.get(key) for key in saved - live.keys()}
            for key in live.keys() - saved:
                states[key] = live[key].stateful.state_dict()
            return frozenset(key for key, state in states.items() if is_empty(state))

        return frozenset.intersection(*self.world.everywhere(empty_here))

    def divide(self, found: Found) -> tuple[str, ...]:
        """Reshards the per-rank states where the number of ranks has changed; describes how.

        Raises:
            StateMismatchError: a state of a former rank would be lost.
        """
        require_taken(found, self.world)
        return resplit(found, self.components, self.sources, self.world)

    def load(self, found: Found, fresh: Sequence[str]) -> tuple[str, ...]:
        """Loads what every component has agreed to take; reports what is not restored exactly.

        Args:
            found: the checkpoint.
            fresh: the keys of components that it lacks.

        Raises:
            StateMismatchError: a component refuses its state; nothing was changed.
        """
        components = self.components
        self.world.everywhere(lambda: check_states(found.states, components))
        notes = self.world.everywhere(lambda: restore(components, found.states))
        after = call_everywhere(self.world, components, ComponentState.after_resume)
        return (*start_fresh(components, found.name, fresh), *notes[0], *after)


# The order of a restore. The progress comes before it, as soon as the checkpoint is found; the data
# position and then the random state are only kept, and follow at the first fetch.
_RESTORE_ORDER = (
    Slot.MODEL,
    Slot.OPTIMIZER,
    Slot.LR_SCHEDULER,
    Slot.GRAD_SCALER,
    Slot.EMA,
    Slot.BEST_METRIC,
    Slot.CALLBACKS,
    Slot.EXTRAS,
    Slot.DATA,
    Slot.RNG,
)


def restore(components: Sequence[StateComponent], states: Mapping[str, Any]) -> tuple[str, ...]:
    """Loads in the order of a restore; gives the components' messages."""
    order = {slot.value: index for index, slot in enumerate(_RESTORE_ORDER)}
    given = [each for each in components if each.key in states and each.slot in order]
    notes: list[str] = []
    for component in sorted(given, key=lambda each: order[each.slot]):
        notes += _words(component.stateful.load_state_dict(states[component.key]))
    return tuple(notes)


def _words(returned: Any) -> list[str]:
    """The messages of a load; objects of other libraries return something else, or nothing."""
    is_ours = isinstance(returned, (tuple, list))
    return [each for each in returned if isinstance(each, str)] if is_ours else []


def start_fresh(
    components: Sequence[StateComponent], name: StepName, keys: Collection[str]
) -> list[str]:
    """Messages about the components of these keys, which the checkpoint lacks."""
    notes: list[str] = []
    for component in components:
        if component.key in keys:
            found = component.state.start_fresh()
            default = (f"{name} has no {component.key}: it starts from its live state",)
            notes.extend(default if found is None else found)
    return notes


def call_everywhere(
    world: World,
    components: Sequence[StateComponent],
    hook: Callable[[ComponentState], Iterable[str] | None],
) -> tuple[str, ...]:
    """Calls a method of the components that override it; gives rank 0's messages. Collective.

    Without such a component there is no collective.
    """
    states = [each.state for each in components if each.state.overrides(hook)]
    if not states:
        return ()
    return world.everywhere(
        lambda: tuple(note for state in states for note in getattr(state, hook.__name__)() or ())
    )[0]


def resplit(
    found: Found, components: Sequence[StateComponent], sources: StateOrigins, world: World
) -> tuple[str, ...]:
    """Makes this rank's states of those of the former ranks; gives the messages of all. Collective.

    Args:
        found: the checkpoint.
        components: of this run.
        sources: whose state this rank takes.
        world: the ranks.

    Raises:
        StateMismatchError: the number of ranks has changed, and a component cannot follow.
        DataPositionError: the former ranks were not at one position in the data.
    """
    manifest = found.manifest
    records = {record.key: record for record in manifest.components}

    def of_this_rank() -> tuple[str, ...]:
        notes: list[str] = []
        for component in components:
            if component.key not in found.former:
                continue
            record, former = records[component.key], found.former[component.key]
            number = sources.own_number(record, manifest)
            if number is not None:  # it was not known yet when it was read
                found.states[component.key] = former[number]
                continue
            state, messages = _resplit(component, former, sources.change(record, manifest), record)
            found.states[component.key] = state
            notes.extend(messages)
        return tuple(notes)

    notes: list[str] = []
    if manifest.world_size != world.world_size:
        notes.append(f"number of ranks was {manifest.world_size}, now {world.world_size}")
    if any(world.gather(bool(found.former))):
        notes += [note for every in world.everywhere(of_this_rank) for note in every]
    return tuple(dict.fromkeys(notes))


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
    component: StateComponent,
    former: Mapping[int, Any],
    change: WorldChange,
    record: ComponentRecord,
) -> tuple[Any, tuple[str, ...]]:
    found = component.state.resplit_state_dict(former, change)
    if found is None:
        noun = "ranks" if record.pattern == SharingPattern.PER_RANK.value else "groups of ranks"
        raise StateMismatchError(
            component.key,
            found=f"a state of its own on each of {change.former_world_size} {noun}, for "
            f"{change.world_size} of them",
            expected="a method resplit_state_dict, which makes of them the state of another rank",
            remedy=f"Pass exclude={{{component.key!r}}} to leave it as it is, or launch the job as "
            "it was",
        )
    state, notes = found
    return state, tuple(notes)
