"""Putting saved values back into live objects without replacing those that others may hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from resumekit.serialization import fill, is_sharded, local_part

NewTensor = Callable[[Tensor], Tensor]


def own_tensor(saved: Tensor) -> Tensor:
    """A copy that shares nothing with the one given."""
    return saved.detach().clone()


class Restorer:
    """Gives saved values back in the live objects that can hold them.

    A live tensor of the same dtype, shape and layout is filled in place and stays the same object;
    so are dicts and lists. Where there is no such tensor, a new one is made; one saved tensor that
    stands in several places stays one. Nothing shares memory with the saved value, unless
    ``new_tensor`` lets it. One restorer serves one load.
    """

    def __init__(self) -> None:
        self._filled: dict[int, Tensor] = {}
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, live: Any, saved: Any, new_tensor: NewTensor = own_tensor) -> Any:
        """The saved value, in the live object where that is possible.

        Args:
            live: the value that stands there now, or None.
            saved: the value to give back.
            new_tensor: makes a tensor with the values and the dtype of the one given.
        """
        if isinstance(saved, Tensor):
            return self._tensor(live, saved, new_tensor)
        if isinstance(saved, dict):
            return self._dict(live, saved, new_tensor)
        if isinstance(saved, (list, tuple)):
            return self._sequence(live, saved, new_tensor)
        return copy.deepcopy(saved)

    def _tensor(self, live: Any, saved: Tensor, new_tensor: NewTensor) -> Tensor:
        if not fits(live, saved) or self._is_taken(live, saved):
            made = self._new(saved, new_tensor)
            return made.to(live.device) if isinstance(live, Tensor) else made
        fill(live, saved)
        assert isinstance(live, Tensor)
        self._filled[id(live)] = saved
        return live

    def _is_taken(self, live: Tensor, saved: Tensor) -> bool:
        # One live tensor may stand in two places (param groups share a default tensor lr) while the
        # saved run had two values there: the second place then gets a tensor of its own.
        first = self._filled.get(id(live))
        if first is None or first is saved:
            return False
        return not torch.equal(local_part(first), local_part(saved))

    def _new(self, saved: Tensor, new_tensor: NewTensor) -> Tensor:
        if is_sharded(saved) or saved.layout != torch.strided or saved.data_ptr() == 0:
            return new_tensor(saved)
        view = (saved.data_ptr(), saved.shape, saved.stride(), saved.dtype, saved.device)
        if view not in self._made:
            self._made[view] = new_tensor(saved)
        return self._made[view]

    def _dict(self, live: Any, saved: dict[Any, Any], new: NewTensor) -> dict[Any, Any]:
        if type(live) is not type(saved):
            live = copy.copy(saved)  # keeps the kind: OrderedDict, Counter, defaultdict
            live.clear()
        values = {key: self(live.get(key), value, new) for key, value in saved.items()}
        live.clear()
        live.update(values)
        assert isinstance(live, dict)
        return live

    def _sequence(self, live: Any, saved: Any, new: NewTensor) -> Any:
        partners = live if isinstance(live, type(saved)) and len(live) == len(saved) else None
        values = [
            self(None if partners is None else partners[index], value, new)
            for index, value in enumerate(saved)
        ]
        if isinstance(saved, list):
            if type(live) is not type(saved):
                return values
            live[:] = values
            return live
        make = getattr(type(saved), "_make", type(saved))  # a namedtuple takes its fields apart
        return make(values)


def fits(live: Any, saved: Any) -> bool:
    """Whether both are tensors, and the live one can hold exactly what the saved one holds."""
    return (
        isinstance(live, Tensor)
        and isinstance(saved, Tensor)
        and live.dtype == saved.dtype
        and live.shape == saved.shape
        and live.layout == saved.layout
        and is_sharded(live) == is_sharded(saved)
    )
