"""Compares two checkpoints of any frameworks and layouts, component by component."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from resumekit.capture.nested_state import merge_stored
from resumekit.diff.result import (
    CheckpointDifference,
    ComparedCheckpoint,
    ComponentDifference,
    ValueDifference,
)
from resumekit.diff.tensors import TensorPair, compare_tensors, element_of
from resumekit.errors import ConfigurationError
from resumekit.serialization.digests import leaves_of, state_digest
from resumekit.serialization.reading import StoredSource, StoredState, StoredTensor, open_state
from resumekit.serialization.tensors import StatePath, UniqueNames
from resumekit.state import CLOCK_SUFFIXES, Slot, common_prefix_change
from resumekit.storage.manifest import ComponentRecord, StepReader

_MAX_CHARACTERS = 40
_ARRAYS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "c8", "c16", "b1"})

Leaves = dict[str, Any]  # a StoredTensor, a Tensor with its values, or a plain value


def named_leaves(stored: StoredState, renamed: Mapping[str, str] = MappingProxyType({})) -> Leaves:
    """The leaves of a state by the dotted name of their path.

    Args:
        stored: the state.
        renamed: other names of parameters. They replace keys, and strings that are such names (the
            parameters of a param group).
    """
    leaves: Leaves = {}
    names = UniqueNames()  # a key with a dot may look like two keys
    for path, leaf in leaves_of(stored.state):
        if isinstance(leaf, str):
            leaf = renamed.get(leaf, leaf)
        name = names.take(_renamed(path, renamed).name or "value")
        leaves[name] = _as_tensor(stored.tensors.get(id(leaf), leaf))
    return leaves


def _renamed(path: StatePath, renamed: Mapping[str, str]) -> StatePath:
    if not renamed or path.parent is None:
        return path
    part = path.part
    if path.kind == "key" and isinstance(part, str):
        part = renamed.get(part, part)
    return StatePath(part, path.kind, _renamed(path.parent, renamed))


def _as_tensor(leaf: Any) -> Any:
    """An array of a type that torch has, as a tensor."""
    if type(leaf) is np.ndarray and leaf.dtype.str[1:] in _ARRAYS and leaf.dtype.isnative:
        return torch.from_numpy(leaf.copy())
    return leaf


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is compared element by element."""
    return isinstance(leaf, StoredTensor | Tensor)


def are_equal(first: Any, second: Any) -> bool:
    """Whether two plain values have the same type and the same bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, int | str | bytes) or first is None:
        return bool(first == second)
    if isinstance(first, float) and not math.isnan(first) and first != 0:
        return bool(first == second)
    return state_digest(first) == state_digest(second)


def short_text(leaf: Any) -> str:
    """A value on one short line; what is cut off is represented by its digest."""
    if is_tensor(leaf):
        kind = leaf.element.name if isinstance(leaf, StoredTensor) else leaf.dtype
        return f"tensor {str(kind).removeprefix('torch.')} {list(leaf.shape)}"
    text = " ".join(repr(leaf).split())
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... (digest {state_digest(leaf)[:8]})"


# ---------------------------------------------------------------- components

_YEAR_SECONDS = 366 * 86_400
# Of the component ``variables``: the lines and constants of the script, which are no state.
_OF_SCRIPT = "script."
_INDEX = re.compile(r"(\[\d+\])+$")


@dataclass(frozen=True)
class Side:
    """A component in one of the checkpoints.

    Args:
        step: the checkpoint.
        record: of the component.
        renamed: other names of parameters.
    """

    step: StepReader
    record: ComponentRecord
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that wrote a state each; 0 where there is one for the job."""
        return (0,) if self.record.is_of_job else self.record.writers

    def is_from_clock(self, name: str) -> bool:
        """Whether a leaf is a time in the log of a framework, which differs in equal runs."""
        is_of_framework = self.record.key in self.step.manifest.details.get("frameworks", {})
        return is_of_framework and _INDEX.sub("", name).endswith(CLOCK_SUFFIXES)

    def is_time(self, leaf: Any) -> bool:
        """Whether a value is a Unix time of the year before the checkpoint, as ``time.time()``."""
        created = self.step.manifest.created_seconds
        is_fraction = type(leaf) is float and leaf % 1 > 0
        return is_fraction and created is not None and -1 <= created - leaf < _YEAR_SECONDS

    def _state(self, writer: int) -> StoredState:
        source = StoredSource.of_record(
            self.step, self.record, None if self.record.is_of_job else writer
        )
        return open_state(source, partial(merge_stored, self.record.key))

    def leaves(self, writers: Collection[int] = (0,)) -> Leaves:
        """The leaves of the states of these ranks by name; the rank comes first, if not 0."""
        is_of_variables = self.record.key == Slot.VARIABLES.value
        return {
            f"rank {writer}: {name}" if writer else name: leaf
            for writer in self.writers
            if writer in writers
            for name, leaf in named_leaves(self._state(writer), self.renamed).items()
            if not (is_of_variables and name.startswith(_OF_SCRIPT))
        }


