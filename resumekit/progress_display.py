"""Progress of work that may take long: a bar on a terminal, a few log lines elsewhere.

Nothing is shown of what takes less than 2 seconds. The threads that do the work draw it. There is
no other one, and no stream is replaced, as a data loader may fork meanwhile. A notebook gets log
lines.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from resumekit.log import logger, terminal
from resumekit.printable import printable

# Takes how much was done since the last call, by any thread.
Advance: TypeAlias = Callable[[int], None]

BYTES = "bytes"

_BAR_SECONDS = 2.0  # until the bar is shown
_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0  # until the first log line; the next ones follow at ten times as long
_BAR_WIDTH = 30
_UNITS = ("B", "KB", "MB", "GB", "TB")


@contextmanager
def show_progress(
    what: str, total: int | None, *, unit: str = BYTES, shown: bool = True
) -> Iterator[Advance]:
    """Shows how far the body is, and at its end what it took.

    Args:
        what: what is being done, e.g. ``"verifying runs/a"``.
        total: how much there is to do; None if that is not known.
        unit: what is counted, e.g. ``"batches"``.
        shown: whether this process shows anything: rank 0 does.

    Yields:
        What takes the progress.
    """
    if not shown:
        yield lambda number: None
        return
    display = _Display(what, total, unit)
    try:
        yield display.advance
    except BaseException:
        display.erase()
        raise
    display.finish()


class _Display:
    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what = printable(what)
        self._total = total
        self._unit = unit
        self._count = 0
        self._began = time.monotonic()
        self._terminal = terminal()
        self._next_seconds = _LINE_SECONDS if self._terminal is None else _BAR_SECONDS
        self._was_shown = False
        self._lock = threading.Lock()  # of this object, which no forked child uses

    def advance(self, number: int) -> None:
        """Some work was done."""
        with self._lock:
            self._count += number
            seconds = time.monotonic() - self._began
            if seconds >= self._next_seconds:
                self._show(seconds)

    def _show(self, seconds: float) -> None:
        self._was_shown = True
        if self._terminal is None:
            logger.info("%s: %s", self._what, self._state(seconds))
            self._next_seconds = 10 * seconds
        else:
            self._terminal.draw(self._bar(seconds))
            self._next_seconds = seconds + _REDRAW_SECONDS

    def finish(self) -> None:
        """The work is done."""
        self.erase()
        if self._was_shown:
            took = _rounded(time.monotonic() - self._began)
            logger.info("%s: %s in %s", self._what, amount(self._count, None, self._unit), took)

    def erase(self) -> None:
        """Removes the bar."""
        if self._terminal is not None:
            self._terminal.erase()

    def _state(self, seconds: float) -> str:
        text = amount(self._count, self._total, self._unit)
        if self._total is None or not 0 < self._count < self._total:
            return text
        left = seconds / self._count * (self._total - self._count)
        return f"{text}, about {_rounded(left)} left"

    def _bar(self, seconds: float) -> str:
        from rich.console import Console  # most runs show nothing, and need not load it
        from rich.progress_bar import ProgressBar
        from rich.segment import Segments
        from rich.table import Table
        from rich.text import Text

        # Not rich's own live display: it hides the cursor, which a killed job leaves hidden.
        console = Console(file=sys.stderr, force_terminal=True)
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True, overflow="ellipsis")
        total = self._count if self._total is None else self._total
        done = min(self._count, total)
        bar = ProgressBar(total=total, completed=done, width=_BAR_WIDTH if self._total else 0)
        row.add_row(Text(self._what), bar, Text(self._state(seconds), no_wrap=True))
        options = console.options.update(width=console.width - 1)
        with console.capture() as capture:
            console.print(Segments(console.render_lines(row, options)[0]), end="")
        return capture.get()


def amount(count: int, total: int | None, unit: str) -> str:
    """How much was done, e.g. ``"3.1 of 12.4 GB"`` or ``"7 of 40 batches"``."""
    if unit != BYTES:
        return f"{count} {unit}" if total is None else f"{count} of {total} {unit}"
    if total is None:
        return human_bytes(count)
    size, symbol = human_bytes(total).split()
    scale = 1000.0 ** _UNITS.index(symbol)
    done = f"{min(count, total) / scale:.{0 if symbol == _UNITS[0] else 1}f}"
    return f"{done} of {size} {symbol}"


def human_bytes(num_bytes: float) -> str:
    """A size such as ``1.5 GB``: at most one decimal, powers of 1000."""
    size, unit = float(num_bytes), _UNITS[0]
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == _UNITS[0] else f"{size:.1f} {unit}"


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"
