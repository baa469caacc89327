from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumekit.errors import ConfigurationError
from resumekit.storage.directories import StepName, directories_of, path_problem, paths_problem


@given(st.integers(0, 10**18), st.integers(0, 999_999))
def test_a_step_name_is_read_back(step: int, revision: int) -> None:
    name = StepName(step, revision)
    assert StepName.parse(str(name)) == name


def test_step_names_look_as_documented() -> None:
    assert str(StepName(500)) == "step-00000500"
    assert str(StepName(500, 1)) == "step-00000500-r1"
    assert str(StepName(123456789)) == "step-123456789"


@pytest.mark.parametrize(
    "text",
    [
        "step-500", "step-000000500", "step-00000500-r0", "step-00000500-r01", "step-00000500-r",
        "step-00000500 ", "step-00000500\n", "Step-00000500", "step-0000050x", "step--0000050",
        "step-00000500-r1-r2", "xstep-00000500", "step-\u0660000050\u0660", "step-" + "9" * 40,
        "latest", "",
    ],
)  # fmt: skip
def test_every_other_spelling_is_no_step_name(text: str) -> None:
    assert StepName.parse(text) is None
    with pytest.raises(ConfigurationError, match="step-00000500"):
        StepName.from_text(text)


def test_the_newer_one_is_the_greater_one() -> None:
    ordered = [StepName(9), StepName(10), StepName(10, 2), StepName(10, 10), StepName(10**9)]
    assert sorted({*ordered}) == ordered


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "/", "/etc/passwd", "a/", "a//b", "../a", "a/../b", "a/..", "./a", "a/.",
        "a\\b", "a\0b", "a\nb", "a\x7fb", "manifest.json", "a" * 256, "ä" * 128, "a/" * 600 + "a",
        "a\ud800b", "a\u202eb",
    ],
)  # fmt: skip
def test_paths_that_could_lead_elsewhere_are_refused(path: str) -> None:
    assert path_problem(path) is not None


@pytest.mark.parametrize("path", ["a", "state/rank-00000.json", "model/generator/x.y", "...", "ä"])
def test_plain_relative_paths_are_fine(path: str) -> None:
    assert path_problem(path) is None


@pytest.mark.parametrize(
    "paths",
    [
        ["a", "a"], ["a", "A"], ["state/a", "State/b"], ["a", "a/b"], ["a/b", "a"],
        ["ä", "a\u0308"], ["straße", "STRASSE"], ["Manifest.json"], ["manifest.json/x"],
        ["\ufb01", "fi"], ["x", ".."],
    ],
)  # fmt: skip
def test_paths_that_could_be_one_file_are_refused(paths: list[str]) -> None:
    assert paths_problem(paths) is not None


def test_an_ordinary_inventory_is_fine() -> None:
    assert paths_problem(["model/a", "model/b", "state/a", "state/deep/a", "c"]) is None


def test_directories_come_with_their_parents_first() -> None:
    assert directories_of(["a/b/c/x", "d", "a/y"]) == ("a", "a/b", "a/b/c")
