"""Reports each failure when it happens, so that a run that is cut off still says what failed."""

from __future__ import annotations

import pytest


class FailureLines:
    """Writes one line for each failed test; the tracebacks follow at the end of the run."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            what = f"{report.nodeid} ({report.when}, {report.duration:.0f} s)"
            self._reporter.write_line(f"\nFAILED {what}\n{message[:2000]}")


@pytest.hookimpl(trylast=True)  # after the reporter
def pytest_configure(config: pytest.Config) -> None:
    """Adds the lines to a terminal's output."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(reporter, pytest.TerminalReporter):
        config.pluginmanager.register(FailureLines(reporter))
