"""The table of mutants fits the sources; ``nox -s mutants`` runs it."""

from __future__ import annotations

import pytest
from run_mutants import FLOOR_PERCENT, Mutant, Session, entries, judge, problems_of


def test_every_text_occurs_once_in_its_file() -> None:
    assert problems_of(entries()) == []


def test_a_stale_entry_is_reported_with_its_name() -> None:
    mutant, *_ = entries()
    stale = Mutant("a defect", mutant.area, mutant.file, "no such text", "", "tests/no_such_file")
    first, second = problems_of([stale])
    assert first.startswith("a defect: 0 occurrences of 'no such text'")
    assert second == "a defect: no test tests/no_such_file"
    unknown = Mutant("a defect", mutant.area, mutant.file, mutant.before, "", f"{__file__}::test_x")
    assert problems_of([unknown]) == [f"a defect: no test {__file__}::test_x"]
    assert problems_of([mutant, mutant]) == [f"{mutant.name}: given twice"]


def test_few_mutants_may_survive_and_each_for_a_reason() -> None:
    mutants = entries()
    surviving = [each for each in mutants if each.survives]
    assert len(mutants) >= 60
    assert 100 * len(surviving) <= (100 - FLOOR_PERCENT) * len(mutants)


@pytest.mark.parametrize(
    ("code", "is_caught"), [(0, False), (1, True), (2, False), (4, False), (5, False), (None, True)]
)
def test_a_mutant_is_caught_by_a_test_that_fails_or_never_ends(
    code: int | None, is_caught: bool
) -> None:
    assert judge(entries()[0], Session(code, "", 0.0)).caught is is_caught
