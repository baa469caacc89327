"""What two launches of one script may differ in without having trained differently.

A script that never seeds Python's ``random`` starts each time from another state of it, and if it
never draws from it either, nothing follows from that. The same goes for a run id made at the
start. Such values cannot be held against the reference run. They are held against the judged run
itself: what it had before the first kill must be there after every resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

import xxhash

from resumekit.prove.records import CHECKPOINT, RESUMED, STATE_KINDS, STEP, Attempt, Record

Leaf = tuple[str, str]

# Never weights or anything that is computed from them.
_SLOTS = frozenset({"rng", "data", "callbacks", "extras"})


def idle_generators(attempts: Iterable[Attempt]) -> frozenset[str]:
    """The names of the generators whose state never changes from step to step."""
    seen: dict[str, set[str]] = {}
    for attempt in attempts:
        for record in attempt.records:
            if record.kind == STEP:
                for name, digest in record.rng.items():
                    seen.setdefault(name, set()).add(digest)
    return frozenset(name for name, digests in seen.items() if len(digests) == 1)


def constant_leaves(attempts: Iterable[Attempt]) -> frozenset[Leaf]:
    """The leaves, outside the weights, that have one value in every state of a run."""
    seen: dict[Leaf, set[str]] = {}
    for attempt in attempts:
        for record in attempt.records:
            if record.kind in STATE_KINDS:
                for leaf, digest in _own_leaves(record):
                    seen.setdefault(leaf, set()).add(digest)
    return frozenset(leaf for leaf, digests in seen.items() if len(digests) == 1)


def values_before_the_first_kill(attempts: Iterable[Attempt]) -> dict[Leaf, str]:
    """The values in the first checkpoint of a run; empty when it resumed before it wrote one."""
    for attempt in attempts:
        for record in attempt.records:
            if record.kind == RESUMED:
                return {}
            if record.kind == CHECKPOINT:
                return dict(_own_leaves(record))
    return {}


def with_own_values(expected: Record, constant: frozenset[Leaf], own: Mapping[Leaf, str]) -> Record:
    """The expected state of the reference, its constant leaves taken from the judged run."""
    components = {
        key: {
            leaf: own.get((key, leaf), digest) if (key, leaf) in constant else digest
            for leaf, digest in leaves.items()
        }
        for key, leaves in expected.components.items()
    }
    return replace(expected, fields={**expected.fields, "components": components})


def last_digests(attempts: Iterable[Attempt], *, besides: frozenset[Leaf]) -> dict[str, str]:
    """One digest per component of the newest state that a run traced.

    Args:
        attempts: what one rank wrote.
        besides: leaves that are left out, the constant ones: they may be the run's own.
    """
    records = [record for attempt in attempts for record in attempt.records if record.components]
    if not records:
        return {}
    digests: dict[str, str] = {}
    for key, leaves in records[-1].components.items():
        kept = {leaf: digest for leaf, digest in leaves.items() if (key, leaf) not in besides}
        text = json.dumps(kept, sort_keys=True)
        digests[key] = xxhash.xxh3_64_hexdigest(text.encode())
    return digests


def _own_leaves(record: Record) -> Iterable[tuple[Leaf, str]]:
    for key, leaves in record.components.items():
        if key.split("/", 1)[0] in _SLOTS:
            for leaf, digest in leaves.items():
                yield (key, leaf), digest
