"""Accelerate with several models, a compiled one, ranks that differ, and runs killed many times."""

from __future__ import annotations

import pytest
from preloads import ACCELERATE

pytest.importorskip("accelerate")

from accelerate_many_workloads import compiled, gan, local_sgd

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ACCELERATE


@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_models_with_two_optimizers_continue_exactly(kit: Kit, world_size: int) -> None:
    epoch = 12 // world_size
    kills = (KillPoint.step(4), KillPoint.checkpoint(epoch), KillPoint.step(epoch + 5))
    kit.assert_exact(Cell(gan, {}, world_size, kills))


@pytest.mark.quick("marked")
@pytest.mark.parametrize("mark", [True, False], ids=["marked", "not marked"])
def test_models_that_step_on_different_batches_continue_exactly(kit: Kit, mark: bool) -> None:
    # 24 batches make 8 steps of 3.
    options = {"mark": mark, "critic_batches": 3, "save_every": 1}
    verdict = kit.assert_exact(Cell(gan, options, 1, (KillPoint.step(2), KillPoint.checkpoint(6))))
    assert verdict.resumes[-1].step == 6


@pytest.mark.quick("model/Sequential-1", "optimizer/AdamW-0")
@pytest.mark.parametrize("component", ["model/Sequential-1", "optimizer/AdamW-0", "lr_scheduler"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(Cell(gan, {}, 1, (KillPoint.step(5),)), component)


@pytest.mark.full
def test_a_compiled_model_continues_exactly(kit: Kit) -> None:
    kit.assert_exact(Cell(compiled, {}, 1, (KillPoint.step(5), KillPoint.step(16))))


@pytest.mark.full
def test_a_run_that_is_killed_six_times_ends_with_the_same_bits(kit: Kit) -> None:
    kills = tuple(map(KillPoint.step, (2, 5, 11, 13, 17, 23)))
    kit.assert_exact(Cell(gan, {}, 1, kills))


@pytest.mark.full
def test_ranks_that_take_the_mean_of_their_weights_continue_exactly_from_there(kit: Kit) -> None:
    kills = (KillPoint.step(7), KillPoint.step(18))
    kit.assert_exact(Cell(local_sgd, {"save_every": 4}, 2, kills))


def test_ranks_that_are_apart_are_refused_at_the_save(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(local_sgd, {}, 2)))
    assert "RankDisagreementError" in run.failure
    assert "model" in run.failure
