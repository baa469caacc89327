"""Messages of a run, through the logger ``resumekit``."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("resumekit")


def show_messages() -> None:
    """Shows INFO and above on standard error, unless the program has configured the logger.

    A program that gives the logger ``resumekit`` a handler or a level before the run starts decides
    itself what is shown and where. Idempotent.
    """
    if logger.handlers or logger.level != logging.NOTSET:
        return
    handler = _StandardError()
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a root handler would show each message a second time


def is_shown_on_terminal() -> bool:
    """Whether INFO goes to a terminal by our own handler, which a progress bar may then use."""
    is_ours = any(isinstance(handler, _StandardError) for handler in logger.handlers)
    return is_ours and logger.isEnabledFor(logging.INFO) and sys.stderr.isatty()


class _StandardError(logging.Handler):
    """Writes to ``sys.stderr`` as it is now: notebooks and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"{record.name}: {level}{super().format(record)}"
