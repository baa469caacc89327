"""The page on other loops: each program of its table is killed twice, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from how_to_pages import Page, Workplace, difference, without

PAGE = Page("loops")
KILLED_AT = (13, 8)  # after a checkpoint of step 10 or so, and after one more
NEEDS = {"agent.py": "stable_baselines3", "engine.py": "ignite"}
ROWS = [tuple(row) for row in PAGE.rows("program")]


class Runs:
    """Uninterrupted runs of the programs, each made once, and killed ones.

    Args:
        directory: new.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._whole: dict[str, Workplace] = {}
        self._killed: dict[str, Workplace] = {}

    def whole(self, program: str) -> Workplace:
        pytest.importorskip(NEEDS.get(program, "torch"))
        if program not in self._whole:
            place = Workplace(self._directory / f"{program} whole", PAGE)
            place.output = place.run(PAGE.command(f"python {program}"))
            self._whole[program] = place
        return self._whole[program]

    def killed(self, program: str, **variables: str) -> Workplace:
        name = f"{program} killed {' '.join(variables.values())}".strip()
        if name in self._killed:
            return self._killed[name]
        place = self._killed[name] = Workplace(self._directory / name, PAGE)
        command = PAGE.command(f"python {program}")
        for step in KILLED_AT:
            place.kill_at(step, command)
        place.output = place.run(command, **variables)
        return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("loops"))


@pytest.mark.quick("get_batch.py*")
@pytest.mark.parametrize(
    ("program", "reported", "result"), ROWS, ids=[f"{row[0]}-{row[2]}" for row in ROWS]
)
def test_a_row_of_the_table(runs: Runs, program: str, reported: str, result: str) -> None:
    whole, killed = runs.whole(program), runs.killed(program)
    assert ("resumekit: WARNING" in whole.output) == (reported != "exact")
    shown = [line for line in PAGE.lines("text") if f": {reported} (" in line]
    assert all(line in whole.output for line in shown)
    assert bool(shown) == (reported != "exact")
    found = difference(whole, killed)
    assert bool(found) == (result == "differs"), found
    assert len(killed.launches()) == 3


@pytest.mark.full
def test_what_the_page_shows_of_a_resume_is_printed(runs: Runs) -> None:
    place = Workplace(runs.whole("get_batch.py").directory.parent / "shown", PAGE)
    command = PAGE.command("python get_batch.py")
    place.kill_at(KILLED_AT[0], command)
    lines = [line for line in PAGE.lines("text") if "found" in line or "resuming" in line]
    output = place.run(command)
    assert all(line.replace("/home/me", str(place.directory)) in output for line in lines)


@pytest.mark.full
def test_the_scores_of_the_folds_are_those_of_an_uninterrupted_run(runs: Runs) -> None:
    whole, killed = runs.whole("folds.py"), runs.killed("folds.py")
    files = [place.directory / "scores.json" for place in (whole, killed)]
    scores = [json.loads(file.read_text()) for file in files]
    assert scores[0] == scores[1]
    assert len(set(scores[0])) == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "component"),
    [
        ("get_batch.py", "rng"),
        ("get_batch.py", "variables"),
        ("files.py", "rng"),
        ("gan.py", "optimizer"),
        ("dqn.py", "variables"),
        ("ppo.py", "variables"),
        ("accumulate.py", "variables"),
        ("folds.py", "optimizer"),
        ("agent.py", "variables"),
        ("engine.py", "data"),
    ],
)
def test_without_a_component_a_loop_continues_otherwise(
    runs: Runs, program: str, component: str
) -> None:
    """The negative control of the rows."""
    whole = runs.whole(program)
    killed = runs.killed(program, **without(component))
    assert "trained otherwise" in difference(whole, killed)
