"""The training of ``workloads``, with a signal that comes at some instant of its loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from workloads import train

_POLL_SECONDS = 0.001


def train_until_asked(
    directory: str,
    *,
    options: dict[str, Any],
    after_seconds: float | None = None,
    rank: int = 0,
    name: str = "SIGTERM",
) -> None:
    """Trains, and one rank gets the signal so long after the run has begun to listen for it."""
    if after_seconds is not None and int(os.environ["RANK"]) == rank:
        number = signal.Signals[name]
        threading.Thread(target=_ask, args=(number, after_seconds), daemon=True).start()
    train(directory, **options)


def _ask(number: signal.Signals, after_seconds: float) -> None:
    ignored = (signal.SIG_DFL, signal.default_int_handler)
    while signal.getsignal(number) in ignored:
        time.sleep(_POLL_SECONDS)
    time.sleep(after_seconds)
    if signal.getsignal(number) not in ignored:  # the run may be over
        os.kill(os.getpid(), number)
