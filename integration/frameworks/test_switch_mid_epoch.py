"""A run that is killed inside an epoch continues there in another framework, without any option.

Its samples are those of the epoch that was begun, each once, in the order that they had there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from preloads import ALL
from switch_mid_epoch_workloads import NUM_SAMPLES, SAVE_EVERY, train
from used_samples import ledger

from resumekit.record.moments import CHECKPOINT, RESUMED, read_trace
from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL
STEPS_PER_EPOCH = 15

PLAIN = {"framework": "torch"}
ACCELERATE = {"framework": "accelerate"}
SEEDABLE = {"framework": "accelerate", "seedable": True}
TRAINER = {"framework": "transformers"}
LIGHTNING = {"framework": "lightning"}

# They shuffle by the mechanism of the DataLoader, and so alike.
ALIKE = [PLAIN, ACCELERATE, LIGHTNING]


class Launch(NamedTuple):
    """One launch, and the step after which it is killed."""

    options: dict[str, Any]
    kill: int | None = None


@pytest.fixture(scope="module")
def whole(kit: Kit) -> Run:
    """A run of plain PyTorch that nobody interrupts."""
    return kit.run_uninterrupted(Cell(train, PLAIN))


def launched(
    kit: Kit,
    plan: Sequence[Launch],
    *,
    inject: str | None = None,
    num_ranks: int = 1,
    **common: Any,
) -> Run:
    """A run whose launches have what the plan says; they may fail."""
    run = kit.new_run(Cell(train, plan[0].options, world_size=num_ranks), inject=inject)
    for options, step in plan:
        cell = Cell(train, {**common, **options}, world_size=num_ranks)
        kill = None if step is None else KillPoint.step(step)
        run = kit.run_again(replace(run, cell=cell), kill=kill)
        if run.failure:
            break
    return run


def order(run: Run) -> dict[int, list[int]]:
    """The samples of each epoch as the logical run used them; of several ranks, step by step."""
    used: dict[int, list[int]] = {}
    for each in sorted(ledger(run), key=lambda each: (each.step, each.rank)):
        used.setdefault(each.epoch, []).extend(each.samples)
    return used


TRAINED = ("model", "optimizer", "lr_scheduler", "progress")
COUNTS = ("step", "micro_step", "epoch", "batch", "samples", "tokens")  # of the horizon another one


def require_taken_over(run: Run) -> None:
    """Each launch took over what the former one had saved, bit for bit."""
    saved: dict[int, Any] = {}
    num_resumed = 0
    for attempt in read_trace(run.trace)[0]:
        for record in attempt.records:
            if record.kind not in (CHECKPOINT, RESUMED):
                continue
            state = {key: dict(record.components[key]) for key in TRAINED}
            state["progress"] = {key: state["progress"][f"progress.{key}"] for key in COUNTS}
            state["rng"] = dict(record.parts["rng"])
            if record.kind == CHECKPOINT:
                saved[record.step] = state
            else:
                num_resumed += 1
                assert state == saved[record.step], record.step
                assert record.step % STEPS_PER_EPOCH  # inside an epoch
    assert num_resumed == len(run.launches) - 1


def trained(run: Run) -> dict[int, Any]:
    """What each save holds of the training, by step."""
    return {
        record.step: {key: dict(record.components[key]) for key in TRAINED[:3]}
        for attempt in read_trace(run.trace)[0]
        for record in attempt.records
        if record.kind == CHECKPOINT
    }


def log_of(run: Run) -> str:
    """All that rank 0 has printed."""
    logs = sorted(run.directory.glob("launch-*-rank-00000.log"))
    return "".join(log.read_text() for log in logs)


# ---------------------------------------------------------------- one rank


@pytest.mark.quick("lightning first")
@pytest.mark.parametrize(
    "frameworks",
    [[PLAIN, ACCELERATE, LIGHTNING, PLAIN], [PLAIN, LIGHTNING, ACCELERATE, PLAIN]],
    ids=["accelerate first", "lightning first"],
)
def test_where_the_next_epoch_is_drawn_alike_nothing_shows(
    kit: Kit, whole: Run, frameworks: list[dict[str, Any]]
) -> None:
    kills = (5, 11, 21, None)  # twice in the first epoch, once in the second
    run = launched(kit, list(map(Launch, frameworks, kills)))
    assert order(run) == order(whole)
    assert trained(run) == trained(whole)
    assert len(trained(run)) == 2 * STEPS_PER_EPOCH // SAVE_EVERY
    require_taken_over(run)
    assert "samples draw other random numbers, if they draw any" in log_of(run)


@pytest.mark.quick("to accelerate")
@pytest.mark.parametrize(
    "frameworks",
    [
        [PLAIN, TRAINER, ACCELERATE, TRAINER],
        [PLAIN, SEEDABLE, PLAIN, SEEDABLE],
        [TRAINER, LIGHTNING, TRAINER, PLAIN],
        [TRAINER, PLAIN, LIGHTNING, ACCELERATE],
        [TRAINER, SEEDABLE, ACCELERATE, LIGHTNING],
    ],
    ids=["trainer", "seedable", "from the trainer", "to plain", "to accelerate"],
)
def test_where_each_draws_in_its_own_way_the_order_of_the_epoch_stays(
    kit: Kit, whole: Run, frameworks: list[dict[str, Any]]
) -> None:
    is_plain = frameworks[0] is PLAIN
    uninterrupted = whole if is_plain else kit.run_uninterrupted(Cell(train, frameworks[0]))
    run = launched(kit, list(map(Launch, frameworks, (5, 8, 11, None))))
    used, expected = order(run), order(uninterrupted)
    assert used[0] == expected[0]
    assert sorted(used[1]) == list(range(NUM_SAMPLES))
    assert used[1] != used[0]
    found, known = trained(run), trained(uninterrupted)
    assert len(found) == len(known)
    for step in range(SAVE_EVERY, STEPS_PER_EPOCH, SAVE_EVERY):
        assert found[step] == known[step]
    require_taken_over(run)
    assert "continues at sample" in log_of(run)


@pytest.mark.full
def test_in_the_second_epoch_the_trainer_continues_too(kit: Kit, whole: Run) -> None:
    run = launched(kit, [Launch(PLAIN, 21), Launch(TRAINER, 25), Launch(PLAIN)])
    assert order(run) == order(whole)
    assert trained(run) == trained(whole)
    require_taken_over(run)


def test_at_the_end_of_an_epoch_and_of_the_run_each_takes_over(kit: Kit, whole: Run) -> None:
    plan = [Launch(PLAIN, 16), Launch(LIGHTNING), Launch(TRAINER), Launch(ACCELERATE)]
    run = launched(kit, plan, save_every=STEPS_PER_EPOCH)
    assert order(run) == order(whole)
    assert {each.launch for each in ledger(run)} == {0, 1}  # the others find it finished


@pytest.mark.full
def test_samples_that_draw_are_exact_with_keys_and_in_workers(kit: Kit) -> None:
    frameworks = [PLAIN, ACCELERATE, LIGHTNING]
    for common in ({"randomness": "keyed"}, {"workers": 2}):
        options: dict[str, Any] = {"augment": True, "epochs": 1, **common}
        uninterrupted = kit.run_uninterrupted(Cell(train, {**PLAIN, **options}))
        run = launched(kit, list(map(Launch, frameworks, (5, 9, None))), **options)
        assert order(run) == order(uninterrupted)
        assert trained(run) == trained(uninterrupted)
        assert "samples draw other random numbers" not in log_of(run)


@pytest.mark.full
def test_else_they_draw_other_numbers_and_it_is_reported(kit: Kit) -> None:
    options: dict[str, Any] = {"augment": True, "epochs": 1}
    uninterrupted = kit.run_uninterrupted(Cell(train, {**PLAIN, **options}))
    run = launched(kit, [Launch(PLAIN, 5), Launch(ACCELERATE)], **options)
    assert order(run) == order(uninterrupted)
    assert trained(run) != trained(uninterrupted)
    assert "data: equivalent (the framework that began the epoch" in log_of(run)


# ---------------------------------------------------------------- two ranks


@pytest.mark.full
@pytest.mark.parametrize(
    "frameworks", [[PLAIN, ACCELERATE, PLAIN], [ACCELERATE, PLAIN, TRAINER]], ids=["out", "in"]
)
def test_on_two_ranks_the_rest_is_divided_as_the_other_does_it(
    kit: Kit, frameworks: list[dict[str, Any]]
) -> None:
    cell = Cell(train, frameworks[0], world_size=2)
    expected = order(kit.run_uninterrupted(cell))
    run = launched(kit, list(map(Launch, frameworks, (3, 6, None))), num_ranks=2)
    used = order(run)
    for step in range(NUM_SAMPLES // 8):  # all but the last step, which is padded
        batch = slice(8 * step, 8 * step + 8)
        assert sorted(used[0][batch]) == sorted(expected[0][batch])
    for epoch in (0, 1):
        assert set(used[epoch]) == set(range(NUM_SAMPLES))
        assert len(used[epoch]) - NUM_SAMPLES <= 4
    require_taken_over(run)


# ---------------------------------------------------------------- it can fail


@pytest.mark.quick("transformers")
@pytest.mark.parametrize("then", [ACCELERATE, TRAINER, LIGHTNING], ids=lambda o: o["framework"])
def test_without_the_position_samples_come_twice(kit: Kit, then: dict[str, Any]) -> None:
    run = launched(kit, [Launch(PLAIN, 5), Launch(then)], inject="data", epochs=1)
    assert len(set(order(run)[0])) < len(order(run)[0])


@pytest.mark.full
def test_without_the_optimizer_other_bits_are_trained(kit: Kit, whole: Run) -> None:
    run = launched(kit, [Launch(PLAIN, 5), Launch(ACCELERATE)], inject="optimizer", epochs=1)
    found, expected = trained(run), trained(whole)
    assert found[4] == expected[4]
    assert found[6] != expected[6]


def test_another_seed_of_one_and_the_same_sampler_is_refused(kit: Kit) -> None:
    run = launched(kit, [Launch(TRAINER, 5), Launch({**SEEDABLE, "seed": 9})])
    assert "DataPositionError" in run.failure
    assert "another order" in run.failure
