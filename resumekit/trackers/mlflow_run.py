"""MLflow: the active run, or that of Lightning's MLFlowLogger, by its id.

MLflow has no call that removes rows, so those that it has since the save are not sent again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_STARTED_MS = time.time_ns() // 10**6


class MlflowRun:
    """A run of MLflow.

    Args:
        holder: the MLFlowLogger, or None for the active run.

    Attributes:
        run: its id.
    """

    kind, name = "mlflow", "MLflow"

    def __init__(self, holder: Any = None) -> None:
        self._holder = holder
        self._mlflow: Any = sys.modules["mlflow"]
        self._client = self._mlflow.MlflowClient() if holder is None else holder.experiment
        used = self._mlflow.active_run().info if holder is None else holder
        self.run = str(used.run_id)

    def begin(self) -> None:
        """Nothing is to be done."""

    def mark(self) -> dict[str, Any]:
        """The time: rows have one. MLflow has those before it."""
        self._mlflow.flush_async_logging()
        return {"time_ms": time.time_ns() // 10**6}

    def resume(self, mark: Mapping[str, Any], *, cuts: bool) -> None:
        """Uses the run of the mark, and lets through what it has not since the mark."""
        here, there = self.run, str(mark["run"])
        data = self._client.get_run(there).data
        if here != there:
            self._mlflow.flush_async_logging()
            self._use(there)
            self.run = there
            if self._client.get_run(here).info.start_time >= _STARTED_MS:
                self._client.delete_run(here)
        keys = data.metrics if cuts else ()
        rows = (each for key in keys for each in self._client.get_metric_history(there, key))
        since = Counter((each.key, each.step) for each in rows if each.timestamp >= mark["time_ms"])
        if since:
            # mlflow 3.18 tracking/_tracking_service/client.py: one for each address.
            _Unsent(there, since).guard(self._client._tracking_client.store)  # noqa: SLF001

    def _use(self, run_id: str) -> None:
        if self._holder is None:
            self._mlflow.end_run()
            self._mlflow.start_run(run_id=run_id, nested=True)
        else:
            self._client.update_run(run_id, status="RUNNING")
            vars(self._holder)["_run_id"] = run_id


class _Unsent:
    """Leaves out rows that a run has, each once.

    Args:
        run_id: of the run.
        rows: how often it has each key and step.
    """

    def __init__(self, run_id: str, rows: Counter[tuple[str, int]]) -> None:
        self._run_id = run_id
        self._rows = rows

    def guard(self, store: Any) -> None:
        """All that logs to the store passes through here, for which MLflow has no hook."""
        for name in ("log_batch", "log_batch_async"):
            vars(store)[name] = functools.partial(self._log_batch, getattr(store, name))
        vars(store)["log_metric"] = functools.partial(self._log_metric, store.log_metric)

    def _log_batch(
        self, log: Any, run_id: str, metrics: Sequence[Any], *rest: Any, **named: Any
    ) -> Any:
        return log(run_id, self._unsent(run_id, metrics), *rest, **named)

    def _log_metric(self, log: Any, run_id: str, metric: Any) -> None:
        if self._unsent(run_id, [metric]):
            log(run_id, metric)

    def _unsent(self, run_id: str, metrics: Sequence[Any]) -> Sequence[Any]:
        if run_id != self._run_id:
            return metrics
        unsent = []
        for each in metrics:
            if self._rows[each.key, each.step]:
                self._rows[each.key, each.step] -= 1
            else:
                unsent.append(each)
        return unsent
