"""Trackers of the user's program: after a resume each shows one run, with each row once.

A save flushes every tracker and keeps its mark: which of its runs is used, and which rows that has.
A resume continues that run from the mark. Rows that a killed attempt logged after the save are
removed, as they are logged again. So is what a launch logs before its first batch: the run has
logged that before. docs/design/0016-trackers.md has the reasons.

No tracker is imported here: classes are looked up in what the program has imported. No error of a
tracker ends a run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from resumekit.trackers.csv_rows import CsvRows
from resumekit.trackers.event_files import EventFiles
from resumekit.trackers.mlflow_run import MlflowRun
from resumekit.trackers.trackio_run import TrackioRun

# In a manifest's details.
TRACKERS = "trackers"

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_MLFLOW = ("lightning.pytorch.loggers.mlflow", "pytorch_lightning.loggers.mlflow")
_CSV = ("lightning.fabric.loggers.csv_logs", "lightning_fabric.loggers.csv_logs")

_NOT_MARKED = "will not continue after a resume"

# Of one tracker, in plain values; ``kind`` and ``run`` are those of the ``Tracker``.
Mark = Mapping[str, Any]


class Tracker(Protocol):
    """One run of a tracker.

    Attributes:
        kind: the name of its adapter, in marks.
        name: of the tracker, for messages.
        run: which run of the tracker this launch uses, e.g. a directory.
    """

    kind: str
    name: str

    @property
    def run(self) -> str: ...

    def begin(self) -> None:
        """The run is new, and its first batch is next."""

    def mark(self) -> dict[str, Any]:
        """Flushes, and gives what ``resume`` needs."""
        ...

    def resume(self, mark: Mark, *, cuts: bool) -> None:
        """Continues the run of a mark; the first batch of this launch is next.

        Args:
            mark: of the run.
            cuts: whether the rows since the mark are logged again.
        """


class Trackers:
    """The trackers of one run.

    Args:
        warn: gets one line where a tracker cannot continue.
        is_on: False changes nothing of any tracker.

    Attributes:
        waits: whether ``begin`` has still to be called.
        holders: gives the objects that a framework logs with; their attributes are searched.
    """

    def __init__(self, warn: Callable[[str], None], *, is_on: bool) -> None:
        self._warn = warn
        self.waits = is_on
        self._live: list[Tracker] = []
        self.holders: Callable[[], Iterable[Any]] = tuple

    def begin(self, run_id: str, marks: Sequence[Mark], *, is_over: bool) -> None:
        """The first batch of a launch is next; further calls do nothing.

        Args:
            run_id: of the run.
            marks: of the checkpoint that it continues from.
            is_over: the run had finished, and the launch has logged all that it does.
        """
        if not self.waits:
            return
        self.waits = False
        with self._reported("trackers", "cannot be followed"):
            self._live = list(_find(self.holders(), run_id))
            new, left = list(self._live), list(marks)
            # One that the script gives the same place is the same; others are, in their order.
            for fits in (_is_same_run, _is_same_kind):
                for mark in list(left):
                    tracker = next((each for each in new if fits(each, mark)), None)
                    if tracker is not None:
                        new.remove(tracker)
                        left.remove(mark)
                        with self._reported(tracker.name, "cannot continue its run"):
                            tracker.resume(mark, cuts=not is_over)
            for each in new:
                with self._reported(each.name, _NOT_MARKED):
                    each.begin()

    def marks(self) -> list[Mark]:
        """The marks of all trackers, for a checkpoint; their rows are in their files then."""
        live, self._live = self._live, []
        marks: list[Mark] = []
        for each in live:
            with self._reported(each.name, _NOT_MARKED):
                marks.append({"kind": each.kind, "run": each.run, **each.mark()})
                self._live.append(each)
        return marks

    @contextmanager
    def _reported(self, name: str, failed: str) -> Iterator[None]:
        """One warning of an error in the body."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, training continues
            self._warn(f"{name} {failed}: {type(error).__name__}: {error}")


def _is_same_run(tracker: Tracker, mark: Mark) -> bool:
    return _is_same_kind(tracker, mark) and tracker.run == str(mark["run"])


def _is_same_kind(tracker: Tracker, mark: Mark) -> bool:
    return tracker.kind == str(mark["kind"])


def _find(holders: Iterable[Any], run_id: str) -> Iterator[Tracker]:
    """What a framework's objects are or hold; what is global; and every open SummaryWriter."""
    writers, csv_writers = _classes("SummaryWriter", _WRITERS), _classes("_ExperimentWriter", _CSV)
    loggers = _classes("MLFlowLogger", _MLFLOW)
    taken: set[int] = set()
    for holder in holders:
        if issubclass(type(holder), loggers):
            yield MlflowRun(holder)
        for value in list(getattr(holder, "__dict__", {}).values()):
            if id(value) in taken:
                continue
            if issubclass(type(value), writers) and EventFiles.may_follow(value):
                taken.add(id(value))
                yield EventFiles(value, run_id, holder)
            elif issubclass(type(value), csv_writers):
                taken.add(id(value))
                yield CsvRows(value, holder)
    yield from _global_runs()
    for value in gc.get_objects() if writers else ():  # nothing lists them
        is_other = issubclass(type(value), writers) and id(value) not in taken
        if is_other and EventFiles.may_follow(value):
            yield EventFiles(value, run_id)


def _global_runs() -> Iterator[Tracker]:
    if (mlflow := sys.modules.get("mlflow")) is not None and mlflow.active_run() is not None:
        yield MlflowRun()
    if (trackio := sys.modules.get("trackio.context_vars")) is not None:
        run = trackio.current_run.get()
        if run is not None and run.url is None:  # a local one
            yield TrackioRun(run)


def _classes(name: str, modules: Iterable[str]) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module in modules)
    return tuple(each for each in found if each is not None)
