"""Makes ``crashlab`` importable for the tests of this folder, and prints what they counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resumekit.storage.io import pipeline

sys.path.insert(0, str(Path(__file__).parent))

CHUNK_BYTES = 2048


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends files of a few kB through the ring and the thread, as large ones of a real run."""
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", CHUNK_BYTES)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counted = [
        f"{name}: {value}"
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if Path(__file__).parent.name in report.nodeid
    ]
    if counted:
        terminalreporter.section("fault injection counts")
        for line in counted:
            terminalreporter.write_line(line)
