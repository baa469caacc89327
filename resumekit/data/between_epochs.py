"""Settings of a loader that a script has changed since a checkpoint between two epochs.

Inside an epoch such a change is refused, because the rest of the epoch could not be found. Between
two epochs it can be followed, and is reported with both values: it may be a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from resumekit.data.orders import DRAWN, IN_ORDER, KEYED, SEEDED, SEEDED_BY_EPOCH

# What of a loader's geometry is the user's setting, and how users call it. A changed batch size or
# number of ranks is reported elsewhere, since a run may be allowed to follow it inside an epoch.
_SETTINGS = {"num_samples": "dataset length", "drop_last": "drop_last"}
_SHUFFLED = {DRAWN, SEEDED, SEEDED_BY_EPOCH, KEYED}


def sampler_setting(order_name: Mapping[str, Any]) -> dict[str, Any]:
    """What names a sampler's orders in all epochs: its kind, and its seed where it has one."""
    return {key: value for key, value in order_name.items() if key in ("kind", "seed", "sampler")}


def followed_changes(
    state: Mapping[str, Any], geometry: Mapping[str, Any], sampler: Mapping[str, Any], where: str
) -> Iterator[str]:
    """A line for each setting of the script that differs and is used from the next epoch on.

    Args:
        state: the place that the checkpoint holds, between two epochs.
        geometry: that of this loader.
        sampler: its ``sampler_setting``.
        where: the loader's name.
    """
    then = state["geometry"]
    for key, noun in _SETTINGS.items():
        if key in then and then[key] != geometry.get(key):
            yield _line(where, noun, then[key], geometry.get(key), state["epoch"])
    before = state["sampler"]
    if before == sampler:
        return
    if before["kind"] == sampler["kind"] and before.get("seed") != sampler.get("seed"):
        yield _line(where, "seed", before.get("seed"), sampler.get("seed"), state["epoch"])
    else:
        yield _line(where, "order", _order(before), _order(sampler), state["epoch"])


def unused_seeds(saved: Mapping[str, Any], live: Mapping[str, Any], where: str) -> Iterator[str]:
    """A line for each torch generator whose seed differs; its restored state is used.

    Args:
        saved: the states of the loader's generators in the checkpoint, by name.
        live: the generators, before they are restored.
        where: the loader's name.
    """
    for name, generator in live.items():
        state = saved.get(name)
        if isinstance(generator, torch.Generator) and isinstance(state, torch.Tensor):
            former = torch.Generator(generator.device)
            former.set_state(state)
            then, now = former.initial_seed(), generator.initial_seed()
            if then != now:
                yield (
                    f"{where}: seed of {name}: the script says {now}, the checkpoint's {then} is "
                    "used; exclude={'data'} starts the data again with the script's"
                )


def _line(where: str, noun: str, then: Any, now: Any, epoch: int) -> str:
    return (
        f"{where}: {noun} was {then}, the script's {now} is used from epoch {epoch} on; "
        "restore it if that was a mistake"
    )


def _order(sampler: Mapping[str, Any]) -> str:
    kind, seed = sampler["kind"], sampler.get("seed")
    if kind == IN_ORDER:
        return "shuffle=False"
    if kind in _SHUFFLED:
        return "shuffle=True" + (f" with seed {seed}" if seed is not None else "")
    return f"that of a {sampler.get('sampler') or 'batch sampler'}"
