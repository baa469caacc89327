"""From what was found to the live objects: held against them, divided anew, checked, loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resumekit.capture import Difference, differences, holds_gradients
from resumekit.data import SEED, check_randomness
from resumekit.distributed import World
from resumekit.run.belonging import is_empty, not_needed, of_other_frameworks
from resumekit.run.drift import accept_drift
from resumekit.run.fitting import check_fit, check_states, regrouped_buffers
from resumekit.run.membership import Membership
from resumekit.run.options import Options, names_component
from resumekit.run.resplitting import require_taken, resplit
from resumekit.run.restoring import call_everywhere, restore, start_fresh
from resumekit.run.resuming import Found
from resumekit.run.sources import Sources
from resumekit.state import ComponentState, Slot, StateComponent


@dataclass(frozen=True)
class Fit:
    """How a checkpoint's components lie beside those of the run.

    Args:
        differences: what differs between the run that saved and this one.
        not_needed: what to tell of components that only another framework needs.
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
        sources: whose state each rank goes on with.
    """

    world: World
    options: Options
    components: Sequence[StateComponent]
    membership: Membership
    sources: Sources

    def fit(self, found: Found, live: Mapping[str, Any]) -> Fit:
        """Holds the checkpoint against the run, and leaves out of it what nobody takes.

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
        saved |= holds_gradients(every) - {each.key for each in self.components}
        if saved == live.keys():
            return frozenset()

        def empty_here() -> frozenset[str]:
            states = {key: found.states.get(key) for key in saved - live.keys()}
            for key in live.keys() - saved:
                states[key] = live[key].stateful.state_dict()
            return frozenset(key for key, state in states.items() if is_empty(state))

        return frozenset.intersection(*self.world.everywhere(empty_here))

    def divide(self, found: Found) -> tuple[str, ...]:
        """Divides the ranks' own states anew where their number has changed; says how.

        Raises:
            StateMismatchError: a state of a former rank would be lost.
        """
        require_taken(found, self.world)
        return resplit(found, self.components, self.sources, self.world)

    def load(self, found: Found, fresh: Sequence[str]) -> tuple[str, ...]:
        """Loads what every component has agreed to take; says what did not come back exactly.

        Args:
            found: the checkpoint.
            fresh: the keys of components that it lacks.

        Raises:
            StateMismatchError: a component refuses its state; nothing was changed.
        """
        components = self.components
        self.world.everywhere(lambda: check_states(found.states, components))
        remarks = self.world.everywhere(lambda: restore(components, found.states))
        after = call_everywhere(self.world, components, ComponentState.after_resume)
        return (*start_fresh(components, found.name, fresh), *remarks[0], *after)
