"""When an optimizer step of DeepSpeed engines is complete, and gradients that one leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resumekit.requirements import require

require("deepspeed")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # noqa: E402
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer  # noqa: E402


class EngineSteps:
    """Watches the counters of a run's engines.

    A step is complete when an engine has stepped since the last one that was counted and no engine
    is inside an accumulation window. Engines that step at different frequencies need not all have
    stepped: a generator that is trained in every fifth batch has nothing accumulated in between.

    Args:
        engines: what ``deepspeed.initialize`` returns first.
    """

    def __init__(self, engines: Iterable[Any]) -> None:
        self._engines = tuple(engines)
        self.forget()
        self.begin_iteration()

    @property
    def is_complete(self) -> bool:
        """Whether a step was completed since ``forget``."""
        return self._now() != self._counted and not self.is_within_window

    @property
    def is_within_window(self) -> bool:
        """Whether an engine has accumulated gradients for a step that it has not taken yet."""
        return any(map(self._is_within_window, self._engines))

    def forget(self) -> None:
        """Counts the steps taken so far."""
        self._counted = self._now()

    def begin_iteration(self) -> None:
        """A batch goes to the loop."""
        self._at_start = self._now()

    def _now(self) -> dict[Any, int]:
        return {each: each.global_steps for each in self._engines}

    def _is_within_window(self, engine: Any) -> bool:
        # deepspeed 0.19 runtime/engine.py is_gradient_accumulation_boundary.
        is_managed = getattr(engine, "managed_gradient_accumulation", None)  # not in 0.19.0
        if is_managed is not None and not is_managed():
            return bool(engine._unmanaged_backward_count > 0)
        if engine._is_gradient_accumulation_boundary is not None:
            # Set by set_gradient_accumulation_boundary(); some loops reset it after the step.
            has_stepped = engine.global_steps > self._at_start[engine]
            return not (engine._is_gradient_accumulation_boundary or has_stepped)
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def has_leftover_gradients(engine: Any) -> bool:
    """Whether ZeRO adds gradients to its next step that it already has between two windows.

    The backward pass of another engine leaves them where it goes through this engine's parameters.
    They are in private buffers, which no checkpoint holds. Without ZeRO they are in ``.grad``.
    """
    zero = engine.optimizer
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        # deepspeed 0.19 zero/stage3.py partition_grads, clear_backward_seen_flag, _pre_step.
        return zero.micro_step_id > 0 or bool(zero._epilogue_ran_this_backward)
    if not isinstance(zero, DeepSpeedZeroOptimizer):
        return False
    # deepspeed 0.19 zero/stage_1_and_2.py independent_gradient_partition_epilogue, step; with
    # offload async_accumulate_grad_in_cpu_via_gpu. Otherwise the next backward pass replaces them.
    if zero.cpu_offload:
        return bool(zero.micro_step_id >= 0)
    compact = filter(zero._use_compact_grad_partition_buffer, zero.averaged_gradients)
    kept = [*zero.all_grad_tensors.values(), *map(zero.averaged_gradients.get, compact)]
    return any(gradients is not None for gradients in kept)
