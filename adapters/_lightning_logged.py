"""What the epoch under way has logged: metrics with their sums, as plain values.

lightning 2.6 trainer/connectors/logger_connector/result.py.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from resumekit.adapters._lightning_package import (
    Metadata,
    ResultCollection,
    ResultMetric,
    Sync,
)


def as_plain(results: ResultCollection) -> dict[str, Any]:
    """Each metric that was logged since the epoch began; one of a process group has only sums."""
    waiting = results.waiting if isinstance(results, Results) else {}
    logged = {key: _plain(metric) for key, metric in results.items() if not metric.has_reset}
    return {**waiting, **logged}


def _plain(metric: Any) -> dict[str, Any]:
    meta, cache = metric.meta, metric._forward_cache
    state = {
        "sums": dict(metric.metric_state) if metric.is_tensor else {},
        "begins_with": dict(metric._defaults),  # in the precision that it was first logged in
        "last": cache if isinstance(cache, torch.Tensor) else None,
        "meta": None,
    }
    if meta.sync.group is None:
        plain = {each.name: getattr(meta, each.name) for each in fields(meta)}
        reduce_fx, sync = plain.pop("reduce_fx"), plain.pop("_sync")
        name = reduce_fx.__name__
        state["meta"] = {
            **plain,
            "reduce_fx": name,
            "of_torch": reduce_fx is getattr(torch, name),
            "synchronizes": sync.should,
            "rank_zero_only": sync.rank_zero_only,
            "has_function": sync.fn is not Sync.no_op,
        }
    return state


class Results(ResultCollection):
    """What the epoch has logged, where it goes on from an interrupted run's.

    Args:
        saved: what ``as_plain`` gave.
        trainer: the Trainer, whose module holds the torchmetrics.

    Attributes:
        waiting: what was saved of metrics of a process group, until they are logged again.
    """

    def __init__(self, saved: Mapping[str, Any], trainer: Any) -> None:
        super().__init__(training=True)
        self.waiting = {key: each for key, each in saved.items() if each["meta"] is None}
        for key, metric in _as_metrics(saved, trainer):
            super().__setitem__(key, metric)

    def take_not_logged_again(self) -> tuple[str, ...]:
        """The metrics for which nothing was logged since the resume, when their epoch ends."""
        names = tuple(self.waiting)
        self.waiting = {}
        return names

    def __setitem__(self, key: str, metric: Any) -> None:
        if key in self.waiting:
            vars(metric).update(self.waiting.pop(key)["sums"])
        super().__setitem__(key, metric)


def _as_metrics(saved: Mapping[str, Any], trainer: Any) -> Iterator[tuple[str, Any]]:
    modules = dict(trainer.lightning_module.named_modules())
    for key, state in saved.items():
        if state["meta"] is None:
            continue
        meta = dict(state["meta"])
        home, name = torch if meta.pop("of_torch") else builtins, meta.pop("reduce_fx")
        sync = Sync(
            _should=meta.pop("synchronizes"),
            rank_zero_only=meta.pop("rank_zero_only"),
            fn=trainer.strategy.reduce if meta.pop("has_function") else Sync.no_op,
        )
        metadata = Metadata(**meta, reduce_fx=getattr(home, name))
        metadata.sync = sync
        metric: Any = ResultMetric(metadata, is_tensor=bool(state["sums"]))
        metric._defaults.update(state.get("begins_with", {}))  # an older checkpoint has none
        vars(metric).update(state["sums"], _forward_cache=state["last"], _update_count=1)
        if not metric.is_tensor:
            metric.value = modules[meta["metric_attribute"]]
        yield key, metric.to(trainer.strategy.root_device)
