"""The tables of the quick set name files and tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from quick_set import COLLECTED, KEPT, LEFT_OUT, SAMPLED, is_left_out, is_sampled, unmatched

INTEGRATION = Path(__file__).parents[1]
SUITE = INTEGRATION.parent / "resumekit" / "testing" / "suite.py"


def names(path: Path) -> list[str]:
    """The tests of a file as they are written, each with its class and without its cells."""
    suite = ast.parse(SUITE.read_text(encoding="utf-8"))
    inherited = [node.name for node in ast.walk(suite) if isinstance(node, ast.FunctionDef)]
    found = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found += [f"{node.name}::{method}" for method in (*methods, *inherited)]
    return [name for name in found if name.rpartition("::")[2].startswith("test_")]


def without_cells(patterns: tuple[str, ...]) -> list[str]:
    """The patterns as far as they say the name of a test, and not its cell."""
    shortened = []
    for pattern in patterns:
        found = re.match(r"(?:\w|::|[*?])*", pattern)
        name = found[0] if found else ""
        if pattern[len(name) : len(name) + 1] not in ("", "["):  # the cell began at a `*`
            name = name.rpartition("*")[0] + "*"
        shortened.append(name)
    return shortened


def test_every_file_of_the_table_is_there() -> None:
    assert not [file for file in KEPT if not (INTEGRATION / f"{file}.py").is_file()]


@pytest.mark.parametrize("file", KEPT)
def test_every_pattern_of_a_file_names_a_test_of_it(file: str) -> None:
    assert unmatched(without_cells(KEPT[file]), names(INTEGRATION / f"{file}.py")) == []


def test_every_other_pattern_names_a_test() -> None:
    others = [
        name
        for path in INTEGRATION.rglob("test_*.py")
        if path.relative_to(INTEGRATION).with_suffix("").as_posix() not in KEPT
        for name in names(path)
    ]
    assert unmatched(without_cells(LEFT_OUT), others) == []
    everywhere = [name for path in INTEGRATION.rglob("test_*.py") for name in names(path)]
    assert unmatched(without_cells(SAMPLED), everywhere) == []


def test_every_pattern_matches_a_cell_that_was_collected(request: pytest.FixtureRequest) -> None:
    """Of the files of this run; a run of all of ``integration`` checks all patterns."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("the files were not collected as a whole")
    for file, patterns in KEPT.items():
        if file in COLLECTED:
            assert unmatched(patterns, COLLECTED[file]) == [], file


def test_a_pattern_without_a_test_is_found() -> None:
    tests = ["test_a[1]", "test_b"]
    assert unmatched(("test_a[1]", "*[1]", "test_b"), tests) == []
    assert unmatched(("test_a[2]", "test_c*", "test_b"), tests) == ["test_a[2]", "test_c*"]


def test_a_test_is_found_with_its_cell() -> None:
    faults = "torch/test_faults"
    assert not is_left_out(faults, "test_a_full_disk_costs_nothing_that_was_saved[raise]")
    assert is_left_out(faults, "test_a_full_disk_costs_nothing_that_was_saved[warn]")
    suite = "TestTorch::test_a_killed_run_continues_exactly[mid-epoch 0-2 ranks]"
    assert is_left_out("torch/test_torch_exact", suite)
    assert is_sampled(suite)
