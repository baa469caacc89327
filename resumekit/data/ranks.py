"""The places that the ranks of a job saved, taken up by a job with another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.capture import states_of_new_rank
from resumekit.data.elastic import RANKS
from resumekit.errors import DataPositionError
from resumekit.layout import WorldChange


def resplit_places(
    states: Mapping[int, Mapping[str, Any]], change: WorldChange
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """This rank's place in every loader, marked with both numbers of ranks, and no remarks.

    The place itself is the same on all ranks, because it is that of the whole job; what follows
    from it for a loader shows when the loader is opened. A rank that existed keeps the random
    states of its own workers and generators.

    Args:
        states: the places of some former ranks, rank 0 among them.
        change: the numbers of ranks.

    Raises:
        DataPositionError: the former ranks were not at one place.
    """
    for rank, state in states.items():
        _require_one_place(states[0], state, rank)
    own = states[change.model_rank]
    others = {rank: state for rank, state in states.items() if rank != change.model_rank}
    mark = {RANKS: [change.former_world_size, change.world_size]}
    places = {}
    for name, place in own.items():
        counterparts = {change.model_rank: place, **{rank: s[name] for rank, s in others.items()}}
        if change.is_new:
            place = _of_new_rank(place, counterparts, change.rank)
        if RANKS in place:  # from an earlier change that this loader has not followed yet
            mark = {RANKS: [place[RANKS][0], change.world_size]}
        places[name] = {**place, **mark}
    return places, ()


def _require_one_place(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    for name in sorted({*first, *other}):
        places = [_place(state.get(name)) for state in (first, other)]
        if places[0] != places[1]:
            raise DataPositionError(
                name,
                found=f"rank 0 was at {places[0]}, rank {rank} at {places[1]}",
                expected="all ranks at one place, to share out the rest",
                remedy="Continue with as many ranks as in the checkpoint",
            )


def _place(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "no place"
    place = f"batch {state['batch']} of epoch {state['epoch']}"
    return f"{place}, sample {state['samples']}" if "samples" in state else place


def _of_new_rank(
    place: Mapping[str, Any], counterparts: Mapping[int, Mapping[str, Any]], rank: int
) -> dict[str, Any]:
    """A place with random states that no other rank has."""
    found = dict(place)
    if place.get("generators"):
        found["generators"], _ = _renewed(counterparts, "generators", rank)
    if "workers" in place:
        found["workers"] = {}
    if place.get("before"):
        before = {each: state["before"] for each, state in counterparts.items()}
        generators, _ = _renewed(before, "generators", rank)
        common = {
            each: {k: v for k, v in state.items() if k not in ("generators", "cuda")}
            for each, state in before.items()
        }
        renewed, _ = states_of_new_rank(common, rank)
        found["before"] = {**place["before"], **renewed, "generators": generators}
    if "inner" in place:
        inner = {each: state["inner"] for each, state in counterparts.items()}
        found["inner"] = _of_new_rank(place["inner"], inner, rank)
    return found


def _renewed(
    states: Mapping[int, Mapping[str, Any]], key: str, rank: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    return states_of_new_rank({each: state[key] for each, state in states.items()}, rank)
