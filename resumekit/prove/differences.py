"""What differs between two records of a step, and which differences do not count."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose
from typing import Any, TypeVar

import xxhash

from resumekit.prove.result import describe
from resumekit.record.moments import (
    CHECKPOINT,
    DATA,
    INPUTS,
    RESUMED,
    RNG,
    STATE_KINDS,
    STEP,
    Leaves,
    Moment,
    TracedProcess,
    differences,
    records_of,
    rest_of,
)

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

# The recorder sees these when it looks at the right moment; absence shows nothing.
_OFTEN_ABSENT = ("modules/", "grad_scaler")

# Of a step; what else its data has follows from these.
_POSITION = ("epoch", "batch", "samples")

# A component, the first leaf in it that differs, and its values as found and expected.
Difference = tuple[str, str, str, str]


def described_differences(
    found: Moment,
    expected: Moment,
    *,
    idle_generators: frozenset[str] = frozenset(),
    tolerance: float | None = None,
) -> list[Difference]:
    """What differs between two states, or between two executions of one step.

    States are in the order of the slots. Of a step, the inputs come first (data, learning rate,
    random numbers), then states, then the values that the step gave. Among the states, equal values
    mean that the forward pass was right and the update was not, so the model comes last; otherwise
    it comes first.

    Args:
        found: what is judged.
        expected: the same of the reference.
        idle_generators: random number generators that the run never draws from.
        tolerance: the largest relative difference of a value; states are then not compared, as of
            a digest nothing is known but whether it is equal.
    """
    expected = rest_of(expected, found)
    is_step = found.kind == STEP
    inputs = INPUTS if is_step else ()
    results = [*dict.fromkeys([*expected.values, *found.values])]
    every = dict(differences(found, expected))
    if is_step:
        data, rng = every.get(DATA, {}), every.get(RNG, {})
        every[DATA] = {leaf: data[leaf] for leaf in _POSITION if leaf in data}
        every[RNG] = {name: each for name, each in rng.items() if name not in idle_generators}
    if tolerance is not None:
        kept = {name: every[name] for name in (*inputs, *results) if name in every}
        every = {name: each for name, each in kept.items() if not _is_close(each, tolerance)}
    every = {name: each for name, each in every.items() if each}
    is_model_last = is_step and every.keys().isdisjoint(results)

    def order(component: str) -> tuple[int, bool, int, str]:
        if component in inputs:
            return 0, False, inputs.index(component), ""
        if component in results:
            return 2, False, results.index(component), ""
        return 1, is_model_last and _is_model(component), *_slot_order(component)

    described: list[Difference] = []
    for name in sorted(every, key=order):
        leaf, values = next(iter(every[name].items()))
        is_common = name in found.parts and name in expected.parts
        if name == DATA and is_step:
            now, then = _texts(found.fields.get(leaf), expected.fields.get(leaf))
        elif is_common or name in results:
            now, then = ("absent" if each is None else describe(each) for each in values)
        elif name.startswith(_OFTEN_ABSENT):
            continue
        else:
            leaf = ""
            now, then = (
                "present" if name in each.parts else "absent" for each in (found, expected)
            )
        described.append((name, leaf, now, then))
    return described


def _is_close(leaves: Leaves, tolerance: float) -> bool:
    """Whether the only leaf is a number that differs by no more than this."""
    found, expected = leaves.get("", (None, None))
    if found is None or expected is None or "0x" not in found or "0x" not in expected:
        return False
    return isclose(float.fromhex(found), float.fromhex(expected), rel_tol=tolerance)


def _texts(found: Any, expected: Any) -> tuple[str, str]:
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


Leaf = tuple[str, str]
_Key = TypeVar("_Key")

# Never weights or anything that is computed from them.
_SLOTS = frozenset({"rng", "data", "callbacks", "extras"})


def idle_generators(processes: Iterable[TracedProcess]) -> frozenset[str]:
    """The names of the generators whose state never changes from step to step."""
    records = records_of(processes, STEP)
    return _constant(pair for record in records for pair in record.parts[RNG].items())


def constant_leaves(processes: Iterable[TracedProcess]) -> frozenset[Leaf]:
    """The leaves, outside the weights, that have one value in every state of a run."""
    records = records_of(processes, *STATE_KINDS)
    return _constant(pair for record in records for pair in _own_leaves(record))


def constant_components(processes: Iterable[TracedProcess]) -> frozenset[str]:
    """The keys of the components that have one state in every checkpoint of a run."""
    records = records_of(processes, CHECKPOINT)
    states = (item for record in records for item in record.components.items())
    return _constant((key, json.dumps(leaves, sort_keys=True)) for key, leaves in states)


def _constant(pairs: Iterable[tuple[_Key, str]]) -> frozenset[_Key]:
    """The keys that have one value in all pairs."""
    seen: dict[_Key, set[str]] = {}
    for key, value in pairs:
        seen.setdefault(key, set()).add(value)
    return frozenset(key for key, values in seen.items() if len(values) == 1)


def values_before_the_first_kill(processes: Iterable[TracedProcess]) -> dict[Leaf, str]:
    """The values in the first checkpoint of a run; empty when it resumed before it wrote one."""
    first = next(records_of(processes, RESUMED, CHECKPOINT), None)
    return {} if first is None or first.kind == RESUMED else dict(_own_leaves(first))


def with_own_values(expected: Moment, own_values: Mapping[Leaf, str]) -> Moment:
    """The expected state of the reference, some leaves taken from the judged run."""
    parts = {
        key: {leaf: own_values.get((key, leaf), digest) for leaf, digest in leaves.items()}
        for key, leaves in expected.parts.items()
    }
    return replace(expected, parts=parts)


def last_digests(
    processes: Iterable[TracedProcess], *, excluded: frozenset[Leaf]
) -> dict[str, str]:
    """One digest per component of the newest state that a run traced.

    Args:
        processes: what one rank wrote.
        excluded: constant leaves, whose value may differ between runs.
    """
    states = [record.components for record in records_of(processes) if record.components]
    digests: dict[str, str] = {}
    for key, leaves in (states[-1] if states else {}).items():
        kept = {leaf: digest for leaf, digest in leaves.items() if (key, leaf) not in excluded}
        text = json.dumps(kept, sort_keys=True)
        digests[key] = xxhash.xxh3_64_hexdigest(text.encode())
    return digests


def _own_leaves(record: Moment) -> Iterable[tuple[Leaf, str]]:
    for key, leaves in record.parts.items():
        if key.split("/", 1)[0] in _SLOTS:
            for leaf, digest in leaves.items():
                yield (key, leaf), digest
