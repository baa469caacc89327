"""Replicated state is held against that of the other ranks before it is saved.

One rank writes it for all. If the ranks have drifted apart, a resume would silently give every rank
what that one had. In state that is spread over the ranks it is the parts that several of them hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from resumekit.distributed import World, who_said
from resumekit.errors import RankDisagreementError
from resumekit.run.membership import Membership
from resumekit.serialization import WHOLE, Box, Copy, copy_digests, leaf_digests
from resumekit.state import SharingPattern, StateComponent, Validation

# One state on all ranks, or on all ranks of a group.
_REPLICATED = frozenset(
    {SharingPattern.REPLICATED, SharingPattern.PER_GROUP, SharingPattern.PER_NODE}
)


class Replicas:
    """What several ranks of a run hold alike.

    Args:
        world: the ranks.
        components: of the run.
        membership: which ranks hold one state of each of them.
        level: for all of them; a component may ask for more, or for none.
    """

    def __init__(
        self,
        world: World,
        components: Sequence[StateComponent],
        membership: Membership,
        level: Validation,
    ) -> None:
        self._world = world
        self._membership = membership
        compared = [
            each
            for each in components
            if each.sharing_pattern in (*_REPLICATED, SharingPattern.SHARDED)
            and Validation.OFF not in (each.validate, level)
        ]
        self._at_save = compared if world.world_size > 1 else []
        self._after_resume = [
            each for each in self._at_save if Validation.FULL in (each.validate, level)
        ]

    def check_before_save(self) -> None:
        """Returns when every rank holds the same state. Collective.

        Raises:
            RankDisagreementError: on every rank; it names the component, the first tensor that
                differs, and the ranks.
            UnsupportedValueError: a value cannot be stored; names its place.
        """
        self._check(self._at_save)

    def check_after_resume(self) -> None:
        """The same for the components that are to be compared after a resume as well."""
        self._check(self._after_resume)

    def _check(self, components: Sequence[StateComponent]) -> None:
        if not components:
            return
        leaves: dict[str, dict[str, str]] = {}
        copies: dict[str, dict[str, Copy]] = {}

        def digest() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
            for each in components:
                if each.sharing_pattern is SharingPattern.SHARDED:
                    copies[each.key] = self._copies(each)
                else:
                    leaves[each.key] = leaf_digests(each.state.replicated_state())
            return (
                {key: _combined(digests) for key, digests in leaves.items()},
                {key: _by_holders(held) for key, held in copies.items()},
            )

        every = self._world.everywhere(digest)
        for key in leaves:
            drifted = [
                group
                for group in self._membership.groups(key)
                if len({every[rank][0][key] for rank in group}) > 1
            ]
            if drifted:
                _refuse(key, drifted[0], self._world.gather(leaves[key]))
        for key in copies:
            groups = self._membership.groups(key)
            if any(_is_in_doubt([every[rank][1][key] for rank in group]) for group in groups):
                held = self._world.gather(copies[key])
                for group in groups:
                    _refuse_copies(key, {rank: held[rank] for rank in group})

    def _copies(self, component: StateComponent) -> dict[str, Copy]:
        group = self._membership.groups(component.key)[self._membership.ordinal(component.key)]
        state = component.state
        own = state.first_rank_only()
        return copy_digests(state.replicated_state(), num_ranks=len(group), own=own)


def _by_holders(copies: Mapping[str, Copy]) -> dict[str, str]:
    """One digest for all copies that the same ranks hold."""
    held: dict[str, dict[str, str]] = {}
    for name, copy in copies.items():
        held.setdefault(copy.group, {})[name] = f"{copy.box} {copy.digest}"
    return {group: _combined(digests) for group, digests in held.items()}


def _is_in_doubt(every: Sequence[Mapping[str, str]]) -> bool:
    """Whether ranks that hold the same parts may hold other values.

    Ranks that hold parts of other tensors look like it; each copy is compared then.
    """
    said: dict[str, set[str]] = {}
    for held in every:
        for group, digest in held.items():
            said.setdefault(group, set()).add(digest)
    return any(len(digests) > 1 for digests in said.values())


def _refuse_copies(key: str, every: Mapping[int, Mapping[str, Copy]]) -> None:
    """Raises RankDisagreementError for the first part whose copies are not alike."""
    for name in dict.fromkeys(name for held in every.values() for name in held):
        holders: dict[tuple[str, Box], dict[int, str]] = {}
        for rank, held in every.items():
            if name in held:
                copy = held[name]
                holders.setdefault((copy.group, copy.box), {})[rank] = copy.digest[:12]
        for (group, box), said in holders.items():
            if len(set(said.values())) > 1:
                raise RankDisagreementError(
                    f"{key}: {name}" if group == WHOLE else f"{key}: {name} {box}",
                    found=f"copies that are not alike ({who_said(said)})",
                    expected="the same on all ranks that hold it",
                    remedy="Synchronise it, or pass validate='off' to save one of them",
                )


def _combined(digests: Mapping[str, str]) -> str:
    lines = sorted(f"{name}\0{digest}\n" for name, digest in digests.items())
    return xxhash.xxh3_128_hexdigest("".join(lines).encode("utf-8"))


def _refuse(key: str, ranks: Sequence[int], every: Sequence[Mapping[str, Any]]) -> None:
    """Names the first leaf that the ranks of a group do not have in common."""
    names = dict.fromkeys(name for rank in ranks for name in every[rank])  # in the state's order
    for name in names:
        said = {rank: every[rank].get(name, "nothing")[:12] for rank in ranks}
        if len(set(said.values())) > 1:
            raise RankDisagreementError(
                f"{key}: {name}",
                found=f"replicated, and not alike ({who_said(said)})",
                expected="the same on all ranks"
                + (" of a group" if len(ranks) < len(every) else ""),
                remedy="Synchronise it, or declare the component per_rank",
            )
