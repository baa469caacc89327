"""Which live DTensor each tensor of a saved state is to be spread like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from resumekit.serialization import is_sharded


def pairs_of(stateful: Any, state: Any) -> Iterator[tuple[Tensor, Any]]:
    """Each tensor of a saved state with the live DTensor whose mesh and placements it gets.

    Args:
        stateful: the live object; its ``pairs``, where it has them, know best.
        state: of the same kind, the tensors on the meta device.
    """
    own = getattr(stateful, "pairs", None)
    if own is not None:
        yield from own(state)
    else:
        yield from pairs_in(state, stateful.state_dict())


def pairs_in(saved: Any, live: Any) -> Iterator[tuple[Tensor, Any]]:
    """The tensors that stand in one place of two states, the live one a DTensor of that shape."""
    if isinstance(saved, Tensor):
        if is_sharded(live) and saved.shape == live.shape:
            yield saved, live
    elif isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key, item in saved.items():
            if key in live:
                yield from pairs_in(item, live[key])
    elif isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        for item, partner in zip(saved, live, strict=False):
            yield from pairs_in(item, partner)


def holds_sharded(state: Any) -> bool:
    """Whether a DTensor stands anywhere in a state."""
    if isinstance(state, Mapping):
        return any(map(holds_sharded, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(holds_sharded, state))
    return is_sharded(state)
