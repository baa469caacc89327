"""Compares the states of one component in two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from resumekit.capture import merge_states, merged_optimizers
from resumekit.diff.leaves import Leaves, are_equal, is_tensor, named_leaves, short_text
from resumekit.diff.result import ComponentDifference, ValueDifference
from resumekit.diff.tensors import TensorPair, compare_tensors
from resumekit.serialization import Source, StoredState, index_name, open_state
from resumekit.state import SharingPattern, Slot
from resumekit.storage import ComponentRecord, StepReader

_ONE_FOR_THE_JOB = (SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value)


@dataclass(frozen=True)
class Side:
    """A component in one of the checkpoints.

    Args:
        step: the checkpoint.
        record: of the component.
        prefix: of the parameter names, which is left out.
    """

    step: StepReader
    record: ComponentRecord
    prefix: str = ""

    def states(self) -> Iterator[tuple[str, StoredState]]:
        """Each state with what is put before its names: the rank, where each has its own."""
        record = self.record
        make = partial(Source, self.step, record.directory, record.key)
        if record.pattern == SharingPattern.SHARDED.value:
            firsts = [group[0] for group in record.groups] or [0]
            names = tuple(index_name(first, len(firsts) > 1) for first in firsts)
            yield "", open_state(make(names), self._merge)
        elif record.pattern in _ONE_FOR_THE_JOB:
            yield "", open_state(make((), record.writers[0]), self._merge)
        else:
            for writer in record.writers:
                label = f"rank {writer}: " if writer else ""
                yield label, open_state(make((), writer), self._merge)

    def _merge(self, states: list[Any]) -> Any:
        key = self.record.key
        if len(states) > 1 and key.partition("/")[0] == Slot.OPTIMIZER.value:
            return merged_optimizers(key, states)
        return merge_states(None, key, states)

    def leaves(self) -> Leaves:
        """The leaves of all states by name."""
        return {
            f"{label}{name}": leaf
            for label, state in self.states()
            for name, leaf in named_leaves(state, self.prefix).items()
        }


def compare_component(first: Side, second: Side) -> ComponentDifference:
    """How a component differs between two checkpoints.

    Raises:
        CheckpointError: damage, or an I/O error.
        StateMismatchError: groups of ranks have different values under one name.
    """
    mine, theirs = first.leaves(), second.leaves()
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
        tensors=tuple(compare_tensors(pairs)),
        values=tuple(compare_values(mine, theirs)),
        only_first=tuple(name for name in mine if name not in theirs),
        only_second=tuple(name for name in theirs if name not in mine),
    )


def compare_values(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[ValueDifference]:
    """The plain values of both that differ. What is a tensor on one side only is one of them."""
    for name, value in first.items():
        if name not in second or (is_tensor(value) and is_tensor(second[name])):
            continue
        if is_tensor(value) or is_tensor(second[name]) or not are_equal(value, second[name]):
            yield ValueDifference(name, short_text(value), short_text(second[name]))
