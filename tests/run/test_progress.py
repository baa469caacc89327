"""The counters of a run and the selection of the best checkpoint, restored from a checkpoint."""

from __future__ import annotations

import pytest

from resumekit.run.progress import BestSelection, Counters


def counted(*, num_batches: int) -> Counters:
    """Two steps of three batches each, and some batches of the third."""
    counters = Counters()
    for _ in range(2):
        for _ in range(3):
            counters.count_batch(4)
        counters.count_step()
    for _ in range(num_batches):
        counters.count_batch(4)
    return counters


@pytest.mark.parametrize("num_batches", [0, 2])
def test_the_accumulation_window_of_the_checkpoint_is_known_after_a_resume(
    num_batches: int,
) -> None:
    running, resumed = counted(num_batches=num_batches), Counters()
    resumed.load_state_dict(running.state_dict())
    is_open = num_batches > 0
    assert resumed.is_within_window() is running.is_within_window() is is_open
    resumed.count_batch(4)
    resumed.count_step()
    # A journal compares the samples of a step that this process has used from its first batch on.
    assert resumed.saw_whole_step is not is_open
    resumed.count_batch(4)
    resumed.count_step()
    assert resumed.saw_whole_step


def test_samples_since_the_checkpoint_are_counted_from_it() -> None:
    counters = counted(num_batches=1)
    counters.load_state_dict(Counters().state_dict())
    assert counters.samples_so_far(2) == 0
    counters.count_batch(4)
    assert counters.samples_so_far(2) == 8


def test_the_latest_value_of_the_metric_is_that_of_the_checkpoint() -> None:
    running = BestSelection("loss", "min")
    running.report({"loss": 1.0}, step=3)
    running.report({"loss": 2.0}, step=4)
    resumed = BestSelection("loss", "min")
    assert resumed.load_state_dict(running.state_dict()) == ()
    assert resumed.state_dict() == running.state_dict()
    assert resumed.metric_of(4) == running.metric_of(4)
    assert resumed.metric_of(4) is not None
    assert resumed.was_reported
    assert not resumed.report({"loss": 1.5}, step=5)


def test_a_nan_is_never_the_best_value() -> None:
    selection = BestSelection("loss", "min")
    assert not selection.report({"loss": float("nan")}, step=1)
    assert selection.report({"loss": 2.0}, step=2)


def test_a_checkpoint_records_the_metric_of_its_own_step_only() -> None:
    selection = BestSelection("loss", "min")
    selection.report({"loss": 2.0}, step=2)
    assert selection.metric_of(2) == {"name": "loss", "mode": "min", "value": (2.0).hex()}
    assert selection.metric_of(3) is None


def test_another_metric_or_mode_has_no_best_value_yet() -> None:
    running = BestSelection("loss", "min")
    running.report({"loss": 1.0}, step=3)
    for other in (BestSelection("error", "min"), BestSelection("loss", "max")):
        (message,) = other.load_state_dict(running.state_dict())
        assert "it has no best value yet" in message
        assert not other.was_reported
