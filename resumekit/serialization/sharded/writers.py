"""Who writes a part that several ranks hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from resumekit.serialization.sharded.index import Chunk
from resumekit.serialization.sharding import Box


@dataclass(frozen=True)
class Holders:
    """The ranks that hold each part of a tensor; tensors that are spread alike share one.

    Args:
        ranks: in order, by what each of them holds: a box, or several.
    """

    ranks: Mapping[tuple[Box, ...], Sequence[int]]

    @cached_property
    def turns(self) -> tuple[tuple[Chunk, ...], ...]:
        """The ways to share the writing: in each, the next one of its holders writes a part.

        There are no more of them than a part has holders. A writer for each part of each tensor
        could be balanced a little better, and would give every tensor a layout of its own.
        """
        num_turns = max(map(len, self.ranks.values()), default=1)
        parts = sorted(
            (
                (box, number, ranks)
                for boxes, ranks in self.ranks.items()
                for number, box in enumerate(boxes)
            ),
            key=lambda part: part[0].offsets,
        )
        return tuple(
            tuple(Chunk(ranks[turn % len(ranks)], box, number) for box, number, ranks in parts)
            for turn in range(num_turns)
        )


def choose_writers(tensors: Iterable[tuple[str, Holders, int]]) -> dict[str, tuple[Chunk, ...]]:
    """The parts of each tensor with the rank that writes each, so that all write about as much.

    Args:
        tensors: the name of each, who holds its parts, and the bytes of one element.
    """
    load: Counter[int] = Counter()
    chosen: dict[str, tuple[Chunk, ...]] = {}
    shared: list[tuple[int, str, Holders, int]] = []
    for name, holders, num_bytes in tensors:
        if len(holders.turns) == 1:
            chosen[name] = holders.turns[0]
            _add(load, holders.turns[0], num_bytes)
        else:
            whole = num_bytes * sum(box.num_elements for boxes in holders.ranks for box in boxes)
            shared.append((whole, name, holders, num_bytes))
    # The large ones first.
    for _, name, holders, num_bytes in sorted(shared, key=lambda each: -each[0]):
        chosen[name] = min(
            holders.turns, key=lambda turn: max(load[chunk.writer] for chunk in turn)
        )
        _add(load, chosen[name], num_bytes)
    return chosen


def _add(load: Counter[int], chunks: Sequence[Chunk], num_bytes: int) -> None:
    for chunk in chunks:
        load[chunk.writer] += chunk.box.num_elements * num_bytes
