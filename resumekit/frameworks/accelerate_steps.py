"""Whether an optimizer step was taken, in a loop that does not say so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch


class StepsTaken:
    """Watches the optimizers of an Accelerator.

    With several, as in adversarial training, a step is complete when each has taken one.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        optimizers: what its wrappers hold.
    """

    def __init__(self, accelerator: Any, optimizers: Iterable[Any]) -> None:
        wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
        self._engine: Any = None if wrapped is None else wrapped.engine
        kinds = [each for each in optimizers if isinstance(each, torch.optim.Optimizer)]
        watched = [] if wrapped is not None else kinds
        self._everyone = frozenset(range(len(watched)))
        self._hooks = [
            each.register_step_post_hook(partial(self._note, number))
            for number, each in enumerate(watched)
        ]
        self.forget()

    @property
    def is_complete(self) -> bool:
        """Whether all have stepped since ``forget``."""
        if self._engine is not None:
            return self._count() > self._counted
        return bool(self._everyone) and self._stepped == self._everyone

    def forget(self) -> None:
        """What was taken until here is counted."""
        self._stepped: set[int] = set()
        self._counted = self._count()

    def detach(self) -> None:
        """Lets the optimizers go."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, number: int, *_: Any) -> None:
        self._stepped.add(number)

    def _count(self) -> int:
        # accelerate 1.15 utils/deepspeed.py: the engine steps inside of accelerator.backward().
        return 0 if self._engine is None else int(self._engine.global_steps)
