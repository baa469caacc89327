"""Reports: one self-contained HTML file about a run, a proof, a replay or two checkpoints."""

from __future__ import annotations

from resumekit.html_report.comparison_page import comparison_page
from resumekit.html_report.diff_page import diff_page
from resumekit.html_report.replay_page import replay_page
from resumekit.html_report.run_facts import AttemptFacts, RunFacts, read_run
from resumekit.html_report.run_page import run_page
from resumekit.html_report.screenshot import find_browser, take_screenshot

__all__ = [
    "AttemptFacts",
    "RunFacts",
    "comparison_page",
    "diff_page",
    "find_browser",
    "read_run",
    "replay_page",
    "run_page",
    "take_screenshot",
]
