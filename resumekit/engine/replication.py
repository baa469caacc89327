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
from resumekit.errors import RankDisagreementError
from resumekit.payload import leaf_digests


class Replicas:
    """The replicated components of a run.

    Args:
        world: the ranks.
        components: of the run.
        level: for all of them; a component may ask for more, or for none.
    """

    def __init__(
        self, world: World, components: Sequence[StateComponent], level: Validation
    ) -> None:
        self._world = world
        compared = [
            each
            for each in components
            if each.sharing_pattern is SharingPattern.REPLICATED
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

        def digest() -> dict[str, str]:
            for each in components:
                leaves[each.key] = leaf_digests(_replicated_state(each.stateful))
            return {key: _combined(digests) for key, digests in leaves.items()}

        every = self._world.everywhere(digest)
        for key in leaves:
            if len({each[key] for each in every}) > 1:
                _refuse(key, self._world.gather(leaves[key]))


def _replicated_state(stateful: Any) -> Any:
    return getattr(stateful, "replicated_state", stateful.state_dict)()


def _combined(digests: Mapping[str, str]) -> str:
    lines = sorted(f"{name}\0{digest}\n" for name, digest in digests.items())
    return xxhash.xxh3_128_hexdigest("".join(lines).encode("utf-8"))


def _refuse(key: str, every: Sequence[Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for each in every for name in each)  # in the order of the state
    for name in names:
        said = [each.get(name, "nothing")[:12] for each in every]
        if len(set(said)) > 1:
            raise RankDisagreementError(
                f"{key}: {name}",
                found=f"replicated, and not alike ({who_said(said)})",
                expected="the same on all ranks",
                remedy="Synchronise it, or declare the component per_rank",
            )
