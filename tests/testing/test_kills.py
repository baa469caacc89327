"""Where runs are killed: each point is what its name says, whatever the length of an epoch."""

from __future__ import annotations

import pytest

from resumekit.errors import ConfigurationError
from resumekit.testing import KILL_POINTS, KillPoint, kill_points

LENGTHS = [(3, 1), (4, 2), (5, 1), (6, 3), (9, 3), (10, 5), (12, 1), (12, 3), (12, 4), (40, 10)]


@pytest.mark.parametrize(("epoch", "every"), LENGTHS)
def test_every_point_is_what_its_name_says(epoch: int, every: int) -> None:
    points = kill_points(epoch, every)
    assert tuple(points) == KILL_POINTS
    at = {name: [kill.number for kill in kills] for name, kills in points.items()}
    saved = {name: [kill.newest_save(every) for kill in kills] for name, kills in points.items()}

    (first,), (second,) = at["mid-epoch 0"], at["mid-epoch 1"]
    assert every < first < epoch < epoch + every < second < 2 * epoch
    assert first % every or every == 1, "a kill between two saves"
    assert points["on the boundary"] == (KillPoint.checkpoint(epoch),)
    assert points["on the last step"] == (KillPoint.step(2 * epoch),)
    assert points["after the last save"] == (KillPoint.checkpoint(2 * epoch),)
    assert saved["after the last save"] == [2 * epoch]
    assert saved["on the last step"] == [2 * epoch - every]

    assert all(epoch < save < 2 * epoch for save in saved["twice in one epoch"]), "both mid-epoch"
    one, other, third = saved["three times"]
    assert one == other == every or every == 1
    assert third == epoch + every

    for name, numbers in at.items():
        assert numbers == sorted(set(numbers)), f"{name}: a kill that the one before prevents"
        assert max(numbers) <= 2 * epoch
        assert min(saved[name]) > 0, f"{name}: nothing was saved, so nothing would resume"


@pytest.mark.parametrize(("epoch", "every"), [(9, 3), (10, 2), (12, 3), (12, 1)])
def test_the_second_of_two_kills_resumes_from_what_a_resumed_launch_saved(
    epoch: int, every: int
) -> None:
    kills = kill_points(epoch, every)["twice in one epoch"]
    first, second = (kill.newest_save(every) for kill in kills)
    assert first < second


def test_a_longer_run_ends_later() -> None:
    assert kill_points(12, 3, num_epochs=3)["on the last step"] == (KillPoint.step(36),)


@pytest.mark.parametrize(
    ("epoch", "every", "num_epochs"), [(2, 1, 2), (12, 5, 2), (3, 3, 2), (12, 0, 2), (12, 3, 1)]
)
def test_an_epoch_without_these_points_is_refused(epoch: int, every: int, num_epochs: int) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        kill_points(epoch, every, num_epochs=num_epochs)
