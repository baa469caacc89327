"""The user state of a run's models: what their ``state_dict`` does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from resumekit.capture.naming import by_key
from resumekit.capture.user_state.slots import Holder
from resumekit.capture.user_state.tracker import UserState
from resumekit.state import Slot, StateComponent

_SUFFIX = "attributes"


def attribute_components(model: Any, others: Iterable[Any] = ()) -> tuple[StateComponent, ...]:
    """The attributes of modules as components: each rank has its own.

    They are flags (``requires_grad``, ``training``), buffers with ``persistent=False``, and
    attributes. A module with ``get_extra_state`` says itself which of its attributes are state.

    Args:
        model: a module, or a dict of named ones, as the script has made them.
        others: what else of the run is saved: optimizers with their parameters, averages.
    """
    models = by_key(Slot.MODEL, model)
    given = [*models.values(), *others]
    return tuple(
        UserState(
            {key.replace("/", "."): Holder(module, is_component=True)},
            key=f"{key}/{_SUFFIX}",
            foreign=lambda: [*given, *trained_parameters(given)],
        ).component()
        for key, module in models.items()
    )


def trained_parameters(objects: Iterable[Any]) -> Iterator[Tensor]:
    """The parameters of the optimizers among some objects, which are saved with them."""
    for each in objects:
        for group in getattr(each, "param_groups", None) or ():
            yield from group["params"]
