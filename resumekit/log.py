"""Messages of a run, through the logger ``resumekit``."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from resumekit.errors import with_code
from resumekit.printable import printable

logger = logging.getLogger("resumekit")


def _escape(record: logging.LogRecord) -> bool:
    """Makes the message printable, whichever handler writes it."""
    message = record.getMessage()
    if not message.isprintable():
        record.msg, record.args = printable(message), ()
    return True


logger.addFilter(_escape)


def warn(code: str, message: str, *values: object) -> None:
    """Logs a warning. Every warning goes through here.

    Args:
        code: ends the message; ``resumekit explain RK-801`` prints what to do about it.
        message: what is wrong, with ``%s`` for each value.
        *values: of the message.
    """
    if logger.isEnabledFor(logging.WARNING):
        logger.warning("%s", with_code(message % values if values else message, code))


def show_messages() -> None:
    """Shows INFO and above on standard error, unless the program has configured the logger.

    A program that gives the logger ``resumekit`` a handler or a level before the run starts decides
    itself what is shown and where. Idempotent.
    """
    if logger.handlers or logger.level != logging.NOTSET:
        return
    handler = StandardError()
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a root handler would show each message a second time


def terminal() -> StandardError | None:
    """Our own handler if INFO goes to a terminal by it, which a progress bar may then use."""
    ours = [handler for handler in logger.handlers if isinstance(handler, StandardError)]
    is_shown = logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()
    return ours[0] if ours and is_shown else None


_ERASE_LINE = "\r\033[K"


class StandardError(logging.Handler):
    """Writes to ``sys.stderr`` as it is now: notebooks and tests replace it."""

    def __init__(self) -> None:
        super().__init__()
        self._has_bar = False

    def emit(self, record: logging.LogRecord) -> None:
        self.erase()
        line = self.format(record)
        if bars := sys.modules.get("tqdm"):  # above the bars that are drawn, not inside one
            bars.tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def draw(self, bar: str) -> None:
        """Replaces the bar in the terminal's last line, which the next message erases."""
        self.erase()
        self._has_bar = True
        with suppress(OSError, ValueError):  # a terminal that is gone must not stop a resume
            sys.stderr.write(f"{bar}\r")
            sys.stderr.flush()

    def erase(self) -> None:
        """Removes the bar, if there is one."""
        if self._has_bar:
            self._has_bar = False
            with suppress(OSError, ValueError):
                sys.stderr.write(_ERASE_LINE)
                sys.stderr.flush()


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"{record.name}: {level}{super().format(record)}"
