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

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer as _Checkpointer
from resumekit.capture import REMEDIES
from resumekit.data import Feed
from resumekit.errors import ConfigurationError
from resumekit.frameworks.deepspeed import engine_components, require_resumable
from resumekit.frameworks.deepspeed_steps import EngineSteps, has_leftover_gradients
from resumekit.run import checked_extras, require_order
from resumekit.state import CaptureLine, Fidelity, Slot, StateComponent

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run import OptionKeywords

__all__ = ["Checkpointer"]

_REMEDIES = {
    **REMEDIES,
    Slot.MODEL: 'pass all engines as a dict, {{"{name}": {name}, ...}}, other modules in extras',
    Slot.OPTIMIZER: 'pass extras={{"{name}": {name}}}',
    Slot.GRAD_SCALER: 'pass extras={{"{name}": {name}}}',
    Slot.LR_SCHEDULER: 'the engine does not step it; pass extras={{"{name}": {name}}}',
}
_LEFTOVER = (
    "ZeRO adds gradients of another engine's backward pass to this engine's next step; "
    "call requires_grad_(False) on this module for that pass"
)


class Checkpointer(_Checkpointer):
    """A Checkpointer for a DeepSpeed engine, or several; made after ``deepspeed.initialize``.

    It takes each engine's module, optimizer, lr_scheduler and counters, at ZeRO stages 0 to 3. One
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
        ConfigurationError: something else than engines, one engine twice, or an engine that uses
            something that cannot be resumed yet.
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
        engines = _by_name(engine)
        self._engines = engines
        self._steps = EngineSteps(engines.values())
        super().__init__(
            directory,
            components=tuple(_components(engines, ema)),
            extras=extras,
            generators=generators,
            **options,
        )
        self._run.loop_check.remedies = _REMEDIES
        self._run.account.add_finding(self._leftover_gradients)

    def _at_step_boundary(self) -> bool:
        if self._has_counted:
            return False
        is_complete = self._steps.is_complete
        if is_complete:
            self._steps.forget()
        return is_complete

    def _count_taken_step(self) -> None:
        if not self._unsettled or self._has_counted:
            self._steps.forget()  # a resume has moved the counters, or it is the same iteration
        elif self._steps.is_complete:
            self.step()

    def _fetched(self, feed: Feed, *, follows: bool) -> None:
        super()._fetched(feed, follows=follows)
        if self._turns.leads(feed.names):
            self._steps.begin_iteration()

    def _may_save(self) -> bool:
        """Not while another engine is inside a window, after a step that was counted."""
        is_open = self._steps.is_within_window and not self._run.options.saves_gradients
        return super()._may_save() and not is_open

    @property
    def _has_counted(self) -> bool:
        """Whether this iteration's one step of several engines is counted."""
        return self._stepped and len(self._engines) > 1

    def _leftover_gradients(self) -> Iterator[CaptureLine]:
        if self._steps.is_within_window:
            return
        for name, engine in self._engines.items():
            if has_leftover_gradients(engine):
                key = f"{Slot.MODEL.value}/{name}" if name else Slot.MODEL.value
                yield CaptureLine(f"{key}/gradients", Fidelity.LOST, _LEFTOVER)


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
            remedy='Pass {"first": .., "second": ..}',
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
