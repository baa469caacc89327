"""The report of a run directory: what it states, and that it changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resumekit.cli import main
from resumekit.html_report import read_run, run_page
from resumekit.html_report.run_facts import of_all_ranks
from resumekit.html_report.run_page import headline
from resumekit.storage.store import Store

Train = Callable[..., None]


def text_of(page: str) -> str:
    """What a reader sees of a page: no markup, single blanks."""
    body = re.sub(r"<(style|script)[^>]*>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def files_in(directory: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mtime_ns, status.st_mode, content)
    return found


def test_a_finished_run_is_reported_with_each_stop_and_resume(stopped_twice: Path) -> None:
    run = read_run(stopped_twice)
    assert headline(run).text == "Finished at step 24 (epochs=4)"
    assert "2 resumes, 5 repeated steps: identical." in headline(run).detail
    assert [each.num_lost_steps for each in run.attempts] == [3, 2, None]
    assert [(each.first_step, each.last_step) for each in run.attempts] == [
        (1, 7),
        (5, 14),
        (13, 24),
    ]
    text = text_of(run_page(run))
    for fact in (
        "ended by itself after step 7, not saved",
        "3 repeated steps: identical",
        "Resumes",
    ):
        assert fact in text
    assert re.search(r"restores all \d+ components exactly: model", text)
    assert re.search(r"All \d+ components were restored exactly", text)
    assert not run.problems


def test_times_and_the_cost_of_each_save_are_reported(stopped_twice: Path) -> None:
    run = read_run(stopped_twice)
    assert [[cost.step for cost in each.costs] for each in run.attempts] == [
        [4],
        [8, 12],
        [16, 20, 24],
    ]
    costs = [cost for each in run.attempts for cost in each.costs]
    assert all(cost.blocked_seconds > 0 for cost in costs)
    assert all(each.began and each.began <= each.last_written + 1 for each in run.attempts)
    assert all(each.has_closed for each in run.attempts)
    assert [each.lost_seconds is None for each in run.attempts] == [False, False, True]
    text = text_of(run_page(run))
    assert "Cost of the saves" in text
    assert "training stood still" in text


def test_a_killed_attempt_has_no_end(train: Train, tmp_path: Path) -> None:
    train(tmp_path, until=6)
    (journal,) = (tmp_path / "journal").iterdir()
    journal.write_bytes(journal.read_bytes()[:-96])  # a killed process has not written its end
    train(tmp_path)
    run = read_run(tmp_path)
    assert [each.has_closed for each in run.attempts] == [False, True]
    assert "killed after step 6, not saved" in text_of(run_page(run))


def test_nothing_in_the_run_directory_is_changed(stopped_twice: Path) -> None:
    before = files_in(stopped_twice)
    run_page(read_run(stopped_twice))
    assert files_in(stopped_twice) == before


def test_a_different_resume_is_the_headline(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, until=7)
    monkeypatch.setenv("RESUMEKIT_INJECT", "optimizer")
    train(tmp_path)
    run = read_run(tmp_path)
    assert headline(run).tone == "bad"
    assert headline(run).text == "Attempt 2 did not repeat the steps exactly"
    assert "step 5: weights" in headline(run).detail


def test_a_difference_on_another_rank_is_taken_from_the_manifests(stopped_twice: Path) -> None:
    run = read_run(stopped_twice)
    newest = run.checkpoints[0]
    assert newest.manifest
    details = {"journal": {"verdict": "different", "num_steps": 2, "reason": "rank 1, step 14"}}
    changed = replace(newest, manifest=replace(newest.manifest, details=details))
    attempts = of_all_ranks(run.attempts, (changed, *run.checkpoints[1:]))
    assert [each.is_different for each in attempts] == [False, False, True]
    assert attempts[2].verdict == "2 repeated steps: different (rank 1, step 14)"
    assert of_all_ranks(run.attempts, run.checkpoints) == run.attempts


def test_a_stopped_run_is_resumable_and_a_used_one_is_running(train: Train, tmp_path: Path) -> None:
    train(tmp_path, until=7)
    assert headline(read_run(tmp_path)).text == "Resumable from step 4"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # a record lock belongs to a process, so another one has to hold it
        store = Store(tmp_path)
        store.acquire()
        os.write(writing, b"1")
        signal.pause()
    try:
        os.close(writing)
        os.read(reading, 1)
        run = read_run(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
    assert headline(run).text == "Running; resumable from step 4"
    assert f"process {child}" in text_of(run_page(run))
    assert not read_run(tmp_path).is_running


def _cut_a_checkpoint(run: Path) -> None:
    file = next((run / "step-00000024" / "model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


def _damage_a_manifest(run: Path) -> None:
    (run / "step-00000024" / "manifest.json").write_text("{}")


def _damage_a_journal(run: Path) -> None:
    file = next((run / "journal").glob("attempt-000002-*"))
    file.write_bytes(b"\0" * 40 + file.read_bytes()[40:])


def _damage_the_owner(run: Path) -> None:
    (run / "owner.json").write_text("not JSON")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_cut_a_checkpoint, "step-00000024: damaged"),
        (_damage_a_manifest, "step-00000024: damaged"),
        (_damage_a_journal, "no valid header"),
        (_damage_the_owner, "owner.json"),
    ],
)
def test_what_cannot_be_read_is_listed_and_the_rest_reported(
    stopped_twice: Path, damage: Callable[[Path], None], named: str
) -> None:
    damage(stopped_twice)
    text = text_of(run_page(read_run(stopped_twice)))
    assert "What could not be read" in text
    assert named in text
    assert "Attempts" in text


def test_a_run_without_journal_loss_or_checkpoint_has_a_page(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, until=5, with_loss=False)
    assert "No loss was recorded" in text_of(run_page(read_run(run)))
    shutil.rmtree(run / "journal")
    assert "has no attempt" in text_of(run_page(read_run(run)))
    (tmp_path / "empty").mkdir()
    page = run_page(read_run(tmp_path / "empty"))
    assert "No checkpoint to resume from" in text_of(page)


def test_names_from_a_run_are_text_and_no_markup(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "<script>alert(1)<"
    train(run, until=5)
    page = run_page(read_run(run))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def _code(*words: object) -> object:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_the_command_writes_one_small_file_that_names_no_address(
    stopped_twice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.html"
    assert _code("report", stopped_twice, "-o", file) == 0
    assert capsys.readouterr().out == f"{file}\n"
    page = file.read_text(encoding="utf-8")
    assert len(page) < 100_000
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_wrong_directory_or_file_is_one_line(
    stopped_twice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _code("report", tmp_path / "absent") == 2
    assert "no such directory" in capsys.readouterr().err
    assert _code("report", stopped_twice, "-o", stopped_twice / "a.html") == 2
    assert "inside the run directory" in capsys.readouterr().err
    assert _code("report", stopped_twice, "-o", tmp_path / "absent" / "a.html") == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error
    assert "Traceback" not in error
