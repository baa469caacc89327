"""The comparison of repeated steps: what is a difference, and what proves nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from resumekit.record.comparison import Comparison, replayed, worst
from resumekit.record.conditions import Header
from resumekit.record.journal import LOSS, SAVE, WEIGHTS, Has, Record

CPU = {"device": "cpu", "threads": 2, "deterministic": False, "torch": "2.13"}
GPU = {**CPU, "device": "cuda (X)"}
THEN = Header("run", "a" * 32, 1, 0, 1, 0, True, ("aaaaaaaa",), None, environment=CPU)
NOW = replace(THEN, attempt="b" * 32, number=2, resumed_step=5)
ALL = Has.IDS | Has.COUNT | Has.RNG | Has.LR | Has.LOSS


def record(step: int, **values: Any) -> Record:
    fields = {"ids": step, "rng_torch": step, "rng_host": 1, "lr": 0.1, "lr_digest": 1}
    return Record(
        **{"step": step, "loss": 1.0 / step, "num_samples": 4, "has": ALL, **fields, **values}
    )


STEPS = [record(step) for step in range(6, 10)]
WEIGHTS_OF_STEPS = [Record(step, ids=step, num_samples=9, kind=WEIGHTS) for step in range(6, 10)]


def test_a_step_count_that_does_not_follow_the_checkpoint_is_a_difference() -> None:
    comparison = compare([record(1)], past=[])
    assert str(comparison.difference) == "step 1: step count 0, the checkpoint had 5"
    on_purpose = compare([record(1)], past=[], header=replace(NOW, excluded=("progress",)))
    assert on_purpose.difference is None


def compare(
    now: list[Record], *, then: Header = THEN, header: Header = NOW, past: list[Record] = STEPS
) -> Comparison:
    comparison = Comparison(header, [(then, past)])
    for each in now:
        comparison.add(each)
    return comparison


def test_equal_steps_are_identical_and_counted() -> None:
    past = [*STEPS, *WEIGHTS_OF_STEPS]
    comparison = compare([*past, record(10), record(11)], past=past)
    assert str(comparison.verdict) == "4 repeated steps: identical"
    assert comparison.last_step == 9


def test_steps_that_a_trained_model_feeds_are_never_identical() -> None:
    fed = replace(NOW, fed_by="Actor")
    past = [*STEPS, *WEIGHTS_OF_STEPS]
    verdict = str(compare(past, past=past, header=fed).verdict)
    reason = "a stream uses Actor, which training changes"
    assert verdict == f"4 repeated steps: not comparable ({reason})"
    assert compare([record(6, loss=0.5)], header=fed).verdict.word == "different"


@pytest.mark.parametrize(
    ("has", "weights", "missing"),
    [
        (ALL, [], "weights not compared"),
        (ALL & ~Has.IDS, WEIGHTS_OF_STEPS, "sample ids not compared"),
        (ALL & ~Has.IDS & ~Has.LOSS, [], "sample ids and weights not compared"),
    ],
)
def test_what_was_not_compared_is_said(has: int, weights: list[Record], missing: str) -> None:
    past = [*(record(step, has=has) for step in range(6, 10)), *weights]
    assert str(compare(past, past=past).verdict) == f"4 repeated steps: identical ({missing})"


def test_other_weights_are_a_difference_where_they_prove_something() -> None:
    past = [*STEPS, *WEIGHTS_OF_STEPS]
    now = [*STEPS, *WEIGHTS_OF_STEPS[:2], WEIGHTS_OF_STEPS[2]._replace(ids=5)]
    difference = compare(now, past=past).difference
    assert difference is not None
    assert (difference.step, difference.kind) == (8, "weights")
    elsewhere = replace(THEN, environment={**NOW.environment, "threads": 7})
    comparison = compare(now, past=past, then=elsewhere)
    assert comparison.difference is None
    assert "weights differ, no proof: threads 7" in str(comparison.verdict)


def test_without_repeated_steps_nothing_is_repeated() -> None:
    assert str(compare([record(6)], past=[]).verdict) == "nothing repeated"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"ids": 0}, "sample ids"),
        ({"num_samples": 3}, "sample ids"),
        ({"rng_torch": 0}, "random state"),
        ({"rng_host": 0}, "random state"),
        ({"lr": 0.2, "lr_digest": 2}, "learning rate"),
        ({"lr_digest": 2}, "learning rate"),
        ({"loss": 0.5}, "loss"),
        ({"loss": math.nan}, "loss"),
    ],
)
def test_each_class_of_difference_is_found_at_its_first_step(
    change: dict[str, Any], kind: str
) -> None:
    comparison = compare([STEPS[0], record(7, **change), record(8, ids=0)])
    assert comparison.difference is not None
    assert (comparison.difference.step, comparison.difference.kind) == (7, kind)
    assert comparison.verdict.word == "different"
    assert comparison.verdict.num_steps == 2


def test_what_one_side_does_not_know_is_not_compared() -> None:
    now = [record(6, has=0, ids=0, rng_torch=0, lr_digest=0, loss=9.0, num_samples=0)]
    assert compare(now).verdict.word == "identical"


def test_two_losses_that_are_no_numbers_are_equal() -> None:
    past = [record(6, loss=math.nan)]
    assert compare([record(6, loss=-math.nan)], past=past).verdict.word == "identical"


def test_a_loss_that_was_recorded_late_is_compared() -> None:
    past = [record(6, has=ALL & ~Has.LOSS), Record(6, loss=0.25, has=Has.LOSS, kind=LOSS)]
    assert compare([record(6, loss=0.25)], past=past).verdict.word == "identical"
    late = Record(6, loss=0.5, has=Has.LOSS, kind=LOSS)
    comparison = compare([record(6, has=ALL & ~Has.LOSS), late], past=past)
    assert comparison.difference is not None
    assert comparison.difference.kind == "loss"


def test_the_random_state_at_a_save_is_compared_with_the_saves_at_that_position() -> None:
    past = [record(6)] + [
        Record(6, rng_torch=n, num_samples=6, has=Has.RNG, kind=SAVE) for n in (1, 2)
    ]
    for state, word in ((1, "identical"), (2, "identical"), (3, "different")):
        save = Record(6, rng_torch=state, num_samples=6, has=Has.RNG, kind=SAVE)
        assert compare([record(6), save], past=past).verdict.word == word
        elsewhere = save._replace(num_samples=7)
        assert compare([record(6), elsewhere], past=past).verdict.word == "identical"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"world_size": 2}, "world size 1 -> 2"),
        ({"geometry": {"train": {"batch_size": 8}}}, "batch geometry"),
        ({"options": {"horizon": 2}}, "option horizon"),
        ({"code": {"train.py": "2"}}, "source of train.py"),
        ({"excluded": ("optimizer",)}, "optimizer not restored"),
        ({"lineage": ("aaaaaaaa", "bbbbbbbb")}, "the run was changed in between"),
    ],
)
def test_after_a_change_of_the_run_steps_are_not_comparable(
    changed: dict[str, Any], reason: str
) -> None:
    geometry = {"train": {"batch_size": 4}}
    then = replace(THEN, geometry=geometry, options={"horizon": 1}, code={"train.py": "1"})
    now = replace(NOW, geometry=geometry, options={"horizon": 1}, code={"train.py": "1"})
    assert compare(STEPS, then=then, header=now).verdict.word == "identical"
    comparison = compare([record(6, ids=0)], then=then, header=replace(now, **changed))
    assert comparison.difference is None
    assert str(comparison.verdict) == f"1 repeated step: not comparable ({reason})"
    has_no_effect = reason.startswith(("batch geometry", "option", "the run"))
    verdict = compare(STEPS, then=then, header=replace(now, **changed)).verdict
    assert verdict.word == ("identical" if has_no_effect else "not comparable")


def test_another_run_in_the_same_directory_is_not_compared() -> None:
    then = replace(THEN, lineage=("cccccccc",))
    assert compare([record(6, ids=0)], then=then).verdict.word == "nothing repeated"


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        (CPU, {**CPU, "threads": 4}, "threads 2 -> 4"),
        (CPU, {**CPU, "torch": "2.14"}, "torch 2.13 -> 2.14"),
        (
            GPU,
            GPU,
            "this device repeats bits only with torch.use_deterministic_algorithms(True)",
        ),
        (
            {**GPU, "deterministic": True, "driver": "580.1"},
            {**GPU, "deterministic": True, "driver": "580.2"},
            "driver 580.1 -> 580.2",
        ),
    ],
)
def test_a_loss_alone_proves_nothing_on_another_machine(
    then: dict[str, Any], now: dict[str, Any], reason: str
) -> None:
    comparison = compare(
        [record(6, loss=(1 + 1e-6) / 6), record(7)],
        then=replace(THEN, environment=then),
        header=replace(NOW, environment=now),
    )
    verdict = comparison.verdict
    assert comparison.difference is None
    assert verdict.word == "identical"
    assert verdict.loss == f"loss differs by up to 1.0e-06, no proof: {reason}"
    with_ids = compare(
        [record(6, ids=0)],
        then=replace(THEN, environment=then),
        header=replace(NOW, environment=now),
    )
    assert with_ids.verdict.word == "different"


def test_deterministic_algorithms_make_the_loss_of_a_gpu_a_proof() -> None:
    environment = {**GPU, "deterministic": True}
    comparison = compare(
        [record(6, loss=0.5)],
        then=replace(THEN, environment=environment),
        header=replace(NOW, environment=environment),
    )
    assert comparison.verdict.word == "different"


def test_on_another_device_random_states_are_not_compared() -> None:
    moved = replace(NOW, environment=GPU)
    assert compare([record(6, rng_torch=0)], header=moved).verdict.word == "identical"


@pytest.mark.parametrize("gpus", [{"gpus": "8 x X"}, {}], ids=["other GPUs", "an older journal"])
def test_on_other_gpus_the_states_of_their_generators_are_not_compared(gpus: Any) -> None:
    drawn = record(6, rng_devices=1, has=ALL | Has.DEVICE_RNG)
    then = replace(THEN, environment={**GPU, **gpus})
    now = replace(NOW, environment={**GPU, "gpus": "4 x X"})
    past = [drawn._replace(rng_devices=2)]
    assert compare([drawn], then=then, header=now, past=past).verdict.word == "identical"
    same = replace(then, environment=now.environment)
    assert compare([drawn], then=same, header=now, past=past).verdict.word == "different"
    for former, word in ((then, "identical"), (same, "different")):
        attempt: Any = SimpleNamespace(header=former, records=lambda after: past)
        comparison = replayed(now, [attempt])
        comparison.add(drawn)
        assert comparison.verdict.word == word


def test_the_latest_attempt_that_is_comparable_counts() -> None:
    second = replace(NOW, attempt="c" * 32)
    third = replace(NOW, attempt="d" * 32, number=3, world_size=2)
    now = replace(NOW, number=4)
    wrong = [record(6, ids=99), record(7, ids=99)]
    comparison = Comparison(now, [(THEN, wrong), (second, STEPS), (third, wrong)])
    for each in STEPS:
        assert comparison.add(each) is None
    assert comparison.verdict.word == "identical"


def test_the_worst_of_several_ranks_counts() -> None:
    words = ("identical", "nothing repeated", "different", "not comparable")
    found = [{"verdict": word, "num_steps": 1} for word in words]
    assert worst(found)["verdict"] == "different"
    assert worst(found[:2])["verdict"] == "identical"
