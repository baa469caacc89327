"""Compares two checkpoints component by component."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping

from resumekit.diff.components import Side, compare_component
from resumekit.diff.leaves import are_equal, is_tensor, short_text
from resumekit.diff.result import (
    CheckpointDifference,
    ComparedCheckpoint,
    ComponentDifference,
    ValueDifference,
)
from resumekit.diff.tensors import element_of
from resumekit.errors import ConfigurationError
from resumekit.serialization import leaves_of
from resumekit.state import Slot, common_prefix_change
from resumekit.storage import ComponentRecord, StepReader

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
