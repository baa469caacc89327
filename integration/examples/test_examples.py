"""The examples resume exactly, their twins lose what the table says, and the table is a record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stock_cases import EXAMPLE_CASES, EXAMPLES, ROOT, ExampleCase
from stock_resume import (
    ENVIRONMENT,
    EXAMPLE_HEADINGS,
    TIMEOUT_SECONDS,
    judged,
    judged_example,
    loss_in,
)

from resumekit.prove import prove

RESULTS = ROOT / "benchmarks" / "results"
EACH = pytest.mark.parametrize("example", EXAMPLE_CASES, ids=str)


@pytest.fixture(autouse=True)
def _as_the_benchmark_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.quick("dqn", "image_classifier")
@EACH
def test_a_few_steps_that_are_killed_once_continue_exactly(example: ExampleCase) -> None:
    result = prove(
        [*example.command(), *example.small],
        at=(f"step:{example.small_kill}",),
        world=example.world,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    (trial,) = result.trials
    assert result.ok, str(trial.verdict)
    assert [launch.was_killed for launch in trial.launches] == [True, False]
    assert [resume.step for resume in trial.resumes.values()] == [example.small_resumed]


@pytest.mark.full
@EACH
def test_an_example_that_is_killed_twice_is_exact(example: ExampleCase) -> None:
    result = judged_example(example)
    (trial,) = result.trials
    assert result.ok, str(trial.verdict)
    assert trial.num_kills == len(trial.resumes) == 2


@pytest.mark.full
@EACH
def test_its_stock_twin_loses_what_the_table_states(example: ExampleCase) -> None:
    assert loss_in(judged(example.stock)) == example.loss


def table_in(path: Path) -> list[list[str]]:
    """The rows of the first table of a page, links as their text."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(rows[0]) == EXAMPLE_HEADINGS
    return rows[2:]


def test_the_table_of_the_examples_is_the_newest_record() -> None:
    record = max(RESULTS.glob("*-examples.md"))
    assert table_in(EXAMPLES / "README.md") == table_in(record)


@EACH
def test_a_row_of_the_table_is_about_the_scripts_as_they_are(example: ExampleCase) -> None:
    (row,) = [row for row in table_in(EXAMPLES / "README.md") if row[0] == f"{example}.py"]
    assert row[1:4] == [example.framework, example.changed_lines(), str(example.loss)]
    assert row[4].startswith("EXACT: ")


@EACH
def test_the_header_of_a_script_has_the_command_that_proves_it(example: ExampleCase) -> None:
    world = f"--world {example.world} " if example.world > 1 else ""
    proofs = {
        f"{example}.py": f"resumekit prove --kills 2 {world}-- python examples/{example}.py",
        example.stock.script: (
            f"resumekit prove --at step:{example.kill} {world}"
            f"-- python examples/{example.stock.script}"
        ),
    }
    for script, command in proofs.items():
        header = (EXAMPLES / script).read_text(encoding="utf-8").split('"""')[1]
        assert f"\nProve: {command} --dir {{dir}}\n" in header


def test_every_program_of_the_folder_is_in_the_table_and_only_the_twins_are_stock() -> None:
    names = {str(example) for example in EXAMPLE_CASES}
    for folder, has_it in ((EXAMPLES, True), (EXAMPLES / "stock", False)):
        scripts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
        assert scripts.keys() == names
        assert all(
            ("import resumekit" in text or "from resumekit" in text) == has_it
            for text in scripts.values()
        )
