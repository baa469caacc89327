"""The page of reliability is what the records give, and a record what the tests counted."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import reliability

ROOT = Path(__file__).resolve().parents[2]
FAULT = "SIGKILL at a call of a save"
COUNTED = f'<properties><property name="{FAULT}, sync" value="{{}}"/></properties>'


def _record(name: str, day: str, *cases: str) -> str:
    lines = [f"# nox -s full: {name}", "", f"{day} 12:00, Python", "", *cases]
    return "\n".join(lines) + "\n"


FILES = "| file | tests | failed | skipped | seconds |\n|---|---|---|---|---|\n"
COUNTS = "\n| counted | number | file |\n|---|---|---|\n"


def _row(results: Path) -> str:
    lines = reliability.page(results).splitlines()
    return next(line for line in lines if line.startswith(f"| {FAULT} |"))


def test_the_page_is_what_the_records_give() -> None:
    expected = reliability.page(reliability.RESULTS)
    assert reliability.PAGE.read_text() == expected, "run python benchmarks/reliability.py"


def test_what_no_record_has_is_not_run(tmp_path: Path) -> None:
    assert _row(tmp_path).startswith(f"| {FAULT} | not run | - | - |")


def test_numbers_of_variants_add_up_and_the_newest_record_of_each_counts(tmp_path: Path) -> None:
    old = f"{FILES}| a | 2 | 0 | 0 | 1 |\n{COUNTS}| {FAULT}, sync | 90 | a |\n"
    old += f"| {FAULT}, gone | 7 | a |\n"
    part = f"{FILES}| b | 1 | 0 | 0 | 1 |\n{COUNTS}| {FAULT}, async | 5: of them 3 | b |\n"
    new = f"{FILES}| a | 2 | 0 | 0 | 1 |\n{COUNTS}| {FAULT}, sync | 4 | a |\n"
    new += f"| {FAULT}, sync | 1000 | a |\n"  # a sample of the cells, and all of them
    cell = f"{FILES}| a | 1 | 0 | 0 | 1 |\n{COUNTS}| {FAULT}, torn | 20 | a |\n"
    cells = ("z", "01", old), ("y", "02", part), ("a", "03", new), ("a -k torn", "04", cell)
    for name, day, text in cells:
        file = tmp_path / f"2026-01-{day}-full-{name}.md"
        file.write_text(_record(name, f"2026-01-{day}", text))
    assert _row(tmp_path).startswith(f"| {FAULT} | 1,025 | 1,025 | 0 |")


@pytest.mark.parametrize(
    ("num_failed", "number"), [(1, "90"), (0, "failed")], ids=["another test", "the test itself"]
)
def test_a_failed_test_of_the_file_is_no_survival(
    num_failed: int, number: str, tmp_path: Path
) -> None:
    text = f"{FILES}| a | 2 | {num_failed} | 0 | 1 |\n{COUNTS}| {FAULT}, sync | {number} | a |\n"
    (tmp_path / "2026-01-01-full.md").write_text(_record("a", "2026-01-01", text))
    assert _row(tmp_path).startswith(f"| {FAULT} | a test failed | ? | ? |")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [("", "| 12 | 12 | 0 |"), ("<failure/>", "| a test failed | ? | ? |")],
    ids=["passed", "failed"],
)
def test_a_run_is_recorded_with_what_its_tests_counted(
    failure: str,
    expected: str,
    noxfile: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noxfile, "RESULTS", tmp_path)
    case = f"<testcase classname='tests.test_a' time='1'>{COUNTED.format(12)}{failure}</testcase>"
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    num_failed = noxfile._record_run(report, "full: tests/test_a.py", "full-test_a", "Python 3")
    assert num_failed == bool(failure)
    assert [path.name[11:] for path in tmp_path.glob("*.md")] == ["full-test_a.md"]
    assert _row(tmp_path).startswith(f"| {FAULT} {expected}")
