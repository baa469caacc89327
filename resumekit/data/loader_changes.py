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
)
from resumekit.data.seeking import is_reshared, used_here
from resumekit.errors import DataPositionError
from resumekit.state import WorldChange

# A position that came from a job with another number of ranks carries both numbers under this key.
RANKS = "ranks"
# What of a loader's geometry is the user's setting, and how users call it. A changed batch size or
# number of ranks is reported elsewhere, since a run may be allowed to follow it inside an epoch.
_SETTINGS = {"num_samples": "dataset length", "drop_last": "drop_last"}


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


def _sample_generators(generators: Sequence[str]) -> list[str]:
    return [name for name in generators if name.startswith(DATASET_PREFIXES)]


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


@dataclass(frozen=True)
class PositionFit:
    """A checkpoint's position, compared with the loader that continues from it.

    Args:
        state: the saved position.
        geometry: of this loader.
        where: its name, for errors.
        allowed: the changes that the user allows.
    """

    state: Mapping[str, Any]
    geometry: Mapping[str, Any]
    where: str
    allowed: frozenset[str]

    def at_epoch_start(self) -> FittedPosition:
        """Of a loader whose order cannot be redrawn: it may change between epochs only.

        Raises:
            DataPositionError: a change is not allowed, or is inside an epoch.
        """
        state = self.state
        needed = (WORLD_SIZE,) if RANKS in state else ()
        self._require_allowed(needed)
        if needed and state["batch"] > 0:
            ranks = f"{state[RANKS][0]} ranks that each went through a loader of their own"
            self._refuse(ranks, "the end of an epoch", needed)
        return FittedPosition(self._moved() if needed else dict(state))

    def around(self, inner: FittedPosition) -> dict[str, Any]:
        """The position of an outer loader whose inner one has followed a change.

        Raises:
            DataPositionError: something else changed.
        """
        self._require_allowed(inner.changes, inner.free)
        if inner.changes or inner.free:
            return self._moved()
        return {key: value for key, value in self.state.items() if key != RANKS}

    def _require_allowed(self, needed: Sequence[str], free: frozenset[str] = frozenset()) -> None:
        """Raises DataPositionError when a loader's geometry changed in a way that is not allowed.

        Args:
            needed: the changes that this kind of loader can follow.
            free: keys of the geometry that may change anyway.
        """
        then, geometry = self.state["geometry"], self.geometry
        follows = free.union(*(_FOLLOWS[change] for change in needed))
        changed = [key for key in then if then[key] != geometry.get(key)]
        fixed = [key for key in changed if key not in follows]
        missing = [change for change in needed if change not in self.allowed]
        if not self.state["batch"]:  # between two epochs a loader may be another one
            fixed, missing = [], [change for change in missing if change == WORLD_SIZE]
        if not fixed and not missing:
            return
        pairs = {key: (then[key], geometry.get(key)) for key in fixed}
        if not fixed:
            pairs = {_NOUNS[change]: self._values(change) for change in missing}
        option = f", or pass allow_changes={{{', '.join(map(repr, missing))}}}"
        raise DataPositionError(
            self.where,
            found="; ".join(f"{key} {now!r}" for key, (_, now) in pairs.items()),
            expected="; ".join(f"{key} {before!r}" for key, (before, _) in pairs.items()),
            remedy="Restore the former settings of this loader" + ("" if fixed else option),
        )

    def _values(self, change: str) -> tuple[Any, Any]:
        """The value in the checkpoint and the one here."""
        if change == WORLD_SIZE and RANKS in self.state:
            return self.state[RANKS][0], self.state[RANKS][1]
        key = "num_replicas" if change == WORLD_SIZE else change
        return self.state["geometry"].get(key), self.geometry.get(key)

    def _refuse(self, found: str, expected: str, needed: Sequence[str]) -> NoReturn:
        """Raises for a change that cannot be followed inside an epoch."""
        changed = " and ".join(_NOUNS[change] for change in needed) or "sampler"
        epoch = self.state["epoch"]
        raise DataPositionError(
            self.where,
            found=found,
            expected=f"{expected}, because the {changed} changed inside epoch {epoch}",
            remedy="Restore the former settings until the epoch is over",
        )

    def _moved(self) -> dict[str, Any]:
        """The position in this geometry, without the generators that this loader does not have."""
        names = self.geometry["generators"]

        def known(random: Mapping[str, Any]) -> dict[str, Any]:
            kept = {name: each for name, each in random["generators"].items() if name in names}
            return {**random, "generators": kept}

        moved = known({key: value for key, value in self.state.items() if key != RANKS})
        moved["geometry"] = dict(self.geometry)
        if moved.get("before"):
            moved["before"] = known(moved["before"])
        if "ahead" in moved:
            moved["ahead"] = [random and known(random) for random in moved["ahead"]]
        return moved


