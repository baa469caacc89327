"""An epoch whose order another sampler drew than the one that the loader has now.

Each framework shuffles in its own way. The order of the epoch under way has a name, so it is drawn
again by whoever comes, and goes on; the next epoch is that of the loader's own sampler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resumekit.data.generators import DATASET_PREFIXES
from resumekit.data.orders import DRAWN, IN_ORDER, KEYED, NAMED, SEEDED, SEEDED_BY_EPOCH
from resumekit.errors import DataPositionError

# Marks a place inside an epoch that was begun under another framework.
CROSSED = "crossed"

# How one and the same loader is shuffled by frameworks that prepare it.
_SHUFFLES = {DRAWN, SEEDED_BY_EPOCH}

_WHO = {
    IN_ORDER: "a sampler that does not shuffle",
    SEEDED: "a DistributedSampler",
    SEEDED_BY_EPOCH: "Accelerate's SeedableRandomSampler",
    DRAWN: "a RandomSampler",
    KEYED: "a resumable sampler",
}


def is_reshared(state: Mapping[str, Any]) -> bool:
    """Whether the rest of the epoch is not the one that the loader's own sampler gives."""
    return bool(state.get("reshared")) or state["used"]["since"] > 0


def inherits_order(state: Mapping[str, Any], live_name: Mapping[str, Any], where: str) -> bool:
    """Whether the epoch goes on in an order that the loader's sampler draws in no epoch.

    Another seed of the same sampler is no such thing: that is a setting which was changed. So is
    another sampler under one framework, but for those by which frameworks shuffle.

    Args:
        state: the place that the checkpoint holds.
        live_name: the name of the order that the loader's own sampler gives.
        where: the loader's name, for errors.

    Raises:
        DataPositionError: under another framework the loader has another sampler, and the order of
            one of the two has no name.
    """
    if not state["batch"]:
        return False
    name, has_crossed = state["order_name"], CROSSED in state
    kinds = {name["kind"], live_name["kind"]}
    if is_reshared(state) and kinds <= NAMED:
        return has_crossed
    if len(kinds) == 1:
        return has_crossed and name.get("generator") != live_name.get("generator")
    if kinds <= NAMED and (has_crossed or kinds == _SHUFFLES):
        return bool(name["length"] == live_name["length"])
    if has_crossed:
        raise DataPositionError(
            where,
            found=f"the order of {_who(live_name)} in this run",
            expected=f"that of {_who(name)}, as in the checkpoint",
            remedy="Give the loader the same sampler under both frameworks until the epoch is over",
        )
    return False


def of_the_order(state: Mapping[str, Any], geometry: Mapping[str, Any]) -> frozenset[str]:
    """What of a loader's geometry goes with its sampler, and may be another one."""
    free = {"samples_per_rank", "num_batches"}
    if _of_samples(state["geometry"]["generators"]) == _of_samples(geometry["generators"]):
        free.add("generators")
    return frozenset(free)


def _of_samples(generators: Sequence[str]) -> list[str]:
    return [name for name in generators if name.startswith(DATASET_PREFIXES)]


def inherited_order(state: Mapping[str, Any], live_name: Mapping[str, Any], where: str) -> str:
    """What to tell about it."""
    drawn_by, now = _who(state["order_name"]), _who(live_name)
    later = "" if drawn_by == now else f"; the next one is that of {now}"
    return (
        f"{where}: epoch {state['epoch']} goes on at sample {state['samples']} in the order that "
        f"{drawn_by} drew{later}"
    )


def _who(name: Mapping[str, Any]) -> str:
    sampler = name.get("sampler") or "a batch sampler of one's own"
    return _WHO.get(name["kind"], sampler)
