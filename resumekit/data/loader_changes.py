"""Changes of a loader since the checkpoint, and its position in the changed geometry.

The settings of the script, the sampler, the framework, the batch size and the number of ranks may
differ. The ranks take turns over one order, so what they used together is its beginning, up to the
saved position. A process that can redraw the order shards the rest of it among any number of ranks,
in batches of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from resumekit.capture.rng import states_of_new_rank
from resumekit.data.epoch_order import (
    DRAWN,
    IN_ORDER,
    KEYED,
    NAMED,
    SEEDED,
    SEEDED_BY_EPOCH,
    Batching,
    sampler_setting,
)
from resumekit.data.loader_traits import (
    DATASET_PREFIXES,
    WRAPPED,
    LoaderTraits,
    initial_seed,
    private_generators,
)
from resumekit.data.seeking import is_reshared, used_here
from resumekit.errors import DataPositionError
from resumekit.state import WorldChange

# A position that came from a job with another number of ranks carries both numbers under this key.
RANKS = "ranks"
# What of a loader's geometry is the user's setting, and how users call it. A changed batch size or
# number of ranks is reported elsewhere, since a run may be allowed to follow it inside an epoch.
_SETTINGS = {"num_samples": "dataset length", "drop_last": "drop_last"}


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
    saved: Mapping[str, Any],
    traits: LoaderTraits,
    live: Mapping[str, Any],
    where: str,
    *,
    epoch: int,
) -> Iterator[str]:
    """A line for each torch generator whose seed differs; its restored state is used.

    Args:
        saved: the states of the loader's generators in the checkpoint, by name.
        traits: of the loader.
        live: the generators, before they are restored.
        where: the loader's name.
        epoch: the last one that was begun.
    """
    # sentence-transformers 5 sampler.py SetEpochMixin: the seed of an epoch is seed + epoch.
    by_epoch = {
        id(each)
        for sampler in traits.samplers.values()
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


# A position that another program has counted: the epoch and the batch are all that is known.
COUNTED = "counted"
_KINDS = {
    COUNTED: "a DataLoader or an iterable",
    "map": "a DataLoader that the loop draws from by itself",
    "keyed": "a DataLoader with randomness='keyed' that the loop draws from by itself",
    WRAPPED: "a loader that Accelerate or the Trainer has prepared",
    "ahead": "a loader without a length under Lightning",
    "stateful": "a loader with a state of its own",
    "replay": "an iterable that is replayed",
}


# What a loader and the one around it have in common.
SHARED = ("epoch", "batch", "endless", "rebuilt", "made_anew", RANKS)


def refuse_kind(state: Mapping[str, Any], kind: str, *, where: str) -> NoReturn:
    """A position inside an epoch is not one that a source of this kind can find."""
    raise DataPositionError(
        where,
        found=_KINDS.get(kind, f"a {kind} loader"),
        expected=f"what epoch {state['epoch']} was begun with, {_described(state)}",
        remedy="Finish the epoch with it; between two epochs any loader may replace it",
    )


def require_same_ranks(state: Mapping[str, Any], *, where: str) -> None:
    """Raises DataPositionError where another program has counted a position on other ranks."""
    if RANKS in state:
        raise DataPositionError(
            where,
            found=f"{state[RANKS][1]} ranks inside epoch {state['epoch']}",
            expected=f"{state[RANKS][0]} until it is over, as in the checkpoint that was imported",
            remedy="Restore the former settings until the epoch is over",
        )


def _described(state: Mapping[str, Any]) -> str:
    kind = _KINDS.get(state["kind"], f"a {state['kind']} loader")
    inside = state.get("inner", {}).get("kind")
    return f"{kind}, with randomness='keyed'" if inside == "keyed" else kind


# ---------------------------------------------------------------- batch size and number of ranks

BATCH_SIZE, WORLD_SIZE = "batch_size", "world_size"
_NOUNS = {BATCH_SIZE: "batch_size", WORLD_SIZE: "number of ranks"}
# What may differ in a loader's geometry when that change is allowed.
_FOLLOWS = {
    BATCH_SIZE: frozenset({"batch_size", "num_batches"}),
    WORLD_SIZE: frozenset({"num_replicas", "samples_per_rank", "num_batches", "generators"}),
}


@dataclass(frozen=True)
class FittedPosition:
    """A loader's position as this run's loader can take it up.

    Args:
        state: the position, in this loader's geometry.
        changes: the names of what changed.
        words: the same in words.
        unexpected: a line on each other setting that the script has changed between two epochs.
        num_batches: the batches of the current epoch, None where they are as many as ever.
        free: what of the geometry may be another one, because the sampler is another one.
    """

    state: dict[str, Any]
    changes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    num_batches: int | None = None
    free: frozenset[str] = frozenset()


def needed_changes(state: Mapping[str, Any], geometry: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the changes between a checkpoint's loader and this one."""
    then = state["geometry"]
    needed = [BATCH_SIZE] if then.get("batch_size") != geometry.get("batch_size") else []
    replicas = then.get("num_replicas") != geometry.get("num_replicas")
    return (*needed, WORLD_SIZE) if replicas or RANKS in state else tuple(needed)


