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
from typing import Any, Protocol

from resumekit.trackers.csv_rows import CsvRows
from resumekit.trackers.event_files import EventFiles

# In a manifest's details.
TRACKERS = "trackers"

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_CSV = ("lightning.fabric.loggers.csv_logs", "lightning_fabric.loggers.csv_logs")

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

    def resume(self, mark: Mark) -> None:
        """Continues the run of a mark from there; the first batch of this launch is next."""


class Trackers:
    """The trackers of one run.

    Args:
        warn: gets one line where a tracker cannot continue.
        is_on: False changes nothing of any tracker.

    Attributes:
        holders: gives the objects that a framework logs with; their attributes are searched.
    """

    def __init__(self, warn: Callable[[str], None], *, is_on: bool) -> None:
        self._warn = warn
        self._is_on = is_on
        self._live: list[Tracker] = []
        self.holders: Callable[[], Iterable[Any]] = tuple

    def begin(self, run_id: str, marks: Sequence[Mark]) -> None:
        """The first batch of a launch is next.

        Args:
            run_id: of the run.
            marks: of the checkpoint that it continues from.
        """
        if not self._is_on:
            return
        self._live = list(_find(self.holders(), run_id))
        new = list(self._live)
        # One that the script gives the same place is the same; others are, in their order.
        for fits in (_is_same_run, _is_same_kind):
            for mark in list(marks):
                tracker = next((each for each in new if fits(each, mark)), None)
                if tracker is not None:
                    new.remove(tracker)
                    marks = [each for each in marks if each is not mark]
                    self._guarded(tracker, "cannot continue its run", tracker.resume, mark)
        for each in new:
            self._guarded(each, "will not continue after a resume", each.begin)

    def marks(self) -> list[Mark]:
        """The marks of all trackers, for a checkpoint; their rows are in their files then."""
        marks: list[Mark] = []
        for each in list(self._live):
            found = self._guarded(each, "will not continue after a resume", each.mark)
            if found is not None:
                marks.append({"kind": each.kind, "run": each.run, **found})
        return marks

    def _guarded(
        self, tracker: Tracker, failed: str, call: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, training goes on
            self._live.remove(tracker)
            self._warn(f"{tracker.name} {failed}: {type(error).__name__}: {error}")
            return None


def _is_same_run(tracker: Tracker, mark: Mark) -> bool:
    return _is_same_kind(tracker, mark) and tracker.run == str(mark["run"])


def _is_same_kind(tracker: Tracker, mark: Mark) -> bool:
    return tracker.kind == str(mark["kind"])


def _find(holders: Iterable[Any], run_id: str) -> Iterator[Tracker]:
    """What a framework's objects hold; and every open SummaryWriter, which nothing lists."""
    writers, csv_writers = _classes("SummaryWriter", _WRITERS), _classes("_ExperimentWriter", _CSV)
    taken: set[int] = set()
    for holder in holders:
        for value in list(getattr(holder, "__dict__", {}).values()):
            if id(value) in taken:
                continue
            if issubclass(type(value), writers) and EventFiles.may_follow(value):
                taken.add(id(value))
                yield EventFiles(value, run_id, holder)
            elif issubclass(type(value), csv_writers):
                taken.add(id(value))
                yield CsvRows(value, holder)
    for value in gc.get_objects() if writers else ():
        is_other = issubclass(type(value), writers) and id(value) not in taken
        if is_other and EventFiles.may_follow(value):
            yield EventFiles(value, run_id)


def _classes(name: str, modules: Iterable[str]) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module in modules)
    return tuple(each for each in found if each is not None)
