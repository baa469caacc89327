"""What all tests share: the quick set, failures reported at once, imports that take less time."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from followed_remedies import Remedy
from quick_set import mark_cells


class FailureLines:
    """Writes one line for each failed test; the tracebacks follow at the end of the run.

    A run that is cut off still says what failed.
    """

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports without collections of garbage; those in a test need not look at what stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as `full` the cells that the mark `quick` leaves out."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    mark_cells(functions, whole=not any("::" in argument for argument in config.args))


@pytest.fixture
def remedy(request: pytest.FixtureRequest) -> Remedy:
    """The remedy in the mark of a test: ``@pytest.mark.remedy(text)``."""
    mark = request.node.get_closest_marker("remedy")
    return Remedy(mark.args[0])
