"""When a command is started again."""

from __future__ import annotations

import signal

import pytest

from resumekit.supervisor import RestartPolicy
from resumekit.supervisor.policy import exit_status


def test_the_delay_doubles_up_to_a_minute() -> None:
    policy = RestartPolicy(max_restarts=10)
    decisions = [policy.after(1, has_progress=False, has_stepped=True) for _ in range(9)]
    assert [each.delay_seconds for each in decisions] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_restarts_without_a_new_checkpoint_are_limited() -> None:
    policy = RestartPolicy(max_restarts=2)
    steps = [True, False, False, True, False, False]
    restarts = [policy.after(1, has_progress=each, has_stepped=True).restarts for each in steps]
    assert restarts == [True, True, False, True, True, False]


def test_two_launches_that_end_before_the_first_step_are_the_last() -> None:
    policy = RestartPolicy(max_restarts=5)
    assert policy.after(1, has_progress=False, has_stepped=False).restarts
    assert policy.after(1, has_progress=False, has_stepped=True).restarts
    assert policy.after(1, has_progress=False, has_stepped=False).restarts
    decision = policy.after(1, has_progress=False, has_stepped=False)
    assert (decision.restarts, decision.reason) == (
        False,
        "2 launches ended before the first step",
    )


def test_no_restart_at_all() -> None:
    assert not RestartPolicy(max_restarts=0).after(1, has_progress=True, has_stepped=True).restarts


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (0, "done"),
        (2, "a usage error"),
        (143, "preempted by SIGTERM"),
        (138, "preempted by SIGUSR1"),
        (130, "preempted by SIGINT"),
    ],
)
def test_these_exits_are_final(status: int, reason: str) -> None:
    decision = RestartPolicy(max_restarts=3).after(status, has_progress=True, has_stepped=True)
    assert (decision.restarts, decision.reason) == (False, reason)


@pytest.mark.parametrize("status", [1, 3, 134, 137, 139])
def test_these_exits_are_crashes(status: int) -> None:
    assert RestartPolicy(max_restarts=1).after(status, has_progress=True, has_stepped=True).restarts


def test_no_restart_after_a_signal_that_was_forwarded() -> None:
    policy = RestartPolicy(max_restarts=3)
    decision = policy.after(1, has_progress=True, has_stepped=True, received="SIGTERM")
    assert (decision.restarts, decision.reason) == (False, "SIGTERM was forwarded")


def test_a_signal_gives_the_exit_status_of_a_shell() -> None:
    assert exit_status(-signal.SIGKILL) == 137
    assert exit_status(3) == 3