@dataclass(frozen=True)
class OrderFit(PositionFit):
    """The same of a map-style loader, whose order may be divided again.

    Args:
        batching: how this loader divides its order.
        live_name: the name of the order that its own sampler gives.
    """

    batching: Batching
    live_name: Mapping[str, Any]

    def fitted(self) -> FittedPosition:
        """The position, expressed in this run's geometry.

        Raises:
            DataPositionError: a change is not allowed, or cannot be followed.
        """
        state, batching, where = self.state, self.batching, self.where
        needed, inherits = self._needed(), self._inherits_order()
        free = self._free_geometry() if inherits else frozenset[str]()
        self._require_allowed(needed, free)
        moved = self._moved() if needed or inherits else dict(state)
        position = f"from sample {state['samples']} of epoch {state['epoch']} on"
        words = []
        for change in needed:
            before, now = self._values(change)
            noun = f"{where}: {_NOUNS[change]}"
            words.append(f"{noun} was {before}, this run's {now} is used {position}")
        if inherits:
            words.append(self._inherited_order_message())
            moved["reshared"] = True
        if not state["batch"]:
            return FittedPosition(moved, needed, tuple(words), tuple(self._followed_changes()))
        if needed or inherits:
            self._require_redrawable(needed)
        if WORLD_SIZE in needed or (batching.by_batches and (needed or inherits)):
            moved["reshared"] = True
        if needed:
            per_step = batching.batch_size * batching.num_replicas
            moved["batch"] = max(1, state["samples"] // per_step)  # 0 would be the epoch's start
        num_batches = _num_batches(moved, batching)
        return FittedPosition(moved, needed, tuple(words), num_batches=num_batches, free=free)

    def _needed(self) -> tuple[str, ...]:
        """The names of the changes between a checkpoint's loader and this one."""
        then, now = self.state["geometry"], self.geometry
        needed = [BATCH_SIZE] if then.get("batch_size") != now.get("batch_size") else []
        replicas = then.get("num_replicas") != now.get("num_replicas")
        return (*needed, WORLD_SIZE) if replicas or RANKS in self.state else tuple(needed)

    def _inherits_order(self) -> bool:
        """Whether the epoch continues in an order that the loader's sampler draws in no epoch.

        Another seed of the same sampler is no such thing: that is a setting which was changed. So
        is another sampler under one framework, but for those by which frameworks shuffle.

        Raises:
            DataPositionError: under another framework the loader has another sampler, and the order
                of one of the two has no name.
        """
        if not self.state["batch"]:
            return False
        name, framework_changed = self.state["order_name"], FRAMEWORK_CHANGED in self.state
        kinds = {name["kind"], self.live_name["kind"]}
        if is_reshared(self.state) and kinds <= NAMED:
            return framework_changed
        if len(kinds) == 1:
            return framework_changed and name.get("generator") != self.live_name.get("generator")
        if kinds <= NAMED and (framework_changed or kinds == _SHUFFLES):
            return bool(name["length"] == self.live_name["length"])
        if framework_changed:
            raise DataPositionError(
                self.where,
                found=f"the order of {_sampler_noun(self.live_name)} in this run",
                expected=f"that of {_sampler_noun(name)}, as in the checkpoint",
                remedy="Give the loader the same sampler under both frameworks until the epoch is "
                "over",
            )
        return False

    def _free_geometry(self) -> frozenset[str]:
        """What of a loader's geometry goes with its sampler, and may be another one."""
        free = {"samples_per_rank", "num_batches"}
        then, now = (each["generators"] for each in (self.state["geometry"], self.geometry))
        if _sample_generators(then) == _sample_generators(now):
            free.add("generators")
        return frozenset(free)

    def _inherited_order_message(self) -> str:
        """The message that the epoch continues in an order of another sampler."""
        state = self.state
        drawn_by, now = _sampler_noun(state["order_name"]), _sampler_noun(self.live_name)
        later = "" if drawn_by == now else f"; the next one is that of {now}"
        return (
            f"{self.where}: epoch {state['epoch']} continues at sample {state['samples']} in the "
            f"order that {drawn_by} drew{later}"
        )

    def _followed_changes(self) -> Iterator[str]:
        """A line for each setting of the script that differs and is used from the next epoch on."""
        then, before = self.state["geometry"], self.state["sampler"]
        for key, noun in _SETTINGS.items():
            if key in then and then[key] != self.geometry.get(key):
                yield self._line(noun, then[key], self.geometry.get(key))
        sampler = sampler_setting(self.live_name)
        if before == sampler:
            return
        if before["kind"] == sampler["kind"] and before.get("seed") != sampler.get("seed"):
            yield self._line("seed", before.get("seed"), sampler.get("seed"))
        else:
            yield self._line("order", _order(before), _order(sampler))

    def _line(self, noun: str, then: Any, now: Any) -> str:
        return (
            f"{self.where}: {noun} was {then}, the script's {now} is used from epoch "
            f"{self.state['epoch']} on; restore it if that was a mistake"
        )

    def _require_redrawable(self, needed: Sequence[str]) -> None:
        """Raises unless the rest of the epoch can be taken out of its order, and divided again."""
        batching = self.batching
        if batching.sampler is None:
            hidden = f"the batch sampler {batching.hidden_in}"
            self._refuse(hidden, "torch's own BatchSampler", needed)
        if self.state["draws"]:
            lazy = f"a {type(batching.sampler).__name__} that draws as it goes"
            self._refuse(lazy, "an order that is drawn when the epoch begins", needed)
        if WORLD_SIZE in needed or batching.by_batches:
            self._require_shared(needed)

    def _require_shared(self, needed: Sequence[str]) -> None:
        """Raises unless the ranks sharded one order that can be redrawn, then and now."""
        state, batching, live_name = self.state, self.batching, self.live_name
        name = state["order_name"]
        shared_before = state["geometry"].get("num_replicas", 1)
        ranks_before, ranks_now = state.get(RANKS, (shared_before, batching.num_replicas))
        sharing = "a sampler that shards the data: DistributedSampler, DistributedResumableSampler"
        if ranks_before > 1 and shared_before == 1:
            found = f"an order that each of {ranks_before} ranks went through by itself"
            self._refuse(found, sharing, needed)
        if ranks_now > 1 and batching.num_replicas == 1:
            found = f"a {type(batching.sampler).__name__} on each of {ranks_now} ranks"
            self._refuse(found, sharing, needed)
        for each_name, owner in ((name, "the checkpoint"), (live_name, "this run")):
            random_access = batching.has_random_access and each_name["kind"] == live_name["kind"]
            if each_name["kind"] not in NAMED and not random_access:
                what = each_name.get("sampler", each_name["kind"])
                known = "RandomSampler, SequentialSampler, DistributedSampler or a resumable one"
                self._refuse(f"the order of a {what} in {owner}", known, needed)
        if name.get("length") != live_name.get("length"):
            found = f"an order of {live_name.get('length')} samples"
            self._refuse(found, f"{name.get('length')} samples", needed)


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
