"""Lightning's CSVLogger: the rows of its ``metrics.csv``.

It has no argument to continue a file, and removes the file of a version that is used again.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from resumekit.trackers.event_files import move_holder, remove

# Beside the file: a hard link to it, for a launch that removes it.
_KEPT = ".metrics.csv.resumekit"


class CsvRows:
    """The rows of one CSVLogger.

    Args:
        writer: its ``experiment``.
        holder: the CSVLogger.
    """

    kind, name = "csv", "CSVLogger"

    def __init__(self, writer: Any, holder: Any) -> None:
        self._writer = writer
        self._holder = holder

    @property
    def run(self) -> str:
        """The directory of the file."""
        return os.path.abspath(str(self._writer.log_dir))

    def begin(self) -> None:
        """Nothing is to be done."""

    def mark(self) -> dict[str, Any]:
        """The number of rows."""
        self._writer.save()
        path, kept = Path(self._writer.metrics_file_path), Path(self.run, _KEPT)
        num_rows = len(_read(path)[1])
        if num_rows and not (kept.exists() and kept.samefile(path)):
            with suppress(OSError):  # a file system without hard links
                kept.unlink(missing_ok=True)
                kept.hardlink_to(path)
        return {"num_rows": num_rows, "version": self._holder.version}

    def resume(self, mark: Mapping[str, Any], *, cuts: bool) -> None:
        """Keeps the rows of the mark, and appends to them.

        Raises:
            FileNotFoundError: they are not there.
        """
        here, there = Path(self.run), Path(mark["run"])
        path = there / Path(self._writer.metrics_file_path).name
        found = path if path.exists() else there / _KEPT
        names, rows = _read(found)
        if len(rows) < mark["num_rows"]:
            raise FileNotFoundError(f"{path} has {len(rows)} rows of {mark['num_rows']}")
        if here != there:
            remove(Path(self._writer.metrics_file_path))
        _write(path, names, rows[: mark["num_rows"]] if cuts else rows)
        self._writer.metrics, self._writer.metrics_keys = [], names
        self._writer.log_dir, self._writer.metrics_file_path = str(there), str(path)
        move_holder(self._holder, here, there, mark["version"])


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    if not path.exists():
        return [], []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def _write(path: Path, names: list[str], rows: list[dict[str, str]]) -> None:
    if not rows:
        path.unlink(missing_ok=True)
        return
    draft = path.with_suffix(".draft")
    with open(draft, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    draft.replace(path)
