"""An epoch that goes on under another framework than the one that began it.

Frameworks fetch from a DataLoader at other moments, and some put a sampler of their own into it.
The place of the DataLoader is the same in each: what a framework has fetched ahead is left out, and
fetched again. The order of the epoch under way stays that of the sampler that drew it; the next
epoch is that of the sampler that is there now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from resumekit.capture import RngState
from resumekit.data.elastic import RANKS
from resumekit.data.inheritance import CROSSED
from resumekit.errors import DataPositionError

WRAPPED = "wrapped"

_KINDS = {
    "map": "a DataLoader that the loop draws from by itself",
    "keyed": "a DataLoader with randomness='keyed' that the loop draws from by itself",
    WRAPPED: "a loader that Accelerate or the Trainer has prepared",
    "ahead": "a loader without a length under Lightning",
    "stateful": "a loader with a state of its own",
    "replay": "an iterable that is drawn through again",
}

# What a loader and the one around it have in common.
_SHARED = ("epoch", "batch", "endless", "rebuilt", "made_anew", RANKS)


def out_of(state: Mapping[str, Any], kind: str, *, where: str) -> dict[str, Any]:
    """The place of a loader that a framework had prepared, for the loader without the framework.

    Args:
        state: the place that the checkpoint holds.
        kind: of the source that is to take it.
        where: the loader's name, for errors.

    Raises:
        DataPositionError: it is no place of such a loader.
    """
    inner = state.get("inner")
    if state["kind"] != WRAPPED or inner is None or inner["kind"] != kind:
        refuse(state, kind, where=where)
    shared = {key: state[key] for key in _SHARED if key in state}
    return {**inner, **shared, "ahead": _without_private(state["ahead"]), CROSSED: True}


def into(
    state: Mapping[str, Any],
    kind: str,
    geometry: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    where: str,
) -> dict[str, Any]:
    """The place of a loader, for the same one when a framework has prepared it; nothing is ahead.

    Args:
        state: the place that the checkpoint holds.
        kind: of the source of the loader inside.
        geometry: of the loader around it.
        names: what the loader around it calls the generators of the one inside.
        where: the loader's name, for errors.

    Raises:
        DataPositionError: it is no place of such a loader.
    """
    if state["kind"] != kind:
        refuse(state, WRAPPED, where=where)
    generators = state["generators"]
    return {
        **{key: state[key] for key in _SHARED if key in state},
        "kind": WRAPPED,
        "geometry": dict(geometry),
        "generators": {names[name]: each for name, each in generators.items() if name in names},
        "inner": {**state, CROSSED: True},
        "ahead": [],
    }


def refuse(state: Mapping[str, Any], kind: str, *, where: str) -> NoReturn:
    """A place inside an epoch is not one that a source of this kind can find."""
    raise DataPositionError(
        where,
        found=_KINDS.get(kind, f"a {kind} loader"),
        expected=f"what epoch {state['epoch']} was begun with, {_described(state)}",
        remedy="Finish the epoch with that; at the start of one any loader takes over",
    )


def _described(state: Mapping[str, Any]) -> str:
    kind = _KINDS.get(state["kind"], f"a {state['kind']} loader")
    inside = state.get("inner", {}).get("kind")
    return f"{kind}, with randomness='keyed'" if inside == "keyed" else kind


def _without_private(states: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    # Private generators are those of the place itself, and move when the batch is fetched again.
    return [{**state, "generators": {}} for state in states if state is not None]


def fetched_from(states: Sequence[Mapping[str, Any]], batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; the first ones each from one of these random states, which is then put back.

    These are the batches that a framework had fetched ahead.
    """
    rng = RngState()
    for state in states:
        settled = rng.state_dict()
        rng.load_state_dict(state)
        fetched = list(islice(batches, 1))
        rng.load_state_dict(settled)
        yield from fetched
    yield from batches
