"""trackio: the current run of ``trackio.init``, by its id, and its rows in the local SQLite file.

trackio has no call that writes its queue or removes rows, so a save writes the queue as its own
thread does, and a resume deletes rows from its file. A run on a Space or a server is not followed.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

_TABLES = ("metrics", "system_metrics", "alerts")


class TrackioRun:
    """A run of trackio.

    Args:
        used: the run object, which the script may have, too: it is changed, not replaced.
    """

    kind = name = "trackio"

    def __init__(self, used: Any) -> None:
        self._used = used
        self._storage = sys.modules["trackio.sqlite_storage"].SQLiteStorage

    @property
    def run(self) -> str:
        """Its id."""
        return str(self._used.id)

    def begin(self) -> None:
        """Nothing is to be done."""

    def mark(self) -> dict[str, Any]:
        """The number of the last row in each table."""
        self._write_queue()
        with self._file() as file:
            rows = {table: _last_row(file, table, self.run) for table in _TABLES}
        # trackio 0.43 run.py Run.log: the step of a row without one.
        next_step = self._used._next_step  # noqa: SLF001
        return {"name": self._used.name, "rows": rows, "next_step": next_step}

    def resume(self, mark: Mapping[str, Any], *, cuts: bool) -> None:
        """Logs to the run of the mark, whose later rows are deleted.

        Raises:
            FileNotFoundError: its rows are not there.
        """
        used, there, rows = self._used, str(mark["run"]), mark["rows"]
        self._write_queue()
        with self._file() as file:
            if _last_row(file, "metrics", there) < rows["metrics"]:
                path = self._storage.get_project_db_path(used.project)
                raise FileNotFoundError(f"{path} lacks rows of the run {mark['name']}")
            for table in _TABLES if cuts else ():
                statement = f"DELETE FROM {table} WHERE run_id = ? AND id > ?"
                file.execute(statement, (there, rows[table]))
        if self.run != there:
            self._storage.delete_run(used.project, used.name, run_id=self.run)
            used.id, used.name = there, mark["name"]
        used._next_step = mark["next_step"]  # noqa: SLF001

    def _write_queue(self) -> None:
        # trackio 0.43 run.py Run._local_batch_sender, which runs twice a second.
        with self._used._client_lock:  # noqa: SLF001
            self._used._flush_queues_inline()  # noqa: SLF001

    @contextmanager
    def _file(self) -> Iterator[sqlite3.Connection]:
        path = self._storage.init_db(self._used.project)  # it is there, with its tables
        with closing(sqlite3.connect(path, timeout=30)) as file, file:
            yield file


def _last_row(file: sqlite3.Connection, table: str, run_id: str) -> int:
    statement = f"SELECT MAX(id) FROM {table} WHERE run_id = ?"
    return int(file.execute(statement, (run_id,)).fetchone()[0] or 0)
