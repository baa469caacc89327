"""What a checkpoint has of the position in one loader, by the kind of the loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypedDict

import numpy as np

from resumekit.capture.rng import GeneratorState, RngStates
from resumekit.capture.user_state.table import UserStateContent
from resumekit.data.epoch_order import DRAWN, IN_ORDER, KEYED, SEEDED, SEEDED_BY_EPOCH
from resumekit.data.loader_changes import COUNTED
from resumekit.data.loader_traits import WRAPPED
from resumekit.state import Count, Rule, Variants

_Positive: TypeAlias = Annotated[int, Rule("at least 1", lambda number: number > 0)]


class _OptionalGeometry(TypedDict, total=False):
    num_samples: Count | None
    batch_size: int | None
    drop_last: bool | None
    num_replicas: _Positive
    samples_per_rank: Count | None
    num_workers: Count | None
    persistent_workers: bool | None


class _Geometry(_OptionalGeometry):
    num_batches: Count | None
    generators: list[str]


class _OptionalCommon(TypedDict, total=False):
    content: UserStateContent
    ranks: Any  # with the former number, until the loader begins
    crossed: bool
    reshared: bool


_Recreated = TypedDict("_Recreated", {"made_anew": list[str]})  # noqa: UP013 - only a stored name


class _Common(_OptionalCommon, _Recreated):
    """What the position in any loader has."""

    kind: str
    epoch: Count
    batch: Count
    endless: bool
    rebuilt: bool | None
    geometry: _Geometry
    generators: dict[str, GeneratorState]


class _WorkerRecords(TypedDict):
    """The RNG states before some fetches, by the number of the batch."""

    batches: np.ndarray[Any, Any]
    states: np.ndarray[Any, Any]


def _are_records(records: Mapping[str, Any]) -> bool:
    batches, states = records["batches"], records["states"]
    is_right = batches.dtype == np.int64 and states.dtype == np.uint8
    return is_right and batches.ndim == 1 and states.ndim == 2 and len(batches) == len(states)


_Fetches: TypeAlias = dict[str, Annotated[_WorkerRecords, Rule("a state a batch", _are_records)]]


# The numbers from which an order of this kind is drawn again; of a sampler's own kinds none are.
_NUMBERS = {
    IN_ORDER: ("length",),
    DRAWN: ("length",),
    **dict.fromkeys((SEEDED, SEEDED_BY_EPOCH), ("length", "seed", "epoch")),
    KEYED: ("length", "seed", "epoch", "version"),
}


def _has_kind(setting: Mapping[str, Any]) -> bool:
    return isinstance(setting.get("kind"), str)


def _names_order(name: Mapping[str, Any]) -> bool:
    if not _has_kind(name) or (name["kind"] == DRAWN and "generator" not in name):
        return False
    return all(type(name.get(each)) is int for each in _NUMBERS.get(name["kind"], ()))


_OrderName: TypeAlias = Annotated[dict[str, Any], Rule("the name of an order", _names_order)]


class _OptionalStart(TypedDict, total=False):
    at_iter: RngStates
    at_first: RngStates | None
    after_iter: list[Any]


class _Used(TypedDict):
    since: Count
    replica: Count
    num_replicas: _Positive
    in_a_row: _Positive
    digest: str | None


class _Order(TypedDict):
    """The indices of an epoch; those of batches with their lengths."""

    indices: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any] | None
    kind: str


def _is_order(order: Mapping[str, Any]) -> bool:
    indices, lengths = order["indices"], order["lengths"]
    arrays = [indices] if lengths is None else [indices, lengths]
    if any(each.dtype != np.int64 or each.ndim != 1 for each in arrays):
        return False
    is_whole = lengths is None or (int(lengths.sum()) == len(indices) and not (lengths < 0).any())
    return is_whole and order["kind"] in ("int", "int64", "Tensor")


class _WorkerState(TypedDict):
    states: dict[str, bytes]


class _OptionalMapStyle(_Common, total=False):
    order: Annotated[_Order, Rule("the indices of an epoch", _is_order)] | None
    objects: UserStateContent
    copied: UserStateContent


class _MapStyle(_OptionalMapStyle):
    samples: Count
    order_name: _OrderName | None
    start: _OptionalStart | None
    draws: _Fetches
    used: _Used | None
    sampler: Annotated[dict[str, Any], Rule("a kind of order", _has_kind)]
    num_workers: Count | None
    before: RngStates | None
    workers: dict[int | str, _WorkerState]


def _has_generators(position: Mapping[str, Any]) -> bool:
    return {*position["generators"]} == {*position["geometry"]["generators"]}


def _knows_epoch(position: Mapping[str, Any]) -> bool:
    """Whether it names the order of the epoch that it is in."""
    return not position["batch"] or None not in (position["order_name"], position["used"])


class _OptionalOuter(_Common, total=False):
    ahead_values: list[dict[str, Any]]
    ahead_contents: list[str]


class _Outer(_OptionalOuter):
    inner: PositionState
    ahead: list[RngStates | None]


def _are_alike(position: Mapping[str, Any]) -> bool:
    """Whether each batch that was fetched ahead has its entries."""
    lists = (position.get(name) for name in ("ahead", "ahead_values", "ahead_contents"))
    return len({len(each) for each in lists if each is not None}) == 1


class _Stateful(_Common):
    loader: Any
    start: RngStates | None


class _Birth(TypedDict):
    epoch: Count
    rng: RngStates


class _Workers(TypedDict):
    birth: _Birth | None
    states: dict[int, bytes]


class _OptionalReplay(_Common, total=False):
    objects: UserStateContent | None


class _Replay(_OptionalReplay):
    start: RngStates | None
    fetches: _Fetches | None
    contents: str | None
    workers: _Workers | None


def _has_start(position: Mapping[str, Any]) -> bool:
    return not position["batch"] or position["start"] is not None


class _Counted(_Common):
    """As another program has counted it, in batches of an epoch that the live sampler draws."""

    ahead: list[RngStates]


_BY_SAMPLES = Annotated[_MapStyle, Rule("the order of its epoch", _knows_epoch)]
_AHEAD = Annotated[_Outer, Rule("entries for each batch ahead", _are_alike)]
_KINDS = {
    "map": _BY_SAMPLES,
    "keyed": _BY_SAMPLES,
    WRAPPED: _AHEAD,
    "ahead": _AHEAD,
    "stateful": Annotated[_Stateful, Rule("the start of its epoch", _has_start)],
    "replay": Annotated[_Replay, Rule("the start of its epoch", _has_start)],
    COUNTED: _Counted,
}
PositionState: TypeAlias = Annotated[
    dict[str, Any],
    Variants("kind", _KINDS),
    Rule("the states of all its generators", _has_generators),
]
