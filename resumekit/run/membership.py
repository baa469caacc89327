"""Which ranks hold one state of a component together, as all ranks of the job have agreed on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resumekit.distributed import World, ranks_of, who_said
from resumekit.errors import DeclarationError, RankDisagreementError
from resumekit.layout import Groups, Layout, groups_of
from resumekit.state import SharingPattern, StateComponent

_SAID_BY_THE_PATTERN = frozenset(
    {SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.PER_RANK}
)


class Membership:
    """The groups of every component.

    Args:
        rank: the global rank of this process.
        groups: by component key.
    """

    def __init__(self, rank: int, groups: Mapping[str, Groups]) -> None:
        self._rank = rank
        self._groups = groups

    @classmethod
    def agreed(
        cls, world: World, components: Sequence[StateComponent], named: Mapping[str, Any]
    ) -> Membership:
        """What the ranks say together. Collective.

        Args:
            world: the ranks of the job.
            components: of this rank, of the same keys and patterns on all ranks.
            named: process groups by the names that components may call them by.

        Raises:
            DeclarationError: a component's process group is not one, or does not hold this rank.
            RankDisagreementError: the ranks do not form groups; it names who said what.
        """
        own: dict[str, tuple[int, ...]] = {}

        def declare() -> tuple[Layout, dict[str, tuple[int, ...]]]:
            own.update({each.key: _declared(each, named, world) for each in components})
            return world.layout, own

        said = world.everywhere(declare)
        layouts = [layout for layout, _ in said]
        groups: dict[str, Groups] = {}
        for each in components:
            assert isinstance(each.sharing_pattern, SharingPattern)
            declared = [declarations[each.key] for _, declarations in said]
            _require_groups(each.key, declared)
            groups[each.key] = groups_of(each.sharing_pattern, layouts, declared)
        return cls(world.rank, groups)

    def __contains__(self, key: str) -> bool:
        return key in self._groups

    def groups(self, key: str) -> Groups:
        """All groups of a component."""
        return self._groups[key]

    def is_in_stages(self, component: StateComponent | None) -> bool:
        """Whether it is one logical state of which each group holds some entries."""
        if component is None or component.sharing_pattern is not SharingPattern.SHARDED:
            return False
        return component.process_group is not None

    def ordinal(self, key: str) -> int:
        """The number of this rank's group, from 0."""
        return next(n for n, group in enumerate(self._groups[key]) if self._rank in group)

    def writers(self, component: StateComponent) -> tuple[int, ...]:
        """The ranks that write a component."""
        groups = self._groups[component.key]
        if component.sharing_pattern is SharingPattern.SHARDED:
            return tuple(sorted(rank for group in groups for rank in group))
        return tuple(group[0] for group in groups)

    def recorded(self, component: StateComponent) -> Groups:
        """The groups, where the sharing pattern alone does not say them."""
        groups = self._groups[component.key]
        is_said = component.sharing_pattern in _SAID_BY_THE_PATTERN
        is_whole = component.sharing_pattern is SharingPattern.SHARDED and len(groups) == 1
        return () if is_said or is_whole else groups


def _declared(component: StateComponent, named: Mapping[str, Any], world: World) -> tuple[int, ...]:
    """The ranks of the component's process group; none where it has none."""
    group = component.process_group
    if isinstance(group, str):
        if group not in named:
            raise DeclarationError(
                component.key,
                found=f"the process group {group!r}, which nobody declared",
                expected=", ".join(map(repr, sorted(named))) or "groups={name: group}",
            )
        group = named[group]
    if group is None:
        return ()
    ranks = ranks_of(group)
    if ranks is None or world.rank not in ranks or not set(ranks) <= set(world.ranks):
        raise DeclarationError(
            component.key,
            found=f"the process group {group!r}" if ranks is None else f"a group of {ranks}",
            expected=f"a group of ranks with rank {world.rank} among them",
        )
    return tuple(sorted(ranks))


def _require_groups(key: str, declared: Sequence[tuple[int, ...]]) -> None:
    """Every rank's group says the same of itself."""
    if any(declared) and any(declared[member] != group for group in declared for member in group):
        raise RankDisagreementError(
            f"{key}: process_group",
            found=who_said([str(list(group)) for group in declared]),
            expected="groups, each rank in one, of which all members say the same",
            remedy="Give every rank the group that it is in",
        )