def compare_component(first: Side, second: Side) -> ComponentDifference:
    """How a component differs between two checkpoints.

    Raises:
        CheckpointError: damage, or an I/O error.
        StateMismatchError: groups of ranks have different values under one name.
    """
    every = first.leaves(second.writers), second.leaves(first.writers)
    clock = {
        name: leaf
        for name, leaf in every[0].items()
        if first.is_from_clock(name) or (first.is_time(leaf) and second.is_time(every[1].get(name)))
    }
    mine, theirs = (
        {k: v for k, v in leaves.items() if k not in clock and not side.is_from_clock(k)}
        for side, leaves in zip((first, second), every, strict=True)
    )
    common = [name for name in mine if name in theirs]
    pairs = [
        TensorPair(name, (mine[name], theirs[name]))
        for name in common
        if is_tensor(mine[name]) and is_tensor(theirs[name])
    ]
    values = [name for name in common if not (is_tensor(mine[name]) and is_tensor(theirs[name]))]
    return ComponentDifference(
        first.record.key,
        num_tensors=len(pairs),
        num_values=len(values),
        from_clock=tuple(clock),
        tensors=tuple(compare_tensors(pairs)),
        values=tuple(compare_values(mine, theirs)),
        only_first=tuple(_without_partner(first, second, mine, theirs)),
        only_second=tuple(_without_partner(second, first, theirs, mine)),
    )


def _without_partner(side: Side, other: Side, mine: Leaves, theirs: Leaves) -> Iterator[str]:
    """The ranks whose own state the other checkpoint does not have, and the names."""
    yield from (f"rank {writer}" for writer in side.writers if writer not in other.writers)
    yield from (name for name in mine if name not in theirs)