def require_allowed(
    state: Mapping[str, Any],
    geometry: Mapping[str, Any],
    *,
    needed: Sequence[str],
    allowed: frozenset[str],
    free: frozenset[str] = frozenset(),
    where: str,
) -> None:
    """Raises DataPositionError when a loader's geometry changed in a way that is not allowed.

    Args:
        state: the saved position.
        geometry: of this loader.
        needed: the changes that this kind of loader can follow.
        allowed: the changes that the user allows.
        free: keys of the geometry that may change anyway.
        where: the loader's name.
    """
    then = state["geometry"]
    follows = free.union(*(_FOLLOWS[change] for change in needed))
    changed = [key for key in then if then[key] != geometry.get(key)]
    fixed = [key for key in changed if key not in follows]
    missing = [change for change in needed if change not in allowed]
    if not state["batch"]:  # between two epochs a loader may be another one
        fixed, missing = [], [change for change in missing if change == WORLD_SIZE]
    if not fixed and not missing:
        return
    pairs = {key: (then[key], geometry.get(key)) for key in fixed}
    if not fixed:
        pairs = {_NOUNS[change]: _values(change, state, geometry) for change in missing}
    option = f", or pass allow_changes={{{', '.join(map(repr, missing))}}}"
    raise DataPositionError(
        where,
        found="; ".join(f"{key} {now!r}" for key, (_, now) in pairs.items()),
        expected="; ".join(f"{key} {before!r}" for key, (before, _) in pairs.items()),
        remedy="Restore the former settings of this loader" + ("" if fixed else option),
    )


