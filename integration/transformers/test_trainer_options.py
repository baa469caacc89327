"""Options of the TrainingArguments that people set: killed, a run continues with the same bits.

Each value of each factor is there; with ``--full-matrix`` every two values of two factors meet.
"""

from __future__ import annotations

from typing import Any

import pytest
from preloads import TRAINER

pytest.importorskip("transformers")

from trainer_workloads import train

from resumekit.testing import Cell, KillPoint, Kit, pairwise

PRELOAD = TRAINER
STEPS_PER_EPOCH = 12
KILLS = {
    "mid-epoch": (KillPoint.step(8), KillPoint.step(STEPS_PER_EPOCH + 5)),
    "boundary": (KillPoint.checkpoint(STEPS_PER_EPOCH),),
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 3}},
    "reduce_lr_on_plateau": {
        # The loss falls, so nothing ever improves on the first one.
        "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5, "mode": "max"},
        "greater_is_better": True,
        **EVALUATED,
    },
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 9}},
    "greedy": {
        "lr_scheduler_kwargs": {"patience": 1, "smooth": True, "window_size": 3},
        **EVALUATED,
    },
}
OPTIMIZERS = ("adamw_torch", "adafactor", "sgd", "rmsprop", "adagrad")
OPTIONS: dict[str, dict[str, Any]] = {
    "noise in the embeddings": {"neftune_noise_alpha": 5.0},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "tokens counted": {"include_num_input_tokens_seen": "all", "logging_nan_inf_filter": False},
    "the last batch dropped": {"dataloader_drop_last": True, "torch_empty_cache_steps": 2},
    "in order": {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance", "logging_strategy": "epoch"},
    "beside its own saving on each node": {
        "save_strategy": "steps",
        "save_steps": 4,
        "save_on_each_node": True,
        "restore_callback_states_from_checkpoint": True,
        **EVALUATED,
    },
}
FACTORS = {
    "scheduler": tuple(SCHEDULERS),
    "optimizer": OPTIMIZERS,
    "option": tuple(OPTIONS),
    "kill": tuple(KILLS),
}


def each_value() -> list[dict[str, str]]:
    """As many combinations as the longest factor has values."""
    longest = max(map(len, FACTORS.values()))
    rows = (
        {name: values[i % len(values)] for name, values in FACTORS.items()} for i in range(longest)
    )
    return list(rows)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "one" in metafunc.fixturenames:
        chosen = pairwise(FACTORS) if metafunc.config.getoption("--full-matrix") else each_value()
        metafunc.parametrize("one", chosen, ids=[", ".join(each.values()) for each in chosen])


@pytest.mark.quick("warmup_stable_decay, sgd*")
def test_a_killed_run_continues_exactly(kit: Kit, one: dict[str, str]) -> None:
    options = {
        "scheduler": one["scheduler"],
        "optim": one["optimizer"],
        **SCHEDULERS[one["scheduler"]],
        **OPTIONS[one["option"]],
    }
    kit.assert_exact(Cell(train, {"save_every": 3, **options}, 1, KILLS[one["kill"]]))


@pytest.mark.quick("True")
@pytest.mark.parametrize("sampled", [False, True])
def test_evaluated_by_generating_it_continues_exactly(kit: Kit, sampled: bool) -> None:
    options = {"kind": "seq2seq", "predict_with_generate": True, "sampled": sampled}
    evaluated = {"eval_strategy": "steps", "eval_steps": 5}
    kills = (KillPoint.step(7), KillPoint.step(STEPS_PER_EPOCH + 5))
    kit.assert_exact(Cell(train, {"save_every": 3, **options, **evaluated}, 1, kills))


def test_tokens_averaged_over_two_ranks_continue_exactly(kit: Kit) -> None:
    options = {"average_tokens_across_devices": True, "include_num_input_tokens_seen": "all"}
    kit.assert_exact(Cell(train, {"save_every": 3, **options}, 2, (KillPoint.step(8),)))


@pytest.mark.quick("lr_scheduler")
@pytest.mark.parametrize("component", ["lr_scheduler", "optimizer", "rng"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    options = {"scheduler": "greedy", **SCHEDULERS["greedy"], "neftune_noise_alpha": 5.0}
    kit.assert_caught(Cell(train, {"save_every": 3, **options}, 1, (KillPoint.step(8),)), component)
