"""DeepSpeed: ZeRO's partitions by parameter name, without pickle; the loop is plain PyTorch's.

Example:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    checkpointer = Checkpointer(engine, "runs/a", save_every=500)
    for batch in checkpointer.batches(loader, epochs=3):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

Several engines, as in a GAN: ``Checkpointer({"D": engine_d, "G": engine_g}, "runs/a")``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer as _Checkpointer
from resumekit.errors import ConfigurationError
from resumekit.frameworks.deepspeed import (
    engine_components,
    engine_faults,
    has_leftover_gradients,
    is_within_window,
    require_resumable,
)
from resumekit.requirements import check_tested
from resumekit.run.loop import Loop
from resumekit.run.options import Options, checked_extras, require_order
from resumekit.run.run import RunState
from resumekit.state import CaptureLine, Fidelity, Slot, StateComponent

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run.options import OptionKeywords

__all__ = ["Checkpointer"]

_LEFTOVER = (
    "ZeRO adds gradients of another engine's backward pass to this engine's next step; "
    "call requires_grad_(False) on this module for that pass"
)


class Checkpointer(_Checkpointer):
    """A Checkpointer for one or several DeepSpeed engines, made after ``deepspeed.initialize``.

    It saves each engine's module, optimizer, lr_scheduler and counters, at ZeRO stages 0 to 3. One
    engine is stored under the names of the slots, several under the names that you give, e.g.
    ``model/generator``. ``step()`` is optional: ``engine.global_steps`` shows when an optimizer
    step was taken. With several engines an iteration of the loop counts as one step when at least
    one engine has stepped and none is inside an accumulation window.

    Args:
        engine: what ``deepspeed.initialize`` returns first, or a dict of engines by name.
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.run.options.Options``.

    Raises:
        ConfigurationError: an argument is no engine, or the same engine twice, or an engine uses a
            feature that cannot be resumed yet.
        InexactError: ``strict=True``, and this version of DeepSpeed lacks what the adapter needs.
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
        extras = checked_extras(extras)
        self._engines = engines = _by_name(engine)
        check_tested(
            "deepspeed",
            "torch",
            found=[fault for each in engines.values() for fault in engine_faults(each)],
            strict=Options.from_keywords(options).strict,
            warns=next(iter(engines.values())).global_rank == 0,
        )
        self._steps = EngineSteps(engines.values())
        super().__init__(
            directory,
            components=tuple(_components(engines, ema)),
            extras=extras,
            generators=generators,
            make_loop=partial(EngineLoop, steps=self._steps),
            **options,
        )
        self._run.reporter.add_finding(self._leftover_gradients)

    def _leftover_gradients(self) -> Iterator[CaptureLine]:
        if self._steps.is_within_window:
            return
        for name, engine in self._engines.items():
            if has_leftover_gradients(engine):
                key = f"{Slot.MODEL.value}/{name}" if name else Slot.MODEL.value
                yield CaptureLine(f"{key}/gradients", Fidelity.LOST, _LEFTOVER)


class EngineLoop(Loop):
    """A loop whose steps are those of engines.

    Args:
        run: the run.
        steps: of its engines.
    """

    def __init__(self, run: RunState, *, steps: EngineSteps) -> None:
        super().__init__(run)
        self._steps = steps

    def at_step_boundary(self) -> bool:
        if self._has_counted or not self._steps.is_complete:
            return False
        self._steps.forget()
        return True

    def count_taken_step(self) -> None:
        if not self.in_step or self._has_counted:
            self._steps.forget()  # a resume has moved the counters, or it is the same iteration
        elif self._steps.is_complete:
            self.step(0, {})

    def begin_iteration(self) -> None:
        self._steps.begin_iteration()

    def may_save(self) -> bool:
        """Not while another engine is in an accumulation window, after a counted step."""
        is_open = self._steps.is_within_window and not self.run.options.saves_gradients
        return super().may_save() and not is_open

    @property
    def _has_counted(self) -> bool:
        """Whether this iteration's one step of several engines is counted."""
        return self.stepped and self._steps.are_several


class EngineSteps:
    """Whether an optimizer step is complete, from the counters of a run's engines.

    A step is complete when an engine has stepped since the last one that was counted and no engine
    is inside an accumulation window. Engines may step at different frequencies: a generator that is
    trained in every fifth batch has nothing accumulated in between.

    Args:
        engines: what ``deepspeed.initialize`` returns first.
    """

    def __init__(self, engines: Iterable[Any]) -> None:
        self._engines = tuple(engines)
        self.forget()
        self.begin_iteration()

    @property
    def are_several(self) -> bool:
        """Whether there is more than one engine."""
        return len(self._engines) > 1

    @property
    def is_complete(self) -> bool:
        """Whether a step was completed since ``forget``."""
        return self._now() != self._counted and not self.is_within_window

    @property
    def is_within_window(self) -> bool:
        """Whether an engine has accumulated gradients for a step that it has not taken yet."""
        begun = self._at_start.items()
        return any(is_within_window(engine, steps_before=steps) for engine, steps in begun)

    def forget(self) -> None:
        """Counts the steps taken so far."""
        self._counted = self._now()

    def begin_iteration(self) -> None:
        """The loop gets a batch."""
        self._at_start = self._now()

    def _now(self) -> dict[Any, int]:
        return {each: each.global_steps for each in self._engines}


def _by_name(given: Any) -> dict[str, Any]:
    """The engines by name; one that has none under the empty name.

    Raises:
        ConfigurationError: see ``Checkpointer``.
    """
    if isinstance(given, (list, tuple)):
        raise ConfigurationError(
            "engine",
            found=f"a {type(given).__name__}",
            expected="one engine, or a dict of engines by name",
            remedy='Pass {"first": ..., "second": ...}',
        )
    if not isinstance(given, Mapping):
        require_resumable(given)
        return {"": given}
    if not given:
        raise ConfigurationError("engine", found="an empty dict", expected="at least one engine")
    names: dict[int, str] = {}
    for name, engine in given.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigurationError(
                "engine", found=f"the name {name!r}", expected="a non-empty string without '/'"
            )
        require_resumable(engine, name=f"engine {name!r}")
        first = names.setdefault(id(engine), name)
        if first != name:
            raise ConfigurationError(
                f"engine {name!r}", found=f"the engine {first!r} again", expected="another engine"
            )
    return dict(given)


def _components(engines: Mapping[str, Any], ema: Any) -> Iterator[StateComponent]:
    for name, engine in engines.items():
        yield from engine_components(engine, name=name, ema=ema)
        ema = None  # once, with the first
