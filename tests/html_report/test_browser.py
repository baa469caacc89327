"""The pages in headless Chromium: no console message, no request, working zoom, a picture."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resumekit.cli import main
from resumekit.diff import compare_checkpoints
from resumekit.errors import MissingDependencyError
from resumekit.html_report import (
    comparison_page,
    diff_page,
    find_browser,
    read_run,
    replay_page,
    run_page,
    take_screenshot,
)
from resumekit.html_report.screenshot import ScreenshotError, browse
from resumekit.prove import prove
from resumekit.record.journal import DIRECTORY, find_attempts
from resumekit.replay import CheckpointResult, ReplayResult
from resumekit.replay.result import compare_rank
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store

Train = Callable[..., None]

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "build" / "report_pictures"  # ignored by git, kept after the tests
TINY_JOB = ROOT / "tests" / "prove" / "scripts" / "tiny_job.py"
JOB = (sys.executable, str(TINY_JOB), "{dir}", "--pause-seconds", "0")
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def browser() -> str:
    try:
        return find_browser()
    except MissingDependencyError as error:
        pytest.skip(f"{error}")


@pytest.fixture
def page(stopped_twice: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.html"
    file.write_text(run_page(read_run(stopped_twice)), encoding="utf-8")
    return file


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """The page of a proof whose resume leaves one component out."""
    result = prove(JOB, at=("step:5",), inject="model", keep=tmp_path / "kept")
    file = tmp_path / "prove.html"
    file.write_text(comparison_page(result, tmp_path / "kept"), encoding="utf-8")
    return file


@pytest.fixture
def replayed(train: Train, tmp_path: Path) -> Path:
    """The page of a replay: a second run, whose other seed makes it differ, stands for it."""
    train(tmp_path / "run")
    train(tmp_path / "replay", seed=1)
    recorded, now = (find_attempts(tmp_path / name / DIRECTORY) for name in ("run", "replay"))
    ranks = (compare_rank(now[:1], recorded),)
    checkpoints = (CheckpointResult("step-00000008", 8, False, "differs in model"),)
    result = ReplayResult(ranks, checkpoints, 1, 24, (), is_protected=True, exit_status=0)
    file = tmp_path / "replay.html"
    file.write_text(replay_page(result, tmp_path / "run", ["python", "train.py"]))
    return file


@pytest.fixture
def difference(train: Train, tmp_path: Path) -> Path:
    """The page of two checkpoints that differ."""
    train(tmp_path / "a")
    train(tmp_path / "b", seed=1)
    steps = [Store(tmp_path / name).open_step(StepName(24)) for name in "ab"]
    file = tmp_path / "diff.html"
    file.write_text(diff_page(compare_checkpoints(*steps)), encoding="utf-8")
    return file


def opened(browser: str, page: Path, *, script: str = "") -> tuple[str, list[str]]:
    """The document after a script has run, and each message in the console."""
    if script:
        changed = page.with_name("changed.html")
        text = page.read_text(encoding="utf-8")
        changed.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
        page = changed
    done = browse(browser, page, ["--enable-logging=stderr", "--dump-dom"])
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def test_a_page_opens_without_a_message_and_its_axes_are_drawn(browser: str, page: Path) -> None:
    document, messages = opened(browser, page)
    assert messages == []
    assert re.search(r'<g class="axes"><text[^>]*>\d', document)


@pytest.mark.parametrize("name", ["comparison", "replayed", "difference"])
def test_the_other_pages_open_without_a_message(
    browser: str, name: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(name)
    document, messages = opened(browser, page)
    assert messages == []
    assert name == "difference" or re.search(r'<g class="axes"><text[^>]*>\d', document)


def test_a_request_and_an_error_are_seen(browser: str, page: Path) -> None:
    request = "const image = new Image(); image.src = 'http://127.0.0.1:9/a.png'"
    _, messages = opened(browser, page, script=request)
    assert any("Content Security Policy" in each for each in messages)
    _, messages = opened(browser, page, script="absent()")
    assert any("absent is not defined" in each for each in messages)


def test_zooming_shows_a_part_and_show_all_returns(browser: str, page: Path) -> None:
    script = (
        "const view = () => document.querySelector('.plot').getAttribute('viewBox');"
        "const click = (name) => document.querySelector(`[data-action=${name}]`).click();"
        "const views = [view()]; click('in'); views.push(view()); click('all'); views.push(view());"
        "document.title = views.join('|')"
    )
    document, messages = opened(browser, page, script=script)
    assert messages == []
    title = re.search("<title>([^<]*)</title>", document)
    assert title
    first, zoomed, whole = title[1].split("|")
    assert first == whole != zoomed


def test_pointing_at_a_step_shows_the_values_of_each_attempt(browser: str, page: Path) -> None:
    script = (
        "const chart = document.querySelector('svg[role=img]');"
        "const box = chart.getBoundingClientRect();"
        "const clientX = box.left + 0.3 * box.width;"
        "chart.dispatchEvent(new PointerEvent('pointermove', {clientX}))"
    )
    document, messages = opened(browser, page, script=script)
    assert messages == []
    assert re.search(r'class="values">step \d+ · .*attempt 1: \d', document)


@pytest.mark.parametrize(
    ("name", "theme"),
    [
        ("page", "light"),
        *(
            pytest.param(name, theme, marks=pytest.mark.full)
            for name in ("page", "comparison", "replayed", "difference")
            for theme in ("light", "dark")
            if (name, theme) != ("page", "light")
        ),
    ],
)
def test_a_picture_shows_the_whole_page(
    browser: str, name: str, theme: str, request: pytest.FixtureRequest
) -> None:
    page = request.getfixturevalue(name)
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{name}_{theme}.png"
    picture.unlink(missing_ok=True)
    take_screenshot(page, picture, options=(DARK,) if theme == "dark" else ())
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 1100
    assert height > 1200


def test_without_a_browser_the_remedy_is_named(
    stopped_twice: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(stopped_twice), "-o", str(tmp_path / "a.html"), "--png"])
    assert ended.value.code == 2
    assert "apt-get install chromium" in capsys.readouterr().err
    assert (tmp_path / "a.html").is_file()


def test_a_browser_that_takes_no_picture_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "chromium"
    failing.write_text("#!/bin/sh\necho no display >&2\nexit 1\n")
    failing.chmod(0o755)
    shell = shutil.which("sh")
    assert shell
    (tmp_path / "sh").symlink_to(shell)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ScreenshotError, match="no display"):
        take_screenshot(tmp_path / "a.html", tmp_path / "a.png")
