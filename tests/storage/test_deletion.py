from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resumekit.errors import ConfigurationError
from resumekit.storage.directories import StepName
from resumekit.storage.retention import Checkpoint, RetentionPolicy, may_delete, select_deletions

NAMES = st.builds(StepName, st.integers(0, 12).map(lambda n: n * 5), st.integers(0, 2))
METRICS = st.none() | st.fixed_dictionaries(
    {
        "name": st.sampled_from(["loss", "accuracy"]),
        "mode": st.sampled_from(["min", "max"]),
        "value": (st.floats() | st.sampled_from([0.5, math.nan])).map(float.hex),
    }
)
CHECKPOINTS = st.lists(
    st.builds(Checkpoint, NAMES, METRICS), max_size=12, unique_by=lambda item: item.name
)
POLICIES = st.builds(
    RetentionPolicy,
    keep_latest=st.none() | st.integers(1, 4),
    keep_best=st.integers(0, 3),
    keep_every=st.none() | st.integers(1, 20),
)


def _with_metric(
    step: int, value: float, mode: str = "min", revision: int = 0, name: str = "loss"
) -> Checkpoint:
    metric = {"name": name, "mode": mode, "value": float(value).hex()}
    return Checkpoint(StepName(step, revision), metric)


def _kept(checkpoints: list[Checkpoint], policy: RetentionPolicy) -> list[int]:
    gone = select_deletions(checkpoints, policy)
    return sorted(item.name.step for item in checkpoints if item.name not in gone)


@given(CHECKPOINTS, POLICIES, st.randoms())
def test_the_order_of_the_list_does_not_matter(
    checkpoints: list[Checkpoint], policy: RetentionPolicy, random: object
) -> None:
    shuffled = list(checkpoints)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert select_deletions(shuffled, policy) == select_deletions(checkpoints, policy)


@given(CHECKPOINTS, POLICIES, st.sets(st.integers(0, 11)))
def test_what_may_be_deleted_is_known_without_metrics_and_with_damage(
    checkpoints: list[Checkpoint], policy: RetentionPolicy, damaged: set[int]
) -> None:
    verified = [item for index, item in enumerate(checkpoints) if index not in damaged]
    names = [item.name for item in checkpoints]
    assert select_deletions(verified, policy) <= may_delete(names, policy)


@given(CHECKPOINTS, POLICIES)
def test_the_newest_stays_and_only_listed_ones_go(
    checkpoints: list[Checkpoint], policy: RetentionPolicy
) -> None:
    gone = select_deletions(checkpoints, policy)
    names = {item.name for item in checkpoints}
    assert gone <= names
    if names:
        assert max(names) not in gone


@given(CHECKPOINTS, POLICIES)
def test_what_a_policy_leaves_it_leaves_again(
    checkpoints: list[Checkpoint], policy: RetentionPolicy
) -> None:
    gone = select_deletions(checkpoints, policy)
    left = [item for item in checkpoints if item.name not in gone]
    assert select_deletions(left, policy) == frozenset()


@given(CHECKPOINTS, POLICIES)
def test_as_many_as_asked_stay(checkpoints: list[Checkpoint], policy: RetentionPolicy) -> None:
    left = {item.name for item in checkpoints} - select_deletions(checkpoints, policy)
    steps = sorted({item.name.step for item in checkpoints})
    if policy.keep_latest is None:
        assert len(left) == len(checkpoints)
        return
    assert set(steps[-policy.keep_latest :]) <= {name.step for name in left}
    if policy.keep_every is not None:
        assert {s for s in steps if s % policy.keep_every == 0} <= {name.step for name in left}


@example(
    [_with_metric(5, 2.0, name="accuracy"), _with_metric(10, 1.0), _with_metric(15, 3.0)],
    RetentionPolicy(keep_latest=1, keep_best=1),
)
@given(CHECKPOINTS, POLICIES.filter(lambda policy: policy.keep_best > 0))
def test_the_best_of_every_metric_stays(
    checkpoints: list[Checkpoint], policy: RetentionPolicy
) -> None:
    gone = select_deletions(checkpoints, policy)
    last = {item.name.step: item for item in sorted(checkpoints, key=lambda item: item.name)}
    for name, mode in (("loss", "min"), ("loss", "max"), ("accuracy", "min"), ("accuracy", "max")):
        values = {
            step: float.fromhex(item.metric["value"])
            for step, item in sorted(last.items())
            if item.metric is not None
            and (item.metric["name"], item.metric["mode"]) == (name, mode)
        }
        values = {step: value for step, value in values.items() if not math.isnan(value)}
        if values:
            best = (min if mode == "min" else max)(values.values())
            earliest = next(step for step, value in values.items() if value == best)
            assert last[earliest].name not in gone


@given(CHECKPOINTS, POLICIES)
def test_no_superseded_revision_stays(
    checkpoints: list[Checkpoint], policy: RetentionPolicy
) -> None:
    if policy.keep_latest is None:
        return
    left = {item.name for item in checkpoints} - select_deletions(checkpoints, policy)
    assert len({name.step for name in left}) == len(left)


def test_of_several_revisions_of_a_step_the_last_one_stays() -> None:
    checkpoints = [_with_metric(5, 1.0, revision=number) for number in (1, 2, 0)]
    gone = select_deletions(checkpoints, RetentionPolicy())
    assert gone == {StepName(5, 0), StepName(5, 1)}


def test_the_default_keeps_the_latest_two_and_the_best() -> None:
    checkpoints = [_with_metric(step, value) for step, value in ((1, 3), (2, 1), (3, 2), (4, 5))]
    assert _kept(checkpoints, RetentionPolicy()) == [2, 3, 4]


def test_a_metric_can_be_better_when_it_is_greater() -> None:
    checkpoints = [_with_metric(s, v, "max") for s, v in ((1, 3), (2, 1), (3, 2), (4, 0))]
    assert _kept(checkpoints, RetentionPolicy(keep_latest=1)) == [1, 4]


def test_a_nan_is_never_the_best_and_of_equal_ones_the_earlier_is() -> None:
    checkpoints = [
        _with_metric(s, v) for s, v in ((1, math.nan), (2, 1.0), (3, 1.0), (4, math.inf))
    ]
    assert _kept(checkpoints, RetentionPolicy(keep_latest=1)) == [2, 4]


def test_keep_every_is_for_ever() -> None:
    checkpoints = [Checkpoint(StepName(step)) for step in range(0, 100, 10)]
    policy = RetentionPolicy(keep_latest=1, keep_best=0, keep_every=40)
    assert _kept(checkpoints, policy) == [0, 40, 80, 90]


@pytest.mark.parametrize(
    "wrong",
    [{"keep_latest": 0}, {"keep_latest": -1}, {"keep_best": -1}, {"keep_every": 0},
     {"keep_latest": True}, {"keep_latest": 1.5}],
    ids=repr,
)  # fmt: skip
def test_numbers_without_meaning_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        RetentionPolicy(**wrong)
