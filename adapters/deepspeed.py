"""DeepSpeed: ZeRO's partitions by parameter name, without pickle; the loop is plain PyTorch's.

Example:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    checkpointer = Checkpointer(engine, "runs/a", save_every=500)
    for batch in checkpointer.batches(loader, epochs=3):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer as _Checkpointer
from resumekit.capture.overlooked import REMEDIES, overlooked, variables_of
from resumekit.contract import Slot
from resumekit.engine.arguments import checked_extras, require_order
from resumekit.frameworks.deepspeed import engine_components, require_resumable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.engine.options import OptionKeywords

__all__ = ["Checkpointer"]

_REMEDIES = {
    **REMEDIES,
    Slot.LR_SCHEDULER: 'that the engine does not step; pass extras={{"{name}": {name}}}',
}


class Checkpointer(_Checkpointer):
    """A Checkpointer for a DeepSpeed engine; made after ``deepspeed.initialize``.

    It takes the engine's module, optimizer, lr_scheduler and counters, at ZeRO stages 0 to 3.
    ``step()`` is optional: ``engine.global_steps`` tells when an optimizer step was taken.

    Args:
        engine: what ``deepspeed.initialize`` returns first.
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.engine.options.Options``.

    Raises:
        ConfigurationError: the engine uses something that cannot be resumed yet.
    """

    def __init__(
        self,
        engine: Any,
        directory: str | Path,
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        require_order(engine, directory, call='Checkpointer(engine, "runs/a")')
        require_resumable(engine)
        extras = checked_extras(extras)
        self._engine = engine
        self._counted: int = engine.global_steps
        super().__init__(
            directory,
            components=tuple(engine_components(engine, ema=ema)),
            extras=extras,
            generators=generators,
            **options,
        )
        averages = [*ema.values()] if isinstance(ema, Mapping) else [ema]
        lines = overlooked(
            variables_of(sys._getframe(1)),
            [engine, engine.lr_scheduler, *averages, *extras.values()],
            remedies=_REMEDIES,
        )
        self._run.account.findings.append(lambda: lines)

    def _at_step_boundary(self) -> bool:
        steps, self._counted = self._counted, self._engine.global_steps
        return steps < self._counted

    def _count_taken_step(self) -> None:
        if not self._unsettled:
            self._counted = self._engine.global_steps  # a resume has moved it
        elif self._counted < self._engine.global_steps:
            self.step()