def compare_values(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[ValueDifference]:
    """The plain values of both that differ. What is a tensor on one side only is one of them."""
    for name, value in first.items():
        if name not in second or (is_tensor(value) and is_tensor(second[name])):
            continue
        if is_tensor(value) or is_tensor(second[name]) or not are_equal(value, second[name]):
            yield ValueDifference(name, short_text(value), short_text(second[name]))


# ---------------------------------------------------------------- checkpoints

_Names = Mapping[str, str]

_ABSENT = "-"  # a setting that a run does not have


def compare_checkpoints(
    first: StepReader, second: StepReader, *, components: Collection[str] = ()
) -> CheckpointDifference:
    """How two checkpoints differ, whichever frameworks and numbers of ranks wrote them.

    Reads both block by block and verifies what it reads. Blocks with equal digests are not read.

    Args:
        first: a checkpoint.
        second: another one.
        components: keys to compare, or slots where they are no keys; by default all.

    Raises:
        CheckpointError: damage, or an I/O error.
        ConfigurationError: neither checkpoint has such a component.
        StateMismatchError: groups of ranks have different values under one name.
    """
    mine, theirs = _records(first), _records(second)
    known = list(dict.fromkeys([*mine, *theirs]))
    keys = [key for key in known if not components or _is_named(key, components, known)]
    if not keys:
        raise ConfigurationError(
            "component", found=", ".join(components), expected=f"one of {', '.join(known)}"
        )
    prefixes, renamed = _match_names(first, second)
    sides = [
        {key: Side(step, record, names) for key, record in _records(step).items()}
        for step, names in zip((first, second), renamed, strict=True)
    ]
    return CheckpointDifference(
        _described(first),
        _described(second),
        tuple(_component(key, *sides) for key in keys),
        settings=tuple(_settings(first, second)),
        prefixes=prefixes,
    )


def _records(step: StepReader) -> dict[str, ComponentRecord]:
    return {record.key: record for record in step.manifest.components}


def _is_named(key: str, names: Collection[str], known: Collection[str]) -> bool:
    slot = key.partition("/")[0]
    return key in names or (slot in names and slot not in known)


def _component(
    key: str, first: Mapping[str, Side], second: Mapping[str, Side]
) -> ComponentDifference:
    if key not in second:
        return ComponentDifference(key, only_in="first")
    if key not in first:
        return ComponentDifference(key, only_in="second")
    return compare_component(first[key], second[key])


def _match_names(
    first: StepReader, second: StepReader
) -> tuple[tuple[str, str] | None, tuple[_Names, _Names]]:
    """The prefixes of the first model whose parameters have other names in both checkpoints.

    Returns:
        The prefixes, None if there are none; and the parameters' names without them on each side.
    """
    mine, theirs = _records(first), _records(second)
    for key in (key for key in mine if key in theirs):
        if key.partition("/")[0] == Slot.MODEL.value:
            sides = _kinds(Side(first, mine[key])), _kinds(Side(second, theirs[key]))
            prefixes = changed_prefixes(*sides)
            if prefixes is not None:
                one, other = (
                    {name: name.removeprefix(prefix) for name in names}
                    for names, prefix in zip(sides, prefixes, strict=True)
                )
                return prefixes, (one, other)
    return None, ({}, {})


def changed_prefixes(
    first: Mapping[str, Hashable], second: Mapping[str, Hashable]
) -> tuple[str, str] | None:
    """The prefix of all names on each side, where it is all that differs.

    Args:
        first: what each name stands for: its type and shape.
        second: the same on the other side.

    Returns:
        The two prefixes; None where the names are equal, or no such change makes them equal.
    """
    renaming = common_prefix_change(first, second)
    if renaming is None:
        return None
    if any(first[mine] != second[theirs] for mine, theirs in renaming.names.items()):
        return None
    ((mine, theirs),) = renaming.prefixes.items()
    return mine, theirs


def _kinds(side: Side) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The type and the shape of each tensor by name."""
    leaves = side.leaves()
    return {
        name: (element_of(leaf).name, tuple(leaf.shape))
        for name, leaf in leaves.items()
        if is_tensor(leaf)
    }


def _settings(first: StepReader, second: StepReader) -> Iterator[ValueDifference]:
    """What differs in the settings that the manifests record; on one side only, too."""
    mine, theirs = (
        {path.name: value for path, value in leaves_of(dict(step.manifest.fingerprint))}
        for step in (first, second)
    )
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in mine or name not in theirs or not are_equal(mine[name], theirs[name]):
            first_text, second_text = (
                short_text(side[name]) if name in side else _ABSENT for side in (mine, theirs)
            )
            yield ValueDifference(name, first_text, second_text)


def _described(step: StepReader) -> ComparedCheckpoint:
    manifest = step.manifest
    return ComparedCheckpoint(str(step.path), manifest.run_id, manifest.step, manifest.world_size)