def fit_position(
    state: Mapping[str, Any],
    geometry: Mapping[str, Any],
    batching: Batching,
    *,
    live_name: Mapping[str, Any],
    allowed: frozenset[str],
    where: str,
) -> FittedPosition:
    """A map-style loader's position, expressed in this run's geometry.

    Args:
        state: the saved position.
        geometry: of this loader.
        batching: how this loader divides its order.
        live_name: the name of the order that its own sampler gives.
        allowed: the changes that the user allows.
        where: the loader's name.

    Raises:
        DataPositionError: a change is not allowed, or cannot be followed.
    """
    needed = needed_changes(state, geometry)
    inherits = inherits_order(state, live_name, where)
    free = free_geometry(state, geometry) if inherits else frozenset[str]()
    require_allowed(state, geometry, needed=needed, allowed=allowed, free=free, where=where)
    moved = _moved(state, geometry) if needed or inherits else dict(state)
    position = f"from sample {state['samples']} of epoch {state['epoch']} on"
    words = []
    for change in needed:
        before, now = _values(change, state, geometry)
        words.append(f"{where}: {_NOUNS[change]} was {before}, this run's {now} is used {position}")
    if inherits:
        words.append(inherited_order_message(state, live_name, where))
        moved["reshared"] = True
    if not state["batch"]:
        setting = sampler_setting(live_name)
        unexpected = tuple(followed_changes(state, geometry, setting, where))
        return FittedPosition(moved, needed, tuple(words), unexpected)
    if needed or inherits:
        _require_redrawable(state, batching, live_name, needed, where)
    if WORLD_SIZE in needed or (batching.by_batches and (needed or inherits)):
        moved["reshared"] = True
    if needed:
        per_step = batching.batch_size * batching.num_replicas
        moved["batch"] = max(1, state["samples"] // per_step)  # 0 would be the epoch's start
    num_batches = _num_batches(moved, batching)
    return FittedPosition(moved, needed, tuple(words), num_batches=num_batches, free=free)


def _require_redrawable(
    state: Mapping[str, Any],
    batching: Batching,
    live_name: Mapping[str, Any],
    needed: Sequence[str],
    where: str,
) -> None:
    """Raises unless the rest of the epoch can be taken out of its order, and divided again."""
    if batching.sampler is None:
        hidden = f"the batch sampler {batching.hidden_in}"
        _refuse(where, hidden, "torch's own BatchSampler", needed, state)
    if state["draws"]:
        lazy = f"a {type(batching.sampler).__name__} that draws as it goes"
        _refuse(where, lazy, "an order that is drawn when the epoch begins", needed, state)
    if WORLD_SIZE in needed or batching.by_batches:
        _require_shared(state, batching, live_name, needed, where)


def fit_around_inner(
    state: Mapping[str, Any], geometry: Mapping[str, Any], inner: FittedPosition, *, where: str
) -> dict[str, Any]:
    """The position of an outer loader whose inner one has followed a change.

    Raises:
        DataPositionError: something else changed.
    """
    needed = inner.changes
    require_allowed(
        state, geometry, needed=needed, allowed=frozenset(needed), free=inner.free, where=where
    )
    if needed or inner.free:
        return _moved(state, geometry)
    return {key: value for key, value in state.items() if key != RANKS}


def fit_at_epoch_start(
    state: Mapping[str, Any],
    geometry: Mapping[str, Any],
    *,
    allowed: frozenset[str],
    where: str,
) -> FittedPosition:
    """The position of a loader whose order cannot be redrawn: it may change between epochs only.

    Raises:
        DataPositionError: a change is not allowed, or is inside an epoch.
    """
    needed = (WORLD_SIZE,) if RANKS in state else ()
    require_allowed(state, geometry, needed=needed, allowed=allowed, where=where)
    if needed and state["batch"] > 0:
        ranks = f"{state[RANKS][0]} ranks that each went through a loader of their own"
        _refuse(where, ranks, "the end of an epoch", needed, state)
    return FittedPosition(_moved(state, geometry) if needed else dict(state))


def _values(change: str, state: Mapping[str, Any], geometry: Mapping[str, Any]) -> tuple[Any, Any]:
    """The value in the checkpoint and the one here."""
    if change == WORLD_SIZE and RANKS in state:
        return state[RANKS][0], state[RANKS][1]
    key = "num_replicas" if change == WORLD_SIZE else change
    return state["geometry"].get(key), geometry.get(key)


def _refuse(
    where: str, found: str, expected: str, needed: Sequence[str], state: Mapping[str, Any]
) -> NoReturn:
    """Raises for a change that cannot be followed inside an epoch."""
    changed = " and ".join(_NOUNS[change] for change in needed) or "sampler"
    raise DataPositionError(
        where,
        found=found,
        expected=f"{expected}, because the {changed} changed inside epoch {state['epoch']}",
        remedy="Restore the former settings until the epoch is over",
    )


def _require_shared(
    state: Mapping[str, Any],
    batching: Batching,
    live_name: Mapping[str, Any],
    needed: Sequence[str],
    where: str,
) -> None:
    """Raises unless the ranks sharded one order that can be redrawn, then and now."""
    name = state["order_name"]
    shared_before = state["geometry"].get("num_replicas", 1)
    ranks_before, ranks_now = state.get(RANKS, (shared_before, batching.num_replicas))
    sharing = "a sampler that shards the data: DistributedSampler, DistributedResumableSampler"
    if ranks_before > 1 and shared_before == 1:
        found = f"an order that each of {ranks_before} ranks went through by itself"
        _refuse(where, found, sharing, needed, state)
    if ranks_now > 1 and batching.num_replicas == 1:
        found = f"a {type(batching.sampler).__name__} on each of {ranks_now} ranks"
        _refuse(where, found, sharing, needed, state)
    for each_name, owner in ((name, "the checkpoint"), (live_name, "this run")):
        random_access = batching.has_random_access and each_name["kind"] == live_name["kind"]
        if each_name["kind"] not in NAMED and not random_access:
            what = each_name.get("sampler", each_name["kind"])
            known = "RandomSampler, SequentialSampler, DistributedSampler or a resumable one"
            _refuse(where, f"the order of a {what} in {owner}", known, needed, state)
    if name.get("length") != live_name.get("length"):
        found = f"an order of {live_name.get('length')} samples"
        _refuse(where, found, f"{name.get('length')} samples", needed, state)


def _moved(state: Mapping[str, Any], geometry: Mapping[str, Any]) -> dict[str, Any]:
    """The position in this geometry, without the generators that this loader does not have."""

    def known(random: Mapping[str, Any]) -> dict[str, Any]:
        kept = {n: each for n, each in random["generators"].items() if n in geometry["generators"]}
        return {**random, "generators": kept}

    moved = known({key: value for key, value in state.items() if key != RANKS})
    moved["geometry"] = dict(geometry)
    if moved.get("before"):
        moved["before"] = known(moved["before"])
    if "ahead" in moved:
        moved["ahead"] = [random and known(random) for random in moved["ahead"]]
    return moved


def _num_batches(state: Mapping[str, Any], batching: Batching) -> int | None:
    """The batches of the current epoch, used or not, where it is known."""
    if batching.sampler is None:
        return None
    if is_reshared(state):
        length = state["order_name"]["length"]
        left = batching.num_batches(batching.num_mine(max(length - state["samples"], 0)))
    else:
        whole = batching.samples_per_rank
        if whole is None:
            return None
        left = batching.num_batches(max(whole - used_here(state), 0))
    return int(state["batch"]) + left


# ---------------------------------------------------------------- ranks


def resplit_positions(
    states: Mapping[int, Mapping[str, Any]], change: WorldChange
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """This rank's position in every loader, and no messages.

    The position is that of the whole job, so it is the same on all ranks; what follows for a loader
    is found when the loader is opened. A rank that existed before keeps the RNG states of its own
    workers and generators. Both numbers of ranks are stored in the position.

    Args:
        states: the positions of some former ranks, rank 0 among them.
        change: the numbers of ranks.

    Raises:
        DataPositionError: the former ranks were at different positions.
    """
    for rank, state in states.items():
        _require_same_position(states[0], state, rank)
    last_change = [change.former_world_size, change.world_size]
    positions = {}
    for name, position in states[change.model_rank].items():
        if change.is_new:
            counterparts = {rank: state[name] for rank, state in states.items()}
            position = _for_new_rank(position, counterparts, change.rank)
        # An earlier change that this loader has not followed yet counts from its first number.
        former_world_size, _ = position.get(RANKS, last_change)
        positions[name] = {**position, RANKS: [former_world_size, change.world_size]}
    return positions, ()


def _require_same_position(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    for name in sorted({*first, *other}):
        positions = [_position_text(state.get(name)) for state in (first, other)]
        if positions[0] != positions[1]:
            raise DataPositionError(
                name,
                found=f"rank 0 was at {positions[0]}, rank {rank} at {positions[1]}",
                expected="all ranks at one position, to shard the rest",
                remedy="Continue with as many ranks as in the checkpoint",
            )


def _position_text(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "no position"
    position = f"batch {state['batch']} of epoch {state['epoch']}"
    return f"{position}, sample {state['samples']}" if "samples" in state else position


def _for_new_rank(
    position: Mapping[str, Any], counterparts: Mapping[int, Mapping[str, Any]], rank: int
) -> dict[str, Any]:
    """A position with RNG states that no other rank has."""
    found = dict(position)
    if position.get("generators"):
        found["generators"] = _renewed(_each(counterparts, "generators"), rank)
    if "workers" in position:
        found["workers"] = {}
    if position.get("before"):
        before = _each(counterparts, "before")
        common = {
            each: {name: state[name] for name in ("python", "numpy", "torch")}
            for each, state in before.items()
        }
        generators = _renewed(_each(before, "generators"), rank)
        renewed = _renewed(common, rank)
        found["before"] = {**position["before"], **renewed, "generators": generators}
    if "inner" in position:
        found["inner"] = _for_new_rank(position["inner"], _each(counterparts, "inner"), rank)
    return found


def _each(states: Mapping[int, Mapping[str, Any]], key: str) -> dict[int, Any]:
    return {rank: state[key] for rank, state in states.items()}


def _renewed(states: Mapping[int, Mapping[str, Any]], rank: int) -> dict[str, Any]:
    return states_of_new_rank(states, rank)[0]
