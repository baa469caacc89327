"""Which run a training continues, by what both are and by their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resumekit.attach.trainings import KnownRun, KnownRuns, Training, run_of
from resumekit.errors import ConfigurationError


def training(data: str = "d", lr: str = "0.1", fold: str = "0", model: str = "m") -> Training:
    return Training(model, data, {"lr": lr}, {"main.fold": fold})


def known(*trainings: Training, over: int = 0, taken: tuple[int, ...] = ()) -> list[KnownRun]:
    """Runs of which the first ones are over."""
    return [
        KnownRun(number, each, is_over=number <= over, is_taken=number in taken)
        for number, each in enumerate(trainings, 1)
    ]


def chosen(now: Training, number: int, runs: list[KnownRun]) -> int | None:
    found = run_of(now, number, runs, root=Path("runs"))
    return None if found is None else found.number


FOLDS = [training(data=f"fold {number}") for number in range(3)]


def test_all_folds_again_continue_their_runs() -> None:
    for number, fold in enumerate(FOLDS, 1):
        assert chosen(fold, number, known(*FOLDS, over=2)) == number


def test_a_fold_that_comes_first_continues_its_own_run() -> None:
    assert chosen(FOLDS[2], 1, known(*FOLDS, over=2)) == 3


def test_the_fold_after_the_last_finished_one_begins_a_run() -> None:
    assert chosen(FOLDS[1], 1, known(FOLDS[0], over=1)) is None


def test_one_training_and_one_run_belong_together_whatever_was_changed() -> None:
    assert chosen(training(lr="0.2", data="e", model="n"), 1, known(training())) == 1


def test_an_interrupted_run_of_several_is_never_left_out_silently() -> None:
    with pytest.raises(ConfigurationError) as caught:
        chosen(training(lr="0.3"), 1, known(training(lr="0.1"), training(lr="0.2"), over=1))
    assert "runs/trainer-2 (lr: was 0.2, now 0.3)" in str(caught.value)
    assert "remove runs/trainer-2 if" in str(caught.value.remedy)
    with pytest.raises(ConfigurationError, match="none of the interrupted runs"):
        chosen(training(data="e"), 3, known(*FOLDS, over=2, taken=(1, 2)))


def test_the_variables_of_the_loop_distinguish_runs_that_are_alike() -> None:
    runs = known(training(fold="0"), training(fold="1"), training(fold="2"), over=3)
    assert chosen(training(fold="2"), 1, runs) == 3
    assert chosen(training(fold="0"), 1, runs) == 1


def test_runs_that_are_the_same_follow_their_order() -> None:
    runs = known(training(), training(), over=1)
    assert [chosen(training(), number, runs) for number in (1, 2)] == [1, 2]


def test_the_same_without_an_order_is_refused() -> None:
    runs = known(training(), training(), training(), over=2, taken=(3,))
    with pytest.raises(ConfigurationError, match="each of several runs") as caught:
        chosen(training(), 3, runs)
    assert "runs (the same); runs/trainer-2 (the same)" in str(caught.value)
    assert "or remove runs/trainer-2 if" in str(caught.value.remedy)


# ---------------------------------------------------------------- the file


def begin(runs: KnownRuns, training: Training) -> Path:
    """The directory of a training that begins and saves in it."""
    directory = runs.begin(training)
    directory.mkdir(exist_ok=True)
    return directory


def test_a_later_launch_finds_the_runs_of_the_first(tmp_path: Path) -> None:
    first = KnownRuns(tmp_path)
    folders = [begin(first, each) for each in FOLDS]
    assert folders == [tmp_path, tmp_path / "trainer-2", tmp_path / "trainer-3"]
    assert KnownRuns(tmp_path).begin(FOLDS[2]) == tmp_path / "trainer-3"


def test_a_training_that_the_script_has_left_is_over(tmp_path: Path) -> None:
    first = KnownRuns(tmp_path)
    first.begin(training(lr="0.1"))
    first.begin(training(lr="0.2"))  # of the first one no step was saved
    again = KnownRuns(tmp_path)
    assert again.begin(training(lr="0.2")) == tmp_path / "trainer-2"
    assert again.begin(training(lr="0.3")) == tmp_path / "trainer-3"


def test_a_run_whose_directory_was_removed_is_not_continued(tmp_path: Path) -> None:
    first = KnownRuns(tmp_path)
    for rate in ("0.1", "0.2"):
        begin(first, training(lr=rate))
    with pytest.raises(ConfigurationError, match="none of the interrupted runs"):
        KnownRuns(tmp_path).begin(training(lr="0.3"))
    (tmp_path / "trainer-2").rmdir()
    assert KnownRuns(tmp_path).begin(training(lr="0.3")) == tmp_path / "trainer-2"


def test_of_runs_that_are_the_same_the_one_that_was_not_removed_is_continued(
    tmp_path: Path,
) -> None:
    first = KnownRuns(tmp_path)
    begin(first, training(lr="0.2"))
    for _ in range(2):
        begin(first, training(lr="0.1"))
    with pytest.raises(ConfigurationError, match="each of several runs"):
        KnownRuns(tmp_path).begin(training(lr="0.1"))
    (tmp_path / "trainer-2").rmdir()
    assert KnownRuns(tmp_path).begin(training(lr="0.1")) == tmp_path / "trainer-3"


def test_without_the_file_the_order_decides(tmp_path: Path) -> None:
    KnownRuns(tmp_path).begin(FOLDS[0])
    (tmp_path / "trainings.json").unlink()
    assert KnownRuns(tmp_path).begin(FOLDS[2]) == tmp_path


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: b"",
        lambda data: data.replace(b"fold 0", b"fold 1"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Any) -> None:
    KnownRuns(tmp_path).begin(FOLDS[0])
    path = tmp_path / "trainings.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigurationError, match="damaged"):
        KnownRuns(tmp_path)
