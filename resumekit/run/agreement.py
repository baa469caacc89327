"""What the ranks agree on: process groups, data-parallel ranks, and equal replicated state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from resumekit.distributed import DataRanks, Groups, World, groups_of, ranks_of, who_said
from resumekit.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    DeclarationError,
    RankDisagreementError,
)
from resumekit.serialization.digests import Copy, copy_digests, leaf_digests
from resumekit.serialization.sharding import WHOLE, Box
from resumekit.state import SharingPattern, StateComponent, Validation
from resumekit.storage.manifest import Manifest

_SAID_BY_THE_PATTERN = frozenset(
    {SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.PER_RANK}
)


class ComponentGroups:
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
    ) -> ComponentGroups:
        """What the ranks say together. Collective.

        Args:
            world: the ranks of the job.
            components: of this rank, of the same keys and patterns on all ranks.
            named: process groups by the names that components may call them by.

        Raises:
            DeclarationError: a component's process group is not one, or does not hold this rank.
            RankDisagreementError: the ranks do not form groups; it names who said what.
        """

        def declare() -> tuple[str, dict[str, tuple[int, ...]]]:
            return world.node, {each.key: _declared(each, named, world) for each in components}

        said = world.everywhere(declare)
        nodes = [node for node, _ in said]
        groups: dict[str, Groups] = {}
        for each in components:
            assert isinstance(each.sharing_pattern, SharingPattern)
            declared = [declarations[each.key] for _, declarations in said]
            _require_groups(each.key, declared)
            groups[each.key] = groups_of(each.sharing_pattern, nodes, declared)
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
            expected="groups that all of their ranks declare alike, and each rank in exactly one",
            remedy="Give every rank the group that it is in",
        )


_DETAIL = "shares"


def agreed_data_ranks(world: World, group: Any, named: Mapping[str, Any]) -> DataRanks:
    """The data-parallel rank of each rank. Collective.

    Args:
        world: the ranks of the job.
        group: the ranks that take different data, this one among them; None for all ranks.
        named: process groups by the names that it may be called by.

    Raises:
        ConfigurationError: it is no group, or does not hold this rank.
        RankDisagreementError: the ranks' groups are not of one size.
    """

    def declare() -> tuple[int, int]:
        known = named.get(group) if isinstance(group, str) else group
        ranks = list(world.ranks) if group is None else ranks_of(known)
        if ranks is None or world.rank not in ranks:
            raise ConfigurationError(
                "data_parallel_group",
                found=repr(group),
                expected="a process group, a DeviceMesh, ranks or the name of a declared group, "
                f"with rank {world.rank} in it",
            )
        return ranks.index(world.rank), len(ranks)

    said = world.everywhere(declare)
    data_ranks = DataRanks(tuple(share for share, _ in said))
    if len({size for _, size in said}) > 1 or data_ranks.number != len(set(data_ranks.of_ranks)):
        raise RankDisagreementError(
            "data_parallel_group",
            found=who_said([f"position {rank} in a group of {size}" for rank, size in said]),
            expected="groups of one size, without gaps",
            remedy="Give every rank the group of the ranks that take different data",
        )
    return data_ranks


def described(data_ranks: DataRanks) -> dict[str, Any]:
    """What a manifest records of them; nothing where every rank takes different data."""
    is_usual = data_ranks == DataRanks.one_each(len(data_ranks.of_ranks))
    return {} if is_usual else {_DETAIL: list(data_ranks.of_ranks)}


def recorded_data_ranks(manifest: Manifest) -> DataRanks:
    """The data-parallel ranks of the job that wrote a checkpoint.

    Raises:
        CorruptCheckpointError: they make no sense.
    """
    listed = manifest.details.get(_DETAIL)
    if listed is None:
        return DataRanks.one_each(manifest.world_size)
    is_list = isinstance(listed, list) and all(type(share) is int for share in listed)
    if (
        not is_list
        or len(listed) != manifest.world_size
        or set(listed) != set(range(len(set(listed))))
    ):
        raise CorruptCheckpointError(
            f"step {manifest.step}: details.{_DETAIL}",
            found=f"{str(listed)[:80]}",
            expected="the data-parallel rank of each rank",
        )
    return DataRanks(tuple(listed))


_NO_BOX = Box((), ())  # of a leaf that is no shard
_NOTHING = Copy(WHOLE, _NO_BOX, "nothing")


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
        membership: ComponentGroups,
        level: Validation,
    ) -> None:
        self._world = world
        self._membership = membership
        compared = [
            each
            for each in components
            if each.sharing_pattern not in (SharingPattern.GLOBAL, SharingPattern.PER_RANK)
            and Validation.OFF not in (each.validate, level)
        ]
        self._at_save = compared if world.world_size > 1 else []
        self._after_resume = [
            each for each in self._at_save if Validation.FULL in (each.validate, level)
        ]

    def check_before_save(self) -> None:
        """Raises RankDisagreementError unless every rank holds the same state. Collective.

        Raises:
            RankDisagreementError: on every rank; it names the component, the first tensor that
                differs, and the ranks.
            UnsupportedValueError: a value cannot be stored; names the value.
        """
        self._check(self._at_save)

    def check_after_resume(self) -> None:
        """The same for the components that are to be compared after a resume as well."""
        self._check(self._after_resume)

    def _check(self, components: Sequence[StateComponent]) -> None:
        if not components:
            return
        common: dict[str, dict[str, Copy]] = {}

        def digest() -> dict[str, dict[str, str]]:
            common.update({each.key: self._copies(each) for each in components})
            return {key: _by_holders(copies) for key, copies in common.items()}

        every = self._world.everywhere(digest)
        for each in components:
            groups = self._membership.groups(each.key)
            if any(_is_in_doubt([every[rank][each.key] for rank in group]) for group in groups):
                copies = self._world.gather(common[each.key])
                for group in groups:
                    self._refuse(each, {rank: copies[rank] for rank in group})

    def _copies(self, component: StateComponent) -> dict[str, Copy]:
        """What other ranks hold as well: of replicated state every leaf."""
        state = component.state
        if component.sharing_pattern is not SharingPattern.SHARDED:
            digests = leaf_digests(state.replicated_state())
            return {name: Copy(WHOLE, _NO_BOX, digest) for name, digest in digests.items()}
        group = self._membership.groups(component.key)[self._membership.ordinal(component.key)]
        own_tensors = state.first_rank_only()
        return copy_digests(state.replicated_state(), num_ranks=len(group), excluded=own_tensors)

    def _refuse(self, component: StateComponent, every: Mapping[int, Mapping[str, Copy]]) -> None:
        """Raises RankDisagreementError for the first part whose copies are not alike."""
        is_sharded = component.sharing_pattern is SharingPattern.SHARDED
        of_group = " of a group" if len(every) < self._world.world_size else ""
        for name in dict.fromkeys(name for each in every.values() for name in each):
            holders: dict[tuple[str, Box], dict[int, str]] = {}
            for rank, copies in every.items():
                copy = copies.get(name, None if is_sharded else _NOTHING)
                if copy is not None:
                    holders.setdefault((copy.group, copy.box), {})[rank] = copy.digest[:12]
            for (group, box), said in holders.items():
                if len(set(said.values())) == 1:
                    continue
                part = f"{component.key}: {name}"
                key, remedy = component.key, "declare the component per_rank"
                is_whole = group == WHOLE and component.process_group is None
                if is_sharded and not is_whole:
                    remedy = "pass validate='off' to save one of them"
                elif is_sharded or component.sharing_pattern is SharingPattern.REPLICATED:
                    remedy = f'pass per_rank={{"{key}"}} (resumekit run: --per-rank {key})'
                if is_sharded:
                    raise RankDisagreementError(
                        part if group == WHOLE else f"{part} {box}",
                        found=f"copies that differ ({who_said(said)})",
                        expected="the same on all ranks that hold it",
                        remedy=f"Synchronise it, or {remedy}",
                    )
                raise RankDisagreementError(
                    part,
                    found=f"replicated, but ranks differ ({who_said(said)})",
                    expected=f"the same on all ranks{of_group}",
                    remedy=f"Synchronise it, or {remedy}",
                )


def _by_holders(copies: Mapping[str, Copy]) -> dict[str, str]:
    """One digest for all copies that the same ranks hold."""
    copies_of_rank: dict[str, dict[str, str]] = {WHOLE: {}}
    for name, copy in copies.items():
        copies_of_rank.setdefault(copy.group, {})[name] = f"{copy.box} {copy.digest}"
    return {group: _combined(digests) for group, digests in copies_of_rank.items()}


def _is_in_doubt(every: Sequence[Mapping[str, str]]) -> bool:
    """Whether ranks that hold the same parts may hold other values.

    Ranks that hold parts of other tensors look like it; each copy is compared then.
    """
    said: dict[str, set[str]] = {}
    for copies_of_rank in every:
        for group, digest in copies_of_rank.items():
            said.setdefault(group, set()).add(digest)
    return any(len(digests) > 1 for digests in said.values())


def _combined(digests: Mapping[str, str]) -> str:
    lines = sorted(f"{name}\0{digest}\n" for name, digest in digests.items())
    return xxhash.xxh3_128_hexdigest("".join(lines).encode("utf-8"))
