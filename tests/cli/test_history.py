"""``resumekit history``: each attempt with the reason of its end, and what stops have cost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from crashlab.training import Live
from resumekit.cli import main
from resumekit.errors import Preempted
from resumekit.html_report import read_run
from resumekit.record.journal import BEGIN, END, RECORD_BYTES, find_attempts

FOLDER = Path(__file__).resolve().parents[1] / "faults"
UNCAUGHT = """
import sys, torch
from pathlib import Path
from crashlab.training import Live
live = Live.launch(Path(sys.argv[1]))
for batch in live.checkpointer.batches([torch.ones(4, 6)] * 30, epochs=1):
    live.optimizer.step()
    live.checkpointer.step()
    if live.checkpointer.progress.step == 11:
        raise ValueError("a defect")
"""

History = Callable[[Path], tuple[int, dict[str, Any], str]]


@pytest.fixture
def history(capsys: pytest.CaptureFixture[str]) -> History:
    """Exit code, JSON, and the text of the command."""

    def run(directory: Path) -> tuple[int, dict[str, Any], str]:
        codes, texts = [], []
        for words in (["--json"], []):
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(["history", str(directory), *words])
            codes.append(ended.value.code)
            texts.append(capsys.readouterr().out)
        assert codes[0] == codes[1]
        assert isinstance(codes[0], int)
        return codes[0], json.loads(texts[0]), texts[1]

    return run


def _train(directory: Path, until: int, act: Callable[[], None] = lambda: None) -> None:
    live = Live.launch(directory)
    with live.checkpointer as checkpointer:
        for _ in checkpointer.batches([torch.ones(4, 6)] * 30, epochs=1):
            live.optimizer.step()
            checkpointer.step()
            if checkpointer.progress.step == until:
                act()
                if act.__name__ == "<lambda>":
                    break


def _raise() -> None:
    raise KeyError("a defect")


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in each way, and then finished."""
    directory = tmp_path_factory.mktemp("stopped") / "run"
    _train(directory, 3)
    with suppress(KeyError):
        _train(directory, 7, _raise)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*sys.path, str(FOLDER)))}
    command = [sys.executable, "-c", UNCAUGHT, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "a defect" in done.stderr
    with suppress(Preempted):
        _train(directory, 15, _terminate)
    _train(directory, 19)
    *_, killed = find_attempts(directory / "journal")
    killed.path.write_bytes(killed.path.read_bytes()[:-RECORD_BYTES])  # without its end
    _train(directory, 99)
    return directory


def test_each_attempt_has_the_reason_of_its_end(stopped: Path, history: History) -> None:
    code, found, text = history(stopped)
    assert code == 0
    assert [each["ending"] for each in found["attempts"]] == [
        "closed before the end",
        "exception",
        "exception",
        "SIGTERM",
        "not closed: killed, or crashed",
        "finished",
    ]
    assert [each["resumed_step"] for each in found["attempts"]] == [None, 2, 6, 10, 15, 18]
    assert [each["lost_steps"] for each in found["attempts"]] == [1, 1, 1, 0, 1, None]
    assert found["repeated_steps"] == 4
    assert found["notes"] == []
    assert "goodput" in text
    assert not found["is_running"]


def test_goodput_counts_the_time_in_steps_that_no_attempt_repeats(
    stopped: Path, history: History
) -> None:
    _, found, _ = history(stopped)
    counted = 0.0
    attempts = find_attempts(stopped / "journal")
    for attempt, later in zip(attempts, [*attempts[1:], None], strict=True):
        times = {event.step: event for event in attempt.events() if event.kind not in (BEGIN, END)}
        begin, *_ = attempt.events()
        end = attempt.events()[-1].time
        if later is not None:  # to the save that the next attempt resumed from
            end = times[later.header.resumed_step or 0].time
        elif attempt.events()[-1].kind != END:
            end = attempt.path.stat().st_mtime
        saves = [event for event in times.values() if event.time <= end]
        counted += end - begin.time - sum(event.blocked_seconds for event in saves)
    first, *_, last = [event for each in attempts for event in each.events()]
    assert found["wall_seconds"] == pytest.approx(last.time - first.time, abs=1e-3)
    assert found["goodput"] == pytest.approx(counted / (last.time - first.time), abs=1e-3)


def test_what_is_not_recorded_is_said_and_not_guessed(
    stopped: Path, history: History, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    first, second, *_ = find_attempts(run / "journal")
    first.path.unlink()
    size = second.path.stat().st_size
    events = [event for event in second.events() if event.kind == BEGIN]
    content = second.path.read_bytes()
    begin = content.index(events[0].to_bytes())
    second.path.write_bytes(content[:begin] + content[begin + RECORD_BYTES :])
    assert second.path.stat().st_size == size - RECORD_BYTES
    code, found, text = history(run)
    assert code == 0
    assert found["notes"][0] == "attempts without a record: 1"
    assert (found["goodput"], found["wall_seconds"]) == (None, None)
    assert "goodput: not known" in text
    assert found["attempts"][0]["began"] is None

    shutil.rmtree(run / "journal")
    code, found, text = history(run)
    assert (code, found["attempts"]) == (0, [])
    assert "has no step on record" in text


def test_a_journal_that_cannot_be_read_is_an_exit_code(
    stopped: Path, history: History, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    first, *_ = find_attempts(run / "journal")
    first.path.write_bytes(b"x" * 500)
    code, found, _ = history(run)
    assert code == 1
    assert "no valid header" in found["notes"][-1]


def test_an_end_of_an_older_version_has_no_reason(tmp_path: Path, history: History) -> None:
    _train(tmp_path / "run", 3)
    (attempt,) = find_attempts(tmp_path / "run" / "journal")
    *_, end = attempt.events()
    content = attempt.path.read_bytes()
    attempt.path.write_bytes(content.replace(end.to_bytes(), end._replace(ending=0).to_bytes()))
    _, found, _ = history(tmp_path / "run")
    assert found["attempts"][0]["ending"] == "closed, the reason is not recorded"
    assert read_run(tmp_path / "run").attempts[0].has_closed
