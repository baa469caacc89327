"""Distributes test files to pytest's workers by what their warm servers import."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_PRELOAD = re.compile(r"^ *(?:PRELOAD|preload) = (.+)$", re.MULTILINE)


class PreloadScheduling(LoadScopeScheduling):
    """Continues on a worker with a file that imports what its last file imports.

    A warm server takes seconds of CPU, and each worker starts its own. A worker without such a file
    takes one whose imports no other worker has in use, or else the first of those that are left.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        last = {
            each: self._preload_of(next(reversed(units)))
            for each, units in self.assigned_work.items()
            if units
        }
        newest = last.pop(node, None)

        def order(scope: str) -> tuple[bool, bool]:
            preload = self._preload_of(scope)
            return preload != newest, preload in last.values()

        self.workqueue.move_to_end(min(self.workqueue, key=order), last=False)
        super()._assign_work_unit(node)

    def _preload_of(self, scope: str) -> str:
        return _preload_of(self.config.rootpath / scope.partition("::")[0])


@cache
def _preload_of(path: Path) -> str:
    """What a test file writes as its ``PRELOAD``; empty for a file without one."""
    found = _PRELOAD.search(path.read_text(encoding="utf-8"))
    return found[1] if found else ""
