"""The quick set has the cells that the marks name, and refuses a name without a cell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT / "integration" / "shared"
CONFTEST = """
import sys

import pytest

sys.path.insert(0, {folder!r})
from quick_set import mark_cells, mark_matrices

def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out")
    config.addinivalue_line("markers", "quick: kept cells")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    mark_cells(items, whole=not any("::" in argument for argument in config.args))
    mark_matrices(items)
"""
CELLS = """
import pytest

@pytest.mark.quick({patterns})
@pytest.mark.parametrize("number", ["1 rank", "2 ranks", "4 ranks"])
def test_ranks(number): ...

class TestMatrix:
    matrices = {{"cell": ()}}

    @pytest.mark.parametrize("cell", [dict(a=a, b=b) for a in (1, 2) for b in (1, 2)], ids=str)
    def test_cell(self, cell): ...
"""


def collect(folder: Path, patterns: str, *, only: str = "") -> subprocess.CompletedProcess[str]:
    """What a plain run of two tests with these names of cells collects."""
    (folder / "conftest.py").write_text(CONFTEST.format(folder=str(SHARED)))
    (folder / "test_cells.py").write_text(CELLS.format(patterns=patterns))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not full"]
    return subprocess.run(
        [*command, f"test_cells.py{only}"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_named_cells_and_each_value_of_a_matrix_are_kept(tmp_path: Path) -> None:
    found = [line for line in collect(tmp_path, "'2 *'").stdout.splitlines() if "::" in line]
    assert [line for line in found if "ranks" in line] == ["test_cells.py::test_ranks[2 ranks]"]
    matrix = [line for line in found if "test_cell[" in line]
    assert len(matrix) == 2
    assert all(f"'{name}': {value}" in str(matrix) for name in "ab" for value in (1, 2))


@pytest.mark.parametrize("patterns", ["'3 ranks'", "'2 *', '3 ranks'"])
def test_a_name_without_a_cell_is_refused(tmp_path: Path, patterns: str) -> None:
    done = collect(tmp_path, patterns)
    assert done.returncode != 0
    assert "test_ranks[3 ranks]" in done.stdout + done.stderr


def test_the_mark_holds_in_the_tests_without_a_framework_too() -> None:
    file = "tests/testing/test_gpu.py"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "test_a_row_on_the_cpu[exact]" in done.stdout
    assert "test_a_row_on_the_cpu[crash]" not in done.stdout


def test_where_a_part_is_collected_a_name_may_have_no_cell(tmp_path: Path) -> None:
    assert collect(tmp_path, "'3 ranks', '2 *'", only="::test_ranks").returncode == 0
