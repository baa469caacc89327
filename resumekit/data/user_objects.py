"""The user's objects that training loaders call: datasets, collators, samplers."""

from __future__ import annotations

from torch.utils.data import IterableDataset, Subset

from resumekit.capture import Holder
from resumekit.capture.user_state import attributes_set_in, is_user_object
from resumekit.data.source import Source
from resumekit.state import Stateful

# Loaders of frameworks that fetch one batch ahead of the step.
_AHEAD = "ahead"


def user_objects(source: Source) -> dict[str, Holder]:
    """The objects of user classes in the main process that a loader calls, by name.

    An object with ``state_dict`` is saved with the position, as are random generators. What
    ``set_epoch`` sets follows from the epoch.

    Args:
        source: the training loader.
    """
    loader = source.loader
    itself = loader if isinstance(loader, IterableDataset) else None
    given = {
        "dataset": getattr(loader, "dataset", itself),
        "collate_fn": getattr(loader, "collate_fn", None),
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": getattr(loader, "batch_sampler", None),
    }
    found: dict[str, Holder] = {}
    for name, each in given.items():
        value = each
        while type(value) is Subset:
            value = value.dataset
        value = getattr(value, "__self__", value)
        if is_user_object(value) and not isinstance(value, Stateful):
            found[f"{source.name}.{name}"] = Holder(
                value,
                left_out=attributes_set_in(value, "set_epoch"),
                has_generators=False,
                is_read_ahead=source.kind == _AHEAD,
            )
    return found
