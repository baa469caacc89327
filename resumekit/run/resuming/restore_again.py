"""Restores again what the script changes between the load and the first batch.

Code between the start of an epoch and its first batch had run before a save inside that epoch. A
resumed process runs it once more, on state that has its effect already.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from resumekit.capture import ModelState, Restorer
from resumekit.errors import StateMismatchError, UnsupportedValueError
from resumekit.run.resuming.finder import Finder
from resumekit.run.resuming.loading import Loading
from resumekit.serialization import state_digest
from resumekit.state import AfterRng, ComponentState, Slot, StateComponent
from resumekit.storage import StepName

# What a script can change. The position in the data and the random state follow at the first fetch,
# and so does all state that is ``AfterRng``.
_SLOTS = frozenset(
    {
        Slot.MODEL.value,
        Slot.OPTIMIZER.value,
        Slot.LR_SCHEDULER.value,
        Slot.GRAD_SCALER.value,
        Slot.EMA.value,
        Slot.BEST_METRIC.value,
        Slot.CALLBACKS.value,
        Slot.EXTRAS.value,
    }
)
_MOST_READS = 2  # a component's load may change another one, which is then restored as well

Digests = dict[str, str | None]


class RestoredState:
    """The state that a resume has restored, until the first fetch of the same position.

    Its content is known by digests of its bytes: ``Tensor._version`` stays the same when ``.data``,
    a view of NumPy or a kernel of a batch norm writes. A digest of a state that cannot be stored is
    None. Where a component's ``state_dict`` is collective, so is every method.

    Args:
        loading: that has loaded the checkpoint.
        finder: that has found it.
    """

    def __init__(self, loading: Loading, finder: Finder) -> None:
        found = loading.found
        self._name = found.name
        self._finder = replace(
            finder,
            components=loading.components,
            membership=loading.membership,
            sources=loading.sources,
            renames=found.renames,
        )
        self._components: list[StateComponent] = [
            each
            for each in loading.components
            if each.key in found.states
            and each.slot in _SLOTS
            and not isinstance(each.stateful, AfterRng)
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
        finder = replace(self._finder, keys=keys)
        finder = finder if name == self._name else replace(finder, renames=None)
        loading = Loading(
            finder.read(name),
            finder.world,
            finder.options,
            finder.components,
            finder.membership,
            finder.sources,
        )
        loading.load_again(self._given)
        del loading  # its states are in the buffer's memory
        finder.buffer.give_back()

    def _newest_of_step(self) -> StepName:
        """The checkpoint, or what a save before the loop has replaced it by."""
        names = self._finder.world.on_first(self._finder.store.step_names)
        return next((each for each in names if each.step == self._name.step), self._name)

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
