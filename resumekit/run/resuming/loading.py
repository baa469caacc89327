"""Validates, reshards and loads a checkpoint; and restores again what the script has changed since.

Code between the start of an epoch and its first batch had run before a save inside that epoch. A
resumed process runs it once more, on state that has its effect already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from resumekit.capture.fingerprint import differences
from resumekit.capture.gradients import gradient_keys
from resumekit.capture.model import ModelState
from resumekit.capture.nested_state import Restorer, live_load, require_loadable
from resumekit.capture.objects import AttributeState
from resumekit.data.keyed import SEED, check_randomness
from resumekit.distributed import World
from resumekit.errors import StateMismatchError, UnsupportedValueError
from resumekit.run.options import names_component
from resumekit.run.report import Reporter, ResumeReport
from resumekit.run.resuming.compatibility import (
    accept_drift,
    check_fit,
    drift_messages,
    frameworks_in,
    frameworks_of,
    is_empty,
    of_other_frameworks,
    regrouped_buffers,
)
from resumekit.run.resuming.finder import Finder, Found, adopted, built, models_first
from resumekit.run.resuming.matching import match_imported
from resumekit.serialization.digests import state_digest
from resumekit.state import (
    AfterResume,
    AfterRng,
    ComponentState,
    InPlace,
    SharingPattern,
    Slot,
    StateComponent,
    check_state,
    states_of,
)
from resumekit.storage.directories import StepName
from resumekit.storage.imported import import_of

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
    Slot.VARIABLES,
)


_SLOT_NAMES = frozenset(each.value for each in Slot)


class Loading:
    """Brings the components of a run to a checkpoint that was found.

    Args:
        found: the checkpoint.
        finder: reads checkpoints of the run, with the components whose objects exist now.
    """

    def __init__(self, found: Found, finder: Finder) -> None:
        self.found, self.finder = found, finder
        self.world, self.options = finder.world, finder.options
        self.components = finder.components
        match_imported(found, self.components)

    def resume(
        self, live: Mapping[str, Any], reporter: Reporter, *, causes: Sequence[str] = ()
    ) -> ResumeReport:
        """Takes over all but the random state and the progress. Collective.

        Args:
            live: the fingerprint of this run.
            reporter: logs what has changed, and what is not restored exactly.
            causes: what of the loop was changed that its length follows from.

        Raises:
            DriftError: ``randomness``, or what the learning rate was planned for, has changed.
            StateMismatchError: the checkpoint does not fit this run; nothing was changed.
            DataPositionError: the former ranks were not at one position in the data.
            IncompleteLoadError: the checkpoint changed meanwhile; the process has to end.
        """
        found, manifest = self.found, self.found.manifest
        fit = self._fit(live, causes)
        reporter.take_history(manifest)
        changes = (*self._rename(), *self._divide())
        messages = self._load(fit.fresh)
        changes = (*self._imported(fit.fresh), *changes)
        reporter.log_changes(changes)
        warnings, notes = drift_messages(fit.differences, self.options)
        for warning in warnings:
            reporter.warn("RK-821", warning)
        for message in (*notes, *fit.not_needed, *messages):
            reporter.log(message)
        for difference in fit.differences:
            reporter.detail(f"changed since the checkpoint: {difference}")
        restored = {line.key: line for line in reporter.capture_report().lines}
        keys = [each.key for each in manifest.components if each.key in found.states]
        return replace(
            fit,
            step=manifest.step,
            path=found.reader.path,
            components=tuple(restored[key] for key in keys),
            changes=changes,
            rejected=found.rejected,
        )

    def _fit(self, live: Mapping[str, Any], causes: Sequence[str]) -> ResumeReport:
        """Holds the checkpoint against the run, and leaves out the components that this run lacks.

        Args:
            live: the fingerprint of this run.
            causes: see ``resume``.

        Returns:
            The part of the report that follows from this.

        Raises:
            DriftError: ``randomness``, or what the learning rate was planned for, has changed.
            StateMismatchError: a component is on one side only.
        """
        found, manifest = self.found, self.found.manifest
        components, options = self.components, self.options
        if not names_component(options.exclude, SEED):
            check_randomness({each.key for each in manifest.components}, options.randomness)
        others = of_other_frameworks(manifest, components)
        then = {key: value for key, value in manifest.fingerprint.items() if key not in others}
        changed = () if found.as_given else differences(then, live)
        self.world.everywhere(lambda: accept_drift(changed, components, options, causes=causes))
        regrouped = regrouped_buffers(manifest, components, self.finder.membership)
        fresh = check_fit(
            manifest,
            components,
            options,
            world_size=self.world.world_size,
            regrouped=regrouped,
            imported=bool(found.as_given),
            unneeded=self._empty() | others.keys() | {Slot.VARIABLES.value},
        )
        known = {each.key for each in components}
        of_others = {*regrouped, *others, *(found.states.keys() - known)}
        if frameworks_of(manifest) != frameworks_in(components):
            of_others.add(Slot.VARIABLES.value)  # of other functions
        not_needed = [
            f"{manifest.name} has {key}, which belongs to {framework}: not needed here"
            for key, framework in sorted(others.items())
        ]
        variables = found.states.get(Slot.VARIABLES.value) or {}
        if variables.get("slots") and Slot.VARIABLES.value in of_others:
            not_needed.append(f"{manifest.name} has variables of another loop, which are left out")
        found.leave(of_others)
        noted = tuple(not_needed)
        return ResumeReport(True, differences=tuple(changed), not_needed=noted, fresh=fresh)

    def _empty(self) -> frozenset[str]:
        """The keys on one side only in which there is nothing. Collective.

        Of callbacks' states, and of gradients that training did not need.
        """
        found = self.found
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

    def _rename(self) -> tuple[str, ...]:
        """Gives the states the parameter names of this run; describes the change, if any.

        Raises:
            StateMismatchError: with the prefixes that the user gave, names have no partner.
        """
        found = self.found
        components = {each.key: each for each in self.components}
        for key in components.keys() & found.states.keys() & {*found.as_given}:
            if key not in found.renames.renamed:
                component = components[key]
                found.states[key] = adopted(component, found.states[key])
                if not isinstance(component.stateful, ModelState):
                    found.renames.renamed.add(key)  # it has live names
        for key in models_first(components.keys() - found.renames.renamed):
            component = components[key]
            if key in found.states:
                found.states[key] = found.renames.of(component, found.states[key])
            former = found.former.get(key, {})
            former.update({n: found.renames.of(component, state) for n, state in former.items()})
        return found.renames.messages()

    def _divide(self) -> tuple[str, ...]:
        """Reshards the per-rank states where the number of ranks has changed; describes how.

        Raises:
            StateMismatchError: a state of a former rank would be lost, or a component cannot
                follow the number of ranks.
            DataPositionError: the former ranks were not at one position in the data.
        """
        self._require_taken()
        then, now = self.found.manifest.world_size, self.world.world_size
        is_known = not self.found.as_given or Slot.RNG.value in self.found.as_given
        notes = [f"number of ranks was {then}, now {now}"] if is_known and then != now else []
        if any(self.world.gather(bool(self.found.former))):
            notes += [note for every in self.world.everywhere(self._resplit) for note in every]
        return tuple(dict.fromkeys(notes))

    def _require_taken(self) -> None:
        """Raises StateMismatchError where a saved tensor of a pipeline is in no stage here."""
        every = self.world.gather(self.found.left)
        for key, left in self.found.left.items():
            nobody = sorted(left.intersection(*(each.get(key, frozenset()) for each in every)))
            if nobody:
                more = f" (and {len(nobody) - 1} more)" if len(nobody) > 1 else ""
                raise StateMismatchError(
                    f"{key}: {nobody[0]}",
                    found=f"in no pipeline stage of this run{more}",
                    expected="in one, as in the checkpoint",
                    remedy="Build the stages from all layers of the saved model",
                )

    def _resplit(self) -> list[str]:
        """Makes this rank's states of those of the former ranks; gives the messages."""
        manifest, notes = self.found.manifest, list[str]()
        records = {record.key: record for record in manifest.components}
        for component in self.components:
            former = self.found.former.get(component.key)
            if former is None:
                continue
            record = records[component.key]
            origin = self.finder.sources.of(record, manifest)
            if origin.own_number is not None:  # it was not known yet when it was read
                self.found.states[component.key] = former[origin.own_number]
                continue
            change = origin.change
            assert change is not None  # every component is known
            found = component.state.resplit_state_dict(former, change)
            if found is None:
                is_of_rank = record.pattern == SharingPattern.PER_RANK.value
                noun = "ranks" if is_of_rank else "groups of ranks"
                raise StateMismatchError(
                    component.key,
                    found=f"one state for each of {change.former_world_size} {noun}, and "
                    f"{change.world_size} of them in this run",
                    expected="a ComponentState whose resplit_state_dict reshards these states",
                    remedy=f"Launch with {change.former_world_size} {noun}, or pass "
                    f"exclude={{{component.key!r}}} to keep its live state",
                )
            self.found.states[component.key], messages = found
            notes += messages
        return notes

    def _load(self, fresh: Sequence[str]) -> tuple[str, ...]:
        """Loads what every component has agreed to take; reports what is not restored exactly.

        Args:
            fresh: the keys of components that the checkpoint lacks.

        Raises:
            StateMismatchError: a component refuses its state; nothing was changed.
            IncompleteLoadError: the checkpoint changed meanwhile; the process has to end.
        """
        self.world.everywhere(self._check_states)
        notes = self.world.everywhere(self._restore)
        after = _after_resume(self.world, self.components)
        return (*self._start_fresh(fresh), *notes[0], *after)

    def load_weights(self) -> None:
        """Loads the models of a checkpoint that holds nothing else.

        Raises:
            StateMismatchError: it has a model that this run has not, or a model refuses its state;
                nothing was changed.
            IncompleteLoadError: the checkpoint changed meanwhile; the process has to end.
        """
        live = {component.key for component in self.components}
        for key in self.found.states.keys() - live:
            raise StateMismatchError(
                key,
                found=f"{self.found.name} has its weights, and this run has no {key}",
                expected="the models of the run that was forked",
            )
        self._divide()
        self._load_found()

    def load_again(self, given: Mapping[str, Any]) -> None:
        """Loads what was found, of a checkpoint that this run has resumed from. Collective.

        Args:
            given: states that take precedence, by component key.

        Raises:
            StateMismatchError: a component refuses its state; nothing was changed.
            IncompleteLoadError: the checkpoint changed meanwhile; the process has to end.
        """
        self._rename()
        self._divide()
        states = self.found.states
        states.update({key: state for key, state in given.items() if key in states})
        self._load_found()

    def _load_found(self) -> None:
        self.world.everywhere(self._check_states)
        self.world.everywhere(self._restore)
        _after_resume(self.world, (e for e in self.components if e.key in self.found.states))

    def _check_states(self) -> None:
        """Lets every component refuse its state before any of them loads. Changes nothing."""
        for component in self.components:
            key, stateful = component.key, component.stateful
            if key not in self.found.states:
                continue
            state = self.found.states[key] = built(component, self.found.states[key])
            check_state(component, state)  # not all were known when it was read
            if not isinstance(stateful, ComponentState):
                require_loadable(key, stateful, state)

    def _restore(self) -> list[str]:
        """Loads in the order of a restore; gives the components' messages."""
        states, order = self.found.states, [slot.value for slot in _RESTORE_ORDER]
        given = [each for each in self.components if each.key in states and each.slot in order]
        notes: list[str] = []
        for component in sorted(given, key=lambda each: order.index(each.slot)):
            key, stateful = component.key, component.stateful
            state = states[key]
            if isinstance(stateful, InPlace):
                state = self.found.deferral.complete(key, state, stateful.live_tensors)
            if state is not states[key]:  # built again from the names of the file
                state = self.found.renames.of(component, built(component, state))
            with live_load(key):
                notes += _words(stateful.load_state_dict(state))
        return notes

    def _start_fresh(self, keys: Sequence[str]) -> list[str]:
        """Messages about the components of these keys, which the checkpoint lacks."""
        notes: list[str] = []
        for component in self.components:
            if component.key in keys:
                found = component.state.start_fresh()
                default = f"{self.found.name} has no {component.key}: it starts from its live state"
                if not self.found.as_given:  # else one line says all, see _imported
                    found = [default] if found is None else found
                notes.extend(found or ())
        return notes

    def _imported(self, fresh: Sequence[str]) -> tuple[str, ...]:
        """One line on a checkpoint that was imported: what it is, and what it lacks."""
        imported = import_of(self.found.manifest)
        if imported is None or not imported.as_given:
            return ()
        lacks = [*imported.lacks, *filter(self._is_lost, fresh)]
        words = f": no {', '.join(lacks)}; started afresh" if lacks else ""
        return (f"imported from {imported.source}{words}",)

    def _is_lost(self, key: str) -> bool:
        """Whether a component that the checkpoint lacks has state that other words do not name."""
        if key in _SLOT_NAMES:
            return False
        state = next(each.state for each in self.components if each.key == key)
        has_words = type(state).start_fresh is not ComponentState.start_fresh
        return not has_words and not is_empty(state.state_dict())


