"""One self-contained HTML file about a run."""

from __future__ import annotations

from resumekit.html_report.run_facts import RunFacts, read_run
from resumekit.html_report.run_page import run_page
from resumekit.html_report.screenshot import find_browser, take_screenshot

__all__ = ["RunFacts", "find_browser", "read_run", "run_page", "take_screenshot"]
