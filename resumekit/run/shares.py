"""Which ranks take the same data, as the ranks agree on it and as a manifest tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.distributed import World, ranks_of, who_said
from resumekit.errors import ConfigurationError, CorruptCheckpointError, RankDisagreementError
from resumekit.layout import Shares
from resumekit.storage import Manifest

_DETAIL = "shares"


def agreed_shares(world: World, group: Any, named: Mapping[str, Any]) -> Shares:
    """The shares of the data that the ranks say they take. Collective.

    Args:
        world: the ranks of the job.
        group: the ranks that take different data, this one among them; None for all ranks.
        named: process groups by the names that it may be called by.

    Raises:
        ConfigurationError: it is no group, or does not hold this rank.
        RankDisagreementError: the ranks' groups are not of one size.
    """

    def own() -> tuple[int, int]:
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

    said = world.everywhere(own)
    shares = Shares(tuple(share for share, _ in said))
    if len({size for _, size in said}) > 1 or shares.number != len(set(shares.of_ranks)):
        raise RankDisagreementError(
            "data_parallel_group",
            found=who_said([f"share {share} of {size}" for share, size in said]),
            expected="groups of one size",
            remedy="Give every rank the group of the ranks that take other data than it",
        )
    return shares


def described(shares: Shares) -> dict[str, Any]:
    """What a manifest's details tell of them; nothing where every rank takes data of its own."""
    is_usual = shares == Shares.one_each(len(shares.of_ranks))
    return {} if is_usual else {_DETAIL: list(shares.of_ranks)}


def recorded_shares(manifest: Manifest) -> Shares:
    """The shares of the ranks that wrote a checkpoint.

    Raises:
        CorruptCheckpointError: they make no sense.
    """
    listed = manifest.details.get(_DETAIL)
    if listed is None:
        return Shares.one_each(manifest.world_size)
    is_list = isinstance(listed, list) and all(type(share) is int for share in listed)
    if (
        not is_list
        or len(listed) != manifest.world_size
        or set(listed) != set(range(len(set(listed))))
    ):
        raise CorruptCheckpointError(
            f"step {manifest.step}: details.{_DETAIL}",
            found=f"{str(listed)[:80]}",
            expected="the share of each rank",
        )
    return Shares(tuple(listed))
