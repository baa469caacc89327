"""Replicated state is held against that of the other ranks before it is saved.

Rank 0 writes it for all. If the ranks have drifted apart, a resume would silently give every rank
what rank 0 had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from resumekit.contract import SharingPattern, StateComponent, Validation
from resumekit.distributed import World, who_said
from resumekit.engine.membership import Membership
from resumekit.errors import RankDisagreementError
from resumekit.payload import leaf_digests

# One state on all ranks, or on all ranks of a group.
_REPLICATED = frozenset(
    {SharingPattern.REPLICATED, SharingPattern.PER_GROUP, SharingPattern.PER_NODE}
)


class Replicas:
    """The replicated components of a run.

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
            if each.sharing_pattern in _REPLICATED and Validation.OFF not in (each.validate, level)
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

        def digest() -> dict[str, str]:
            for each in components:
                leaves[each.key] = leaf_digests(_replicated_state(each.stateful))
            return {key: _combined(digests) for key, digests in leaves.items()}

        every = self._world.everywhere(digest)
        for key in leaves:
            drifted = [
                group
                for group in self._membership.groups(key)
                if len({every[rank][key] for rank in group}) > 1
            ]
            if drifted:
                _refuse(key, drifted[0], self._world.gather(leaves[key]))


def _replicated_state(stateful: Any) -> Any:
    return getattr(stateful, "replicated_state", stateful.state_dict)()


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
