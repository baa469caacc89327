"""The page of ``prove``, of real processes that are killed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resumekit.cli import main
from resumekit.errors import TraceError
from resumekit.html_report import comparison_page
from resumekit.prove import prove

TINY_JOB = Path(__file__).parents[1] / "prove" / "scripts" / "tiny_job.py"
JOB = (sys.executable, str(TINY_JOB), "{dir}", "--pause-seconds", "0")
AT = ("--at", "step:5", "--at", "step:8")

Prove = Callable[..., str]


def text_of(page: str) -> str:
    body = re.sub(r"<(style|script)[^>]*>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


@pytest.fixture
def run_prove(tmp_path: Path) -> Prove:
    """Runs the command with ``--html``; gives the page."""

    def run(*options: str, code: int, job: tuple[str, ...] = ()) -> str:
        file = tmp_path / "prove.html"
        with pytest.raises(SystemExit) as ended:
            main(["prove", "--html", str(file), *AT, *options, "--", *JOB, *job])
        assert ended.value.code == code
        return file.read_text(encoding="utf-8")

    return run


def test_an_exact_run_is_the_headline_with_each_kill_in_the_chart(run_prove: Prove) -> None:
    page = run_prove(code=0)
    text = text_of(page)
    assert "EXACT 12 steps, 2 resumes, every bit equal; kills inside saves: not tried" in text
    assert page.count("<title>killed after step") == 2
    assert "<title>launch 2 resumed at step 6</title>" in page
    assert "First differences" not in text
    assert "SIGKILL at step:5" in text


def test_a_component_that_is_left_out_is_named_with_its_cause(run_prove: Prove) -> None:
    page = run_prove("--inject", "all", code=0)
    text = text_of(page)
    assert "3 of 3 negative controls as expected" in text
    for part in ("Resumed without model", "weights restarted", "CAUGHT", "NO EFFECT"):
        assert part in text
    assert "first difference at step 3" in page


def test_a_wrong_verdict_is_the_headline(run_prove: Prove) -> None:
    text = text_of(run_prove("--inject", "model", code=1, job=("--deaf-to", "model")))
    assert "MISSED" in text
    text = text_of(run_prove(code=1, job=("--fail-on-relaunch",)))
    assert "FAILED: a launch after a kill failed" in text
    assert "cannot be understood" in text


def test_the_runs_stay_where_the_user_keeps_them(run_prove: Prove, tmp_path: Path) -> None:
    run_prove("--keep", str(tmp_path / "kept"), code=0)
    assert (tmp_path / "kept" / "reference" / "trace").is_dir()


def test_without_a_trace_there_is_an_error_and_no_page(tmp_path: Path) -> None:
    result = prove(JOB, at=("step:5",))
    with pytest.raises(TraceError, match="no trace"):
        comparison_page(result, tmp_path)


def test_a_page_is_small_and_names_no_address(tmp_path: Path) -> None:
    result = prove(JOB, at=("step:5",), keep=tmp_path)
    page = comparison_page(result, tmp_path)
    assert len(page) < 100_000
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
