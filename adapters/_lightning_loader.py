"""What the fit loop iterates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from resumekit.adapters._lightning_package import CombinedLoader, ModeIterator
from resumekit.adapters._lightning_settings import refuse


class LoaderInStep(CombinedLoader):
    """What the fit loop iterates: the user's loader, through the driven loop.

    ``setup_data`` asks for an iterator before an epoch has begun, and nothing may happen then: the
    user's loader would draw a random number.
    """

    def __init__(self, given: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        is_combined = isinstance(given, CombinedLoader)
        mode: Any = given._mode if is_combined else "max_size_cycle"
        super().__init__(given.iterables if is_combined else given, mode)
        self._begin = begin

    def __iter__(self) -> Any:
        self._iterator = _InStep(self.flattened, self.limits, self._batches())
        return self

    def _state_dicts(self) -> list[dict[str, Any]]:
        """Nothing for Lightning's own checkpoints: asked, a stateful loader may draw a number."""
        return []

    def _batches(self) -> Iterator[list[Any]]:
        loaders: Any = self.flattened  # as Lightning has prepared them; limits has their lengths
        limits: Any = self.limits
        refuse("a training loader without a length", math.inf in limits)
        if len(loaders) == 1:
            yield from ([batch] for batch in self._begin(loaders[0]))
            return
        in_step = self._mode == "min_size" or {self._mode, *limits} == {"max_size_cycle", limits[0]}
        refuse(f"several training loaders of unequal lengths in mode {self._mode}", not in_step)
        named = {str(number): loader for number, loader in enumerate(loaders)}
        yield from (list(batches.values()) for batches in self._begin(named))


class _InStep(ModeIterator):
    """Batches that are already side by side, where Lightning combines loaders by itself."""

    def __init__(self, loaders: Any, limits: Any, batches: Iterator[list[Any]]) -> None:
        super().__init__(loaders, limits)
        self._batches = batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batches = next(self._batches)
        self._idx += 1
        return batches, self._idx - 1, 0

    def __len__(self) -> int:
        limits: Any = self.limits
        return min(limits)  # type: ignore[no-any-return]
