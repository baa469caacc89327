"""Progress of long work: a bar on a pseudo-terminal, log lines without one."""

from __future__ import annotations

import logging
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from types import SimpleNamespace
from typing import TextIO

import pytest

from resumekit.log import logger, show_messages
from resumekit.progress_display import amount, human_bytes, show_progress

GB = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets: ``clock.now += 5``."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("resumekit.progress_display.time", clock)
    return clock


@pytest.fixture(autouse=True)
def _default_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that has configured nothing."""
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    logger.setLevel(logging.NOTSET)
    show_messages()
    yield
    logger.setLevel(level)


def set_standard_error(monkeypatch: pytest.MonkeyPatch, stream: TextIO) -> None:
    """For our modules alone: pytest sets ``sys.stderr`` itself when the test begins."""
    replaced = SimpleNamespace(modules={}, stderr=stream)
    monkeypatch.setattr("resumekit.progress_display.sys", replaced)
    monkeypatch.setattr("resumekit.log.sys", replaced)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard error is a pseudo-terminal; gives what was written to it since the last call."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:

        def written() -> str:
            stream.write("<end>")  # the kernel passes on what was written some time later
            stream.flush()
            text = ""
            while not text.endswith("<end>"):
                text += os.read(master, 1 << 16).decode()
            return text.removesuffix("<end>")

        set_standard_error(monkeypatch, stream)
        yield written
    os.close(master)


@pytest.fixture
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    stream = StringIO()
    set_standard_error(monkeypatch, stream)
    return stream


def work(clock: SimpleNamespace, seconds: int, *, total: int | None = 12_400_000_000) -> None:
    """Work of a number of seconds, as many parts."""
    size = 12_400_000_000 // seconds
    with show_progress("verifying runs/a", total) as advance:
        for _ in range(seconds):
            clock.now += 1.0
            advance(size)


# ---------------------------------------------------------------- on a terminal


def test_a_terminal_gets_a_bar_and_a_last_line(
    clock: SimpleNamespace, terminal: Callable[[], str]
) -> None:
    with show_progress("verifying runs/a", 12_400_000_000) as advance:
        clock.now += 1.9
        advance(1 * GB)
        assert terminal() == ""
        clock.now += 0.1
        advance(2 * GB)
        bar = terminal()
        assert bar.startswith("verifying runs/a ")
        assert bar.endswith("\r")
        assert "\n" not in bar
        assert "━" in bar
        assert "3.0 of 12.4 GB, about 6 s left" in bar
        clock.now += 0.1
        advance(1 * GB)
        assert terminal() == "", "not more often than the eye can follow"
        clock.now += 0.1
        advance(1 * GB)
        bar = terminal()
        assert bar.startswith("\r\x1b[Kverifying")
        assert "5.0 of 12.4 GB" in bar
        logger.warning("replaces the bar")
        assert terminal() == "\r\x1b[Kresumekit: WARNING: replaces the bar\r\n"
        clock.now += 10.0
        advance(0)
        terminal()
    assert terminal() == "\r\x1b[Kresumekit: verifying runs/a: 5.0 GB in 12 s\r\n"


def test_a_terminal_gets_nothing_of_what_is_quick(
    clock: SimpleNamespace, terminal: Callable[[], str]
) -> None:
    work(clock, 1)
    assert terminal() == ""


def test_the_bar_fits_a_narrow_terminal(
    clock: SimpleNamespace, terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    with show_progress("verifying " + "a/very/long/path" * 9, 12 * GB) as advance:
        clock.now += 3.0
        advance(GB)
        text = terminal().removesuffix("\r")
        assert 20 < len(text) < 40
        assert "\n" not in text


def test_an_error_leaves_no_bar(clock: SimpleNamespace, terminal: Callable[[], str]) -> None:
    def fail() -> None:
        with show_progress("verifying runs/a", 10) as advance:
            clock.now += 3.0
            advance(1)
            terminal()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert terminal() == "\r\x1b[K"


def test_no_stream_is_replaced_and_no_thread_is_started(
    clock: SimpleNamespace, terminal: Callable[[], str]
) -> None:
    streams, threads = (sys.stdout, sys.stderr), threading.enumerate()
    with show_progress("verifying runs/a", 10) as advance:
        clock.now += 3.0
        advance(1)
        assert "verifying" in terminal()
        assert (sys.stdout, sys.stderr) == streams
        assert threading.enumerate() == threads


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_a_program_that_wants_no_messages_gets_no_bar(
    clock: SimpleNamespace, terminal: Callable[[], str], level: int
) -> None:
    logger.setLevel(level)
    work(clock, 40)
    assert terminal() == ""


def test_a_program_with_a_handler_of_its_own_gets_log_lines(
    clock: SimpleNamespace, terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    work(clock, 20)
    assert terminal() == ""
    assert found == [
        "verifying runs/a: 6.2 of 12.4 GB, about 10 s left",
        "verifying runs/a: 12.4 GB in 20 s",
    ]


# ---------------------------------------------------------------- without one


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (9, []),
        (
            40,
            [
                "resumekit: verifying runs/a: 3.1 of 12.4 GB, about 30 s left",
                "resumekit: verifying runs/a: 12.4 GB in 40 s",
            ],
        ),
        (
            1000,
            [
                "resumekit: verifying runs/a: 0.1 of 12.4 GB, about 16 min left",
                "resumekit: verifying runs/a: 1.2 of 12.4 GB, about 15 min left",
                "resumekit: verifying runs/a: 12.4 of 12.4 GB",
                "resumekit: verifying runs/a: 12.4 GB in 17 min",
            ],
        ),
    ],
)
def test_a_file_gets_a_few_lines(
    clock: SimpleNamespace, no_terminal: StringIO, seconds: int, lines: list[str]
) -> None:
    work(clock, seconds)
    assert no_terminal.getvalue().splitlines() == lines


def test_an_unknown_total_is_left_out(clock: SimpleNamespace, no_terminal: StringIO) -> None:
    work(clock, 40, total=None)
    assert no_terminal.getvalue().splitlines() == [
        "resumekit: verifying runs/a: 3.1 GB",
        "resumekit: verifying runs/a: 12.4 GB in 40 s",
    ]


def test_other_ranks_show_nothing(clock: SimpleNamespace, no_terminal: StringIO) -> None:
    with show_progress("verifying runs/a", 10, shown=False) as advance:
        clock.now += 30.0
        advance(5)
    assert no_terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "total", "unit", "text"),
    [
        (3_100_000_000, 12_400_000_000, "bytes", "3.1 of 12.4 GB"),
        (7, 900, "bytes", "7 of 900 B"),
        (0, 0, "bytes", "0 of 0 B"),
        (15, 10, "bytes", "10 of 10 B"),  # a block that two tensors share is read twice
        (3_100_000, None, "bytes", "3.1 MB"),
        (7, 40, "batches", "7 of 40 batches"),
        (7, None, "batches", "7 batches"),
    ],
)
def test_amounts_are_written_in_one_unit(
    count: int, total: int | None, unit: str, text: str
) -> None:
    assert amount(count, total, unit) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (1_490_000_000, "1.5 GB"), (3e15, "3000.0 TB")],
)
def test_sizes_are_written_for_people(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text
