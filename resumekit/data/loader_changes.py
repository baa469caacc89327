"""Changes of a loader since the checkpoint: its settings, its sampler, its framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch

from resumekit.capture import RngState
from resumekit.data.epoch_order import (
    DRAWN,
    IN_ORDER,
    KEYED,
    NAMED,
    SEEDED,
    SEEDED_BY_EPOCH,
)
from resumekit.data.loader_introspection import (
    DATASET_PREFIXES,
    initial_seed,
    private_generators,
    samplers_of,
)
from resumekit.errors import DataPositionError

# A position that came from a job with another number of ranks carries both numbers under this key.
RANKS = "ranks"
# What of a loader's geometry is the user's setting, and how users call it. A changed batch size or
# number of ranks is reported elsewhere, since a run may be allowed to follow it inside an epoch.
_SETTINGS = {"num_samples": "dataset length", "drop_last": "drop_last"}


def sampler_setting(order_name: Mapping[str, Any]) -> dict[str, Any]:
    """What names a sampler's orders in all epochs: its kind, and its seed where it has one."""
    return {key: value for key, value in order_name.items() if key in ("kind", "seed", "sampler")}


def followed_changes(
    state: Mapping[str, Any], geometry: Mapping[str, Any], sampler: Mapping[str, Any], where: str
) -> Iterator[str]:
    """A line for each setting of the script that differs and is used from the next epoch on.

    Args:
        state: the saved position, between two epochs.
        geometry: that of this loader.
        sampler: its ``sampler_setting``.
        where: the loader's name.
    """
    then = state["geometry"]
    for key, noun in _SETTINGS.items():
        if key in then and then[key] != geometry.get(key):
            yield _line(where, noun, then[key], geometry.get(key), state["epoch"])
    before = state["sampler"]
    if before == sampler:
        return
    if before["kind"] == sampler["kind"] and before.get("seed") != sampler.get("seed"):
        yield _line(where, "seed", before.get("seed"), sampler.get("seed"), state["epoch"])
    else:
        yield _line(where, "order", _order(before), _order(sampler), state["epoch"])


def unused_seeds(
    saved: Mapping[str, Any], loader: Any, live: Mapping[str, Any], where: str, *, epoch: int
) -> Iterator[str]:
    """A line for each torch generator whose seed differs; its restored state is used.

    Args:
        saved: the states of the loader's generators in the checkpoint, by name.
        loader: the loader.
        live: the generators, before they are restored.
        where: the loader's name.
        epoch: the last one that was begun.
    """
    # sentence-transformers 5 sampler.py SetEpochMixin: the seed of an epoch is seed + epoch.
    by_epoch = {
        id(each)
        for _, sampler in samplers_of(loader)
        if callable(getattr(sampler, "set_epoch", None))
        for each in private_generators(sampler).values()
    }
    for name, generator in live.items():
        state = saved.get(name)
        if isinstance(generator, torch.Generator) and isinstance(state, torch.Tensor):
            then, now = initial_seed(state, generator), generator.initial_seed()
            if then != now and not (id(generator) in by_epoch and then - now == epoch):
                yield (
                    f"{where}: seed of {name}: the script says {now}, the checkpoint's {then} is "
                    "used; exclude={'data'} starts the data again with the script's"
                )


def _line(where: str, noun: str, then: Any, now: Any, epoch: int) -> str:
    return (
        f"{where}: {noun} was {then}, the script's {now} is used from epoch {epoch} on; "
        "restore it if that was a mistake"
    )


def _order(sampler: Mapping[str, Any]) -> str:
    kind, seed = sampler["kind"], sampler.get("seed")
    if kind == IN_ORDER:
        return "shuffle=False"
    if kind in NAMED:
        return "shuffle=True" + (f" with seed {seed}" if seed is not None else "")
    return f"that of a {sampler.get('sampler') or 'batch sampler'}"


