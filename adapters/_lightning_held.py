"""What a user's callbacks hold in attributes, and the metrics that are no part of the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resumekit.adapters._lightning_callbacks import overrides
from resumekit.adapters._lightning_metrics import Metrics
from resumekit.adapters._lightning_package import Callback
from resumekit.capture import HeldState, PlainValues, by_class_and_ordinal
from resumekit.contract import SharingPattern, StateComponent
from resumekit.layout import WorldChange

_KEY = "callbacks/held"
_LIBRARIES = ("lightning", "pytorch_lightning", "resumekit")
_MODULE = "module"
_FIELDS = ("attributes", "metrics")


class Held:
    """What callbacks collect that declare no state, and metrics in attributes of them and others.

    Args:
        trainer: the Trainer, with its strategy set up.
        others: what else is saved already.
    """

    def __init__(self, trainer: Any, *, others: Iterable[Any]) -> None:
        given = list(others)

        def foreign() -> list[Any]:
            schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
            optimizers = [*trainer.optimizers, *trainer.strategy._lightning_optimizers]
            beside = [trainer.datamodule, *trainer.callbacks, *trainer.loggers, *given]
            return [trainer.lightning_module, trainer.model, *optimizers, *schedulers, *beside]

        plain = [each for each in trainer.callbacks if _is_of_user(each)]
        holders = {name: _Attributes(each) for name, each in by_class_and_ordinal(plain).items()}
        left_out: dict[str, frozenset[str]] = dict.fromkeys(holders, frozenset())
        module = trainer.lightning_module
        self._attributes = HeldState(holders, key=_KEY, foreign=foreign, left_out=left_out)
        self._metrics = Metrics(module, {**holders, _MODULE: _Attributes(module)})
        self._pending: Mapping[str, Any] | None = None
        # One that adds to the checkpoint by a hook says itself what its state is.
        self._plain = [each for each in plain if not overrides(each, "on_save_checkpoint")]
        self._counted: PlainValues | None = None  # from the first batch on

    def component(self) -> StateComponent:
        """Each rank has its own."""
        return StateComponent(_KEY, self, SharingPattern.PER_RANK, required=False)

    def state_dict(self) -> dict[str, Any]:
        if self._pending is not None:
            return dict(self._pending)
        held = (self._attributes.state_dict(), self._metrics.state_dict())
        return dict(zip(_FIELDS, held, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``put_back``: hooks such as ``on_train_start`` clear some."""
        self._pending = state
        return self._attributes.load_state_dict(state["attributes"])

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What one former rank held."""
        return dict(states[change.model_rank]), ()

    def put_back(self) -> None:
        """Gives everything what it held, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._attributes.put_back()
            self._metrics.load_state_dict(pending["metrics"])
        if self._counted is None:
            self._counted = PlainValues(by_class_and_ordinal(self._plain))

    def not_saved(self) -> str:
        """What to tell of counts in callbacks that changed since the last call, and are lost."""
        if self._counted is None:
            return ""
        remedy = "keep it in extras=, or in state_dict() and load_state_dict() of the callback"
        return self._counted.remark(saved=self._attributes.names, remedy=remedy)


class _Attributes:
    """The attributes of an object, without its own state, which is empty or saved elsewhere."""

    def __init__(self, of: Any) -> None:
        self.__dict__ = vars(of)


def _is_of_user(callback: Any) -> bool:
    """Whether no class of Lightning's stands between it and ``Callback``; it declares no state."""
    classes = [each for each in type(callback).__mro__ if issubclass(each, Callback)]
    of_library = any(each.__module__.partition(".")[0] in _LIBRARIES for each in classes[:-1])
    return not of_library and type(callback).state_dict is Callback.state_dict
