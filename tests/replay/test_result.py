"""The verdict of a replay: "identical" is said of steps that were compared to the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from resumekit.record.conditions import Header
from resumekit.record.journal import Has, Record
from resumekit.replay import ReplayResult
from resumekit.replay.isolation import list_files
from resumekit.replay.mounts import _decoded
from resumekit.replay.result import compare_rank

ONE_GPU = {"device": "cuda (X)", "gpus": "a", "torch": "2.13"}
EIGHT = {**ONE_GPU, "gpus": "a b c d e f g h"}
RUN = Header("run", "a" * 32, 1, 0, 1, 0, True, ("aaaaaaaa",), None, environment=ONE_GPU)
REPLAY = replace(RUN, attempt="b" * 32, number=2, resumed_step=0)
ALL = Has.IDS | Has.COUNT | Has.RNG | Has.LR | Has.LOSS
STEPS = range(1, 11)


@dataclass
class Journal:
    """What an attempt has recorded."""

    header: Header
    steps: Sequence[Record]

    def records(self, after: int = 0) -> list[Record]:
        return [each for each in self.steps if each.step > after]


def record(step: int, **values: Any) -> Record:
    fields = {"ids": step, "rng_torch": step, "rng_host": 1, "lr": 0.1, "lr_digest": 1}
    return Record(
        **{"step": step, "loss": 1.0 / step, "num_samples": 4, "has": ALL, **fields, **values}
    )


def replayed(now: Journal, *recorded: Journal) -> ReplayResult:
    rank = compare_rank([now], recorded)  # type: ignore[list-item, arg-type]
    return ReplayResult((rank,), (), STEPS[0], STEPS[-1], (), is_protected=True, exit_status=0)


WHOLE = Journal(RUN, [record(step) for step in STEPS])


def test_equal_steps_are_identical() -> None:
    result = replayed(Journal(REPLAY, WHOLE.steps), WHOLE)
    assert (result.is_equal, result.verdict) == (True, "10 steps replayed, identical")


def test_other_losses_on_other_gpus_are_not_called_identical() -> None:
    there = Journal(replace(RUN, environment=EIGHT), WHOLE.steps)
    result = replayed(Journal(REPLAY, [record(step, loss=2.0) for step in STEPS]), there)
    assert not result.is_equal
    assert "not comparable (loss differs by up to 9.5e-01, no proof: gpus" in result.verdict
    assert result.ranks[0].fields == {"sample ids": 10, "learning rates": 10, "loss": 10}
    assert replayed(Journal(REPLAY, WHOLE.steps), there).is_equal


@pytest.mark.parametrize("step", [5, 9])
def test_steps_after_the_last_that_was_compared_are_not_called_identical(step: int) -> None:
    """The run died there, or its journal has been thinned."""
    recorded = [each for each in WHOLE.steps if each.step <= step]
    result = replayed(Journal(REPLAY, WHOLE.steps), Journal(RUN, recorded))
    found = f"10 steps replayed, identical up to step {step}, not compared after it"
    assert (result.is_equal, result.verdict) == (False, found)


def test_steps_between_compared_ones_need_no_record() -> None:
    recorded = [each for each in WHOLE.steps if each.step in (5, 10)]
    assert replayed(Journal(REPLAY, WHOLE.steps), Journal(RUN, recorded)).is_equal


def test_a_loss_of_an_earlier_step_does_not_speak_for_the_last_one() -> None:
    recorded = [record(step, has=ALL if step == 3 else ALL & ~Has.LOSS) for step in STEPS]
    result = replayed(Journal(REPLAY, WHOLE.steps), Journal(RUN, recorded))
    assert not result.compares_weights
    assert result.verdict.endswith("learning rate identical; weights compared up to step 3 only")


def test_changes_are_those_since_the_attempt_that_recorded_the_steps() -> None:
    first = replace(RUN, code={"train.py": "old"})
    later = replace(RUN, attempt="c" * 32, number=2, resumed_step=10, code={"train.py": "new"})
    now = replace(REPLAY, number=3, code={"train.py": "new"})
    attempts = Journal(first, WHOLE.steps), Journal(later, [record(11)])
    result = replayed(Journal(now, [record(step, loss=2.0) for step in STEPS]), *attempts)
    assert "source of train.py" in result.ranks[0].changes


def test_a_mount_below_a_path_of_any_language_is_found() -> None:
    assert _decoded("/data/josé/with\\040space") == "/data/josé/with space"


def test_a_file_that_goes_while_files_are_listed_ends_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    assert list_files([tmp_path], but=tmp_path / "other") == {}
    monkeypatch.setattr("os.scandir", lambda _: (_ for _ in ()).throw(FileNotFoundError))
    assert list_files([tmp_path], but=tmp_path / "other") is None
