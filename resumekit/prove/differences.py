"""What differs between two records of a step, and which differences do not count."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, TypeVar

import xxhash

from resumekit.prove.result import describe, missing
from resumekit.prove.trace_records import (
    CHECKPOINT,
    RESUMED,
    STATE_KINDS,
    STEP,
    Attempt,
    Record,
    records_of,
)

# The recorder sees these when it looks at the right moment; absence shows nothing.
_FOUND_BY_CHANCE = ("modules/", "grad_scaler")

_STATE_ORDER = (
    "model",
    "parameters",
    "buffers",
    "optimizer",
    "lr_scheduler",
    "grad_scaler",
    "ema",
    "modules",
    "data",
    "progress",
    "best_metric",
    "callbacks",
    "extras",
    "rng",
    "gradient_buckets",  # of DDP; a validation that should not run shows here, too
)


@dataclass(frozen=True)
class Difference:
    """One component that differs, with the first leaf in it that does."""

    component: str
    leaf: str
    found: str
    expected: str


def state_differences(
    found: Record, expected: Record, *, model_last: bool = False
) -> list[Difference]:
    """The components that differ between two states, in the order of the slots."""
    now, then = found.components, expected.components
    names = sorted(now.keys() | then.keys(), key=_slot_order)
    if model_last:
        names.sort(key=_is_model)
    differences: list[Difference] = []
    for name in names:
        if name in now and name in then:
            differences += _first(name, now[name], then[name])
        elif not name.startswith(_FOUND_BY_CHANCE):
            state = {True: "present", False: "absent"}
            differences.append(Difference(name, "", state[name in now], state[name in then]))
    return differences


def step_differences(
    found: Record,
    expected: Record,
    *,
    idle_generators: frozenset[str] = frozenset(),
    tolerance: float | None = None,
) -> list[Difference]:
    """What differs between two executions of one step.

    The inputs of a step come first (data, learning rate, random numbers), then states, then the
    values that the step gave. Among the states, equal values mean that the forward pass was right
    and the update was not, so the model comes last; otherwise it comes first.

    Args:
        found: the execution that is judged.
        expected: the one of the reference.
        idle_generators: random number generators that the run never draws from.
        tolerance: the largest relative difference of a value; states are then not compared, as of
            a digest nothing is known but whether it is equal.
    """
    inputs = [
        *_data(found, expected),
        *_lr(found, expected),
        *_rng(found, expected, idle_generators),
    ]
    values = list(_values(found, expected, tolerance))
    if tolerance is not None:
        return [*inputs, *values]
    return [*inputs, *state_differences(found, expected, model_last=not values), *values]


def _data(found: Record, expected: Record) -> Iterator[Difference]:
    for leaf in ("epoch", "batch", "samples"):
        now, then = found.fields.get(leaf), expected.fields.get(leaf)
        if leaf == "samples" and found.fields.get("is_rest") and now and then:
            then = then[-len(now) :]
        if now != then:
            yield Difference("data", leaf, *_described(now, then))
            return


def _lr(found: Record, expected: Record) -> Iterator[Difference]:
    def by_group(record: Record) -> dict[str, Any]:
        return {f"group{index}": lr for index, lr in enumerate(record.fields.get("lr", ()))}

    return _first("lr", by_group(found), by_group(expected))


def _rng(found: Record, expected: Record, idle: frozenset[str]) -> Iterator[Difference]:
    def drawn_from(record: Record) -> dict[str, str]:
        return {name: digest for name, digest in record.rng.items() if name not in idle}

    return _first("rng", drawn_from(found), drawn_from(expected))


def _values(found: Record, expected: Record, tolerance: float | None) -> Iterator[Difference]:
    now, then = found.fields.get("values", {}), expected.fields.get("values", {})
    if found.fields.get("is_rest") and len(now) < len(then):
        then = dict(zip(now, [*then.values()][-len(now) :], strict=True)) if now else {}
    for name in dict.fromkeys([*then, *now]):
        a, b = now.get(name, _NOTHING), then.get(name, _NOTHING)
        if a != b and not (tolerance is not None and _is_close(a, b, tolerance)):
            yield Difference(name, "", missing(now, name), missing(then, name))


def _is_close(found: Any, expected: Any, tolerance: float) -> bool:
    try:
        return isclose(float.fromhex(found), float.fromhex(expected), rel_tol=tolerance)
    except (TypeError, ValueError):  # not numbers
        return False


def _first(
    component: str, found: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[Difference]:
    """The first leaf of a component that differs, if one does."""
    for leaf in dict.fromkeys([*expected, *found]):
        if found.get(leaf, _NOTHING) != expected.get(leaf, _NOTHING):
            yield Difference(component, leaf, missing(found, leaf), missing(expected, leaf))
            return


def _described(found: Any, expected: Any) -> tuple[str, str]:
    """Both values; of two long lists the first elements that differ."""
    if isinstance(found, list) and isinstance(expected, list) and len(str(expected)) > 60:
        pairs = zip(found, expected, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if index is not None:
            return f"{found[index]} at position {index}", f"{expected[index]}"
    return describe(found), describe(expected)


def _slot_order(component: str) -> tuple[int, str]:
    slot = component.split("/", 1)[0]
    if component.endswith("/gradient_buckets"):
        slot = "gradient_buckets"
    index = _STATE_ORDER.index(slot) if slot in _STATE_ORDER else len(_STATE_ORDER)
    return index, component


def _is_model(component: str) -> bool:
    return component.split("/", 1)[0] in ("model", "ema", "parameters", "buffers", "modules")


# Equal to nothing that a trace can hold, so that an absent value differs from a null.
_NOTHING = object()


Leaf = tuple[str, str]
_Key = TypeVar("_Key")

# Never weights or anything that is computed from them.
_SLOTS = frozenset({"rng", "data", "callbacks", "extras"})


def idle_generators(attempts: Iterable[Attempt]) -> frozenset[str]:
    """The names of the generators whose state never changes from step to step."""
    records = records_of(attempts, STEP)
    return _constant(pair for record in records for pair in record.rng.items())


def constant_leaves(attempts: Iterable[Attempt]) -> frozenset[Leaf]:
    """The leaves, outside the weights, that have one value in every state of a run."""
    records = records_of(attempts, *STATE_KINDS)
    return _constant(pair for record in records for pair in _own_leaves(record))


def constant_components(attempts: Iterable[Attempt]) -> frozenset[str]:
    """The keys of the components that have one state in every checkpoint of a run."""
    records = records_of(attempts, CHECKPOINT)
    states = (item for record in records for item in record.components.items())
    return _constant((key, json.dumps(leaves, sort_keys=True)) for key, leaves in states)


def _constant(pairs: Iterable[tuple[_Key, str]]) -> frozenset[_Key]:
    """The keys that have one value in all pairs."""
    seen: dict[_Key, set[str]] = {}
    for key, value in pairs:
        seen.setdefault(key, set()).add(value)
    return frozenset(key for key, values in seen.items() if len(values) == 1)


def values_before_the_first_kill(attempts: Iterable[Attempt]) -> dict[Leaf, str]:
    """The values in the first checkpoint of a run; empty when it resumed before it wrote one."""
    first = next(records_of(attempts, RESUMED, CHECKPOINT), None)
    return {} if first is None or first.kind == RESUMED else dict(_own_leaves(first))


def with_own_values(expected: Record, own_values: Mapping[Leaf, str]) -> Record:
    """The expected state of the reference, some leaves taken from the judged run."""
    components = {
        key: {leaf: own_values.get((key, leaf), digest) for leaf, digest in leaves.items()}
        for key, leaves in expected.components.items()
    }
    return replace(expected, fields={**expected.fields, "components": components})


def last_digests(attempts: Iterable[Attempt], *, excluded: frozenset[Leaf]) -> dict[str, str]:
    """One digest per component of the newest state that a run traced.

    Args:
        attempts: what one rank wrote.
        excluded: constant leaves, whose value may differ between runs.
    """
    states = [record.components for record in records_of(attempts) if record.components]
    digests: dict[str, str] = {}
    for key, leaves in (states[-1] if states else {}).items():
        kept = {leaf: digest for leaf, digest in leaves.items() if (key, leaf) not in excluded}
        text = json.dumps(kept, sort_keys=True)
        digests[key] = xxhash.xxh3_64_hexdigest(text.encode())
    return digests


def _own_leaves(record: Record) -> Iterable[tuple[Leaf, str]]:
    for key, leaves in record.components.items():
        if key.split("/", 1)[0] in _SLOTS:
            for leaf, digest in leaves.items():
                yield (key, leaf), digest