# Marks a position inside an epoch that was begun under another framework.
FRAMEWORK_CHANGED = "crossed"
# How one and the same loader is shuffled by frameworks that prepare it.
_SHUFFLES = {DRAWN, SEEDED_BY_EPOCH}
_SAMPLERS = {
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
    """Whether the epoch continues in an order that the loader's sampler draws in no epoch.

    Another seed of the same sampler is no such thing: that is a setting which was changed. So is
    another sampler under one framework, but for those by which frameworks shuffle.

    Args:
        state: the saved position.
        live_name: the name of the order that the loader's own sampler gives.
        where: the loader's name, for errors.

    Raises:
        DataPositionError: under another framework the loader has another sampler, and the order of
            one of the two has no name.
    """
    if not state["batch"]:
        return False
    name, framework_changed = state["order_name"], FRAMEWORK_CHANGED in state
    kinds = {name["kind"], live_name["kind"]}
    if is_reshared(state) and kinds <= NAMED:
        return framework_changed
    if len(kinds) == 1:
        return framework_changed and name.get("generator") != live_name.get("generator")
    if kinds <= NAMED and (framework_changed or kinds == _SHUFFLES):
        return bool(name["length"] == live_name["length"])
    if framework_changed:
        raise DataPositionError(
            where,
            found=f"the order of {_sampler_noun(live_name)} in this run",
            expected=f"that of {_sampler_noun(name)}, as in the checkpoint",
            remedy="Give the loader the same sampler under both frameworks until the epoch is over",
        )
    return False


def free_geometry(state: Mapping[str, Any], geometry: Mapping[str, Any]) -> frozenset[str]:
    """What of a loader's geometry goes with its sampler, and may be another one."""
    free = {"samples_per_rank", "num_batches"}
    if _sample_generators(state["geometry"]["generators"]) == _sample_generators(
        geometry["generators"]
    ):
        free.add("generators")
    return frozenset(free)


def _sample_generators(generators: Sequence[str]) -> list[str]:
    return [name for name in generators if name.startswith(DATASET_PREFIXES)]


def inherited_order_message(
    state: Mapping[str, Any], live_name: Mapping[str, Any], where: str
) -> str:
    """The message that the epoch continues in an order of another sampler."""
    drawn_by, now = _sampler_noun(state["order_name"]), _sampler_noun(live_name)
    later = "" if drawn_by == now else f"; the next one is that of {now}"
    return (
        f"{where}: epoch {state['epoch']} continues at sample {state['samples']} in the order that "
        f"{drawn_by} drew{later}"
    )


def _sampler_noun(name: Mapping[str, Any]) -> str:
    sampler = name.get("sampler") or "a custom batch sampler"
    return _SAMPLERS.get(name["kind"], sampler)


WRAPPED = "wrapped"
_KINDS = {
    "map": "a DataLoader that the loop draws from by itself",
    "keyed": "a DataLoader with randomness='keyed' that the loop draws from by itself",
    WRAPPED: "a loader that Accelerate or the Trainer has prepared",
    "ahead": "a loader without a length under Lightning",
    "stateful": "a loader with a state of its own",
    "replay": "an iterable that is replayed",
}


# What a loader and the one around it have in common.
_SHARED = ("epoch", "batch", "endless", "rebuilt", "made_anew", RANKS)


def unwrapped_position(state: Mapping[str, Any], kind: str, *, where: str) -> dict[str, Any]:
    """The position of a loader that a framework had prepared, for the loader without the framework.

    Args:
        state: the saved position.
        kind: of the source that is to take it.
        where: the loader's name, for errors.

    Raises:
        DataPositionError: it is no position of such a loader.
    """
    inner = state.get("inner")
    if state["kind"] != WRAPPED or inner is None or inner["kind"] != kind:
        refuse_kind(state, kind, where=where)
    shared = {key: state[key] for key in _SHARED if key in state}
    return {
        **inner,
        **shared,
        "ahead": _without_generators(state["ahead"]),
        FRAMEWORK_CHANGED: True,
    }


def wrapped_position(
    state: Mapping[str, Any],
    kind: str,
    geometry: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    where: str,
) -> dict[str, Any]:
    """The position of a plain loader, as that of the same loader inside a framework's loader.

    Args:
        state: the saved position.
        kind: of the source of the loader inside.
        geometry: of the loader around it.
        names: what the loader around it calls the generators of the one inside.
        where: the loader's name, for errors.

    Raises:
        DataPositionError: it is no position of such a loader.
    """
    if state["kind"] != kind:
        refuse_kind(state, WRAPPED, where=where)
    generators = state["generators"]
    return {
        **{key: state[key] for key in _SHARED if key in state},
        "kind": WRAPPED,
        "geometry": dict(geometry),
        "generators": {names[name]: each for name, each in generators.items() if name in names},
        "inner": {**state, FRAMEWORK_CHANGED: True},
        "ahead": [],
    }


def refuse_kind(state: Mapping[str, Any], kind: str, *, where: str) -> NoReturn:
    """A position inside an epoch is not one that a source of this kind can find."""
    raise DataPositionError(
        where,
        found=_KINDS.get(kind, f"a {kind} loader"),
        expected=f"what epoch {state['epoch']} was begun with, {_described(state)}",
        remedy="Finish the epoch with it; between two epochs any loader may replace it",
    )


def _described(state: Mapping[str, Any]) -> str:
    kind = _KINDS.get(state["kind"], f"a {state['kind']} loader")
    inside = state.get("inner", {}).get("kind")
    return f"{kind}, with randomness='keyed'" if inside == "keyed" else kind


def _without_generators(states: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    # Private generators are those of the position itself, and move when the batch is fetched again.
    return [{**state, "generators": {}} for state in states if state is not None]


def refetched(states: Sequence[Mapping[str, Any]], batches: Iterator[Any]) -> Iterator[Any]:
    """All batches. The first ones, which a framework had prefetched, use these RNG states again."""
    rng = RngState()
    for state in states:
        current = rng.state_dict()
        rng.load_state_dict(state)
        fetched = list(islice(batches, 1))
        rng.load_state_dict(current)
        yield from fetched
    yield from batches
