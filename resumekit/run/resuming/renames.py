"""Reads a checkpoint whose parameters have other names than those of the run.

Each component that holds a module compares the names. Optimizers, gradients, buffers and attributes
follow the module that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from resumekit.errors import StateMismatchError
from resumekit.state import (
    Renaming,
    Slot,
    StateComponent,
    common_prefix_change,
    nearest_prefixes,
)

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
        """A saved state with live names; models before what belongs to them.

        Args:
            component: of this run.
            state: as it was read.

        Raises:
            StateMismatchError: names have no partner after the change.
        """
        saved = component.state.entries(state)
        if saved is not None:
            live = component.state.entries(component.state.state_dict()) or {}
            renaming = self._change(component.key, saved.keys(), live.keys())
        else:
            renaming = self._of_owner(component)
        try:
            return state if renaming is None else component.state.renamed(state, renaming)
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