def _words(returned: Any) -> list[str]:
    """The messages of a load; objects of other libraries return something else, or nothing."""
    is_ours = isinstance(returned, (tuple, list))
    return [each for each in returned if isinstance(each, str)] if is_ours else []


def _after_resume(world: World, components: Iterable[StateComponent]) -> tuple[str, ...]:
    """Completes a load; gives rank 0's messages. Collective, where a component asks for it."""
    states = states_of(components, AfterResume)
    if not states:
        return ()
    return world.everywhere(lambda: tuple(n for each in states for n in each.after_resume()))[0]


# ---------------------------------------------------------------- restored again at the first fetch

# What a script, or a framework's hooks, can change. The position in the data and the random state
# follow at the first fetch, and so does all state that is ``AfterRng``.
_SLOTS = {each.value for each in _RESTORE_ORDER} - {
    *(Slot.DATA.value, Slot.RNG.value, Slot.VARIABLES.value)
}
_MOST_READS = 2  # a component's load may change another one, which is then restored as well

Digests = dict[str, str | None]


class RestoredState:
    """The state that a resume has restored, until the first fetch of the same position.

    Its content is known by digests of its bytes: ``Tensor._version`` stays the same when ``.data``,
    a view of NumPy or a kernel of a batch norm writes. A digest of a state that cannot be stored is
    None. Where a component's ``state_dict`` is collective, so is every method.

    Args:
        loading: that has loaded the checkpoint.
        is_driven: a framework runs the loop.
    """

    def __init__(self, loading: Loading, *, is_driven: bool) -> None:
        found, finder = loading.found, loading.finder
        self._name, self._aliases = found.name, found.aliases
        # A revision of its step that is not among them replaces it: this launch has saved it.
        self._known = frozenset(finder.world.on_first(finder.store.step_names))
        self._finder = replace(finder, renames=found.renames)
        self._components: list[StateComponent] = [
            each
            for each in loading.components
            if each.key in found.states
            and each.slot in _SLOTS
            and not isinstance(each.stateful, AfterRng)
            and not (is_driven and _is_of_framework(each))
        ]
        self._digests = self._digest()
        self._given: dict[str, Any] = {}
        self._is_entered = False

    def enter(self, *, is_new: bool) -> None:
        """A loop begins: what the script has changed until now stays as it is. Collective.

        Args:
            is_new: the loop itself has restored the state.
        """
        if self._is_entered:
            return
        self._is_entered = True
        if not is_new:
            changed = self._changed_anywhere()
            self._given = {
                each.key: Restorer()(None, each.state.state_dict())
                for each in self._components
                if each.key in changed
            }
            self._digests = self._digest()

    def restore(self) -> tuple[list[str], list[str]]:
        """Restores what has changed on any rank since the loop began. Collective.

        Returns:
            The keys of the components that were restored, and of those that still differ.

        Raises:
            StateMismatchError: the script has rebuilt an object, so that it refuses the state.
            IncompleteLoadError: the checkpoint cannot be read any more.
        """
        restored: set[str] = set()
        changed = self._changed_anywhere()
        for _ in range(_MOST_READS):
            if not changed:
                break
            restored |= changed
            try:
                self._load(changed)
            except StateMismatchError as error:
                raise _rebuilt(error) from error
            changed = self._changed_anywhere()
        return self._in_order(restored), self._in_order(changed)

    def _load(self, keys: Collection[str]) -> None:
        name = self._newest_of_step()
        stored = {self._aliases.get(key, key) for key in keys}
        finder = replace(self._finder, keys=stored)
        finder = finder if name == self._name else replace(finder, renames=None)
        loading = Loading(finder.read(name), finder)
        loading.load_again(self._given)
        del loading  # its states are in the buffer's memory
        finder.buffer.give_back()

    def _newest_of_step(self) -> StepName:
        """The checkpoint, or what a save before the loop has replaced it by."""
        names = self._finder.world.on_first(self._finder.store.step_names)
        new = (each for each in names if each not in self._known and each.step == self._name.step)
        return next(new, self._name)

    def _changed_anywhere(self) -> frozenset[str]:
        """The components that differ on any rank, and those whose state is a part of theirs."""
        changed = frozenset[str]().union(*self._finder.world.everywhere(self._changed))
        return changed.union(
            each.key
            for each in self._components
            if any(each.key.startswith(f"{key}/") for key in changed)
        )

    def _changed(self) -> frozenset[str]:
        now = self._digest()
        return frozenset(key for key, digest in self._digests.items() if digest != now[key])

    def _digest(self) -> Digests:
        return {each.key: _digest_of(each.state) for each in self._components}

    def _in_order(self, keys: Collection[str]) -> list[str]:
        return [each.key for each in self._components if each.key in keys]


def _is_of_framework(component: StateComponent) -> bool:
    """Whether it moves until the first fetch, or is asked for by a hook that may come too early."""
    is_plain = isinstance(component.stateful, AttributeState) and not component.framework
    return component.slot == Slot.CALLBACKS.value and not is_plain


def _digest_of(state: ComponentState) -> str | None:
    try:
        if isinstance(state, ModelState):
            return state_digest(state.state_and_copies())
        return state_digest(state.comparable_state())
    except UnsupportedValueError:
        return None


def _rebuilt(error: StateMismatchError) -> StateMismatchError:
    return StateMismatchError(
        error.where,
        found=f"the script rebuilt it between the load and the first batch ({error.found})",
        expected=error.expected,
        remedy="Build it before the loop begins, or pass "
        f"exclude={{{error.where.partition(':')[0]!r}}} to leave it to the script",
    )
