"""Compares the states of one component in two checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from resumekit.capture import merge_states, merged_optimizers
from resumekit.diff.leaves import Leaves, are_equal, is_tensor, named_leaves, short_text
from resumekit.diff.result import ComponentDifference, ValueDifference
from resumekit.diff.tensors import TensorPair, compare_tensors
from resumekit.serialization import StoredSource, StoredState, open_state
from resumekit.state import CLOCK_SUFFIXES, SharingPattern, Slot
from resumekit.storage import ComponentRecord, StepReader

_OF_THE_JOB = frozenset(
    each.value
    for each in (SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.SHARDED)
)

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
        return (0,) if self._is_of_job else self.record.writers

    def is_from_clock(self, name: str) -> bool:
        """Whether a leaf is a time in the log of a framework, which differs in equal runs."""
        is_of_framework = self.record.key in self.step.manifest.details.get("frameworks", {})
        return is_of_framework and _INDEX.sub("", name).endswith(CLOCK_SUFFIXES)

    @property
    def _is_of_job(self) -> bool:
        return self.record.pattern in _OF_THE_JOB

    def _state(self, writer: int) -> StoredState:
        source = StoredSource.of_record(self.step, self.record, None if self._is_of_job else writer)
        return open_state(source, self._merge)

    def _merge(self, states: list[Any]) -> Any:
        key = self.record.key
        if len(states) > 1 and key.partition("/")[0] == Slot.OPTIMIZER.value:
            return merged_optimizers(key, states)
        return merge_states(None, key, states)

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
    mine, theirs = (
        {name: leaf for name, leaf in leaves.items() if not side.is_from_clock(name)}
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
        num_from_clock=len(every[0]) - len(mine),
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
