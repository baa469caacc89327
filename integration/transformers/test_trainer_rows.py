"""The Trainer with other models, data, callbacks and classes, killed by SIGKILL and started again.

Each row ends with the same bits: samples, losses, learning rates and gradient norms of every step,
weights, optimizer, the log, the callbacks, and what ``train()`` returns. The randomness is recorded
("tape") unless a row says that it is keyed.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest
from preloads import TRAINER

pytest.importorskip("transformers")

from trainer_workloads import RESULT, train
from transformers_workloads import NUM_BLOCKS
from used_samples import counts, ledger

from resumekit.prove import compare
from resumekit.testing import Cell, KillPoint, Kit

OPTIONAL = tuple(name for name in ("peft", "trl") if importlib.util.find_spec(name))
PRELOAD = (
    *TRAINER,
    "transformers.models.bert.modeling_bert",
    "transformers.models.t5.modeling_t5",
    *OPTIONAL,
    *(
        f"trl.trainer.{name}_trainer"
        for name in ("sft", "dpo", "reward", "kto", "grpo", "rloo")
        if "trl" in OPTIONAL
    ),
)
SAVE_EVERY = 3
STEPS_PER_EPOCH = 12
MIDDLE = KillPoint.step(STEPS_PER_EPOCH + 5)  # of the second epoch; two steps are repeated
BOUNDARY = KillPoint.checkpoint(STEPS_PER_EPOCH)
TWICE = (KillPoint.step(STEPS_PER_EPOCH + 4), KillPoint.step(STEPS_PER_EPOCH + 8))

ROWS: dict[str, tuple[dict[str, Any], tuple[KillPoint, ...]]] = {
    "masked at random by the collator": ({"kind": "masked"}, TWICE),
    "masked by 2 workers": ({"kind": "masked", "dataloader_num_workers": 2}, (MIDDLE,)),
    "a classifier": ({"kind": "classified"}, (MIDDLE,)),
    "sequence to sequence": ({"kind": "seq2seq"}, (MIDDLE,)),
    "LoRA": ({"kind": "lora"}, (MIDDLE,)),
    "a stream, in a later pass": ({"kind": "stream", "max_steps": 24}, TWICE),
    "a stream in 2 workers": (
        {"kind": "stream", "max_steps": 24, "dataloader_num_workers": 2},
        (MIDDLE,),
    ),
    "an unseeded sampler": ({"seedable": False}, TWICE),
    "averages in a callback": ({"callbacks": "averaging"}, TWICE),
    "two callbacks of one class": ({"callbacks": "two of a class"}, TWICE),
    "parameters that are frozen at a step": ({"callbacks": "freezing"}, TWICE),
    "arguments that are changed at a step": ({"callbacks": "tightening"}, TWICE),
    "an attribute that training sets once": ({"callbacks": "halving"}, TWICE),
    "attributes of the arguments and the state": ({"callbacks": "marking"}, TWICE),
    "what every start and epoch changes": ({"callbacks": "preparing"}, TWICE),
    "the same between two epochs": ({"callbacks": "preparing"}, (BOUNDARY,)),
    "a layer that anneals": ({"kind": "annealed"}, TWICE),
    "a Trainer that holds something": ({"kind": "weighed"}, TWICE),
    "a learning rate that the optimizer scales": ({"scaled": True}, (MIDDLE,)),
    "gradient checkpointing": ({"gradient_checkpointing": True}, (MIDDLE,)),
    "evaluated at the end of epochs": ({"eval_strategy": "epoch"}, (BOUNDARY,)),
    "evaluated before the start": (
        {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True},
        (MIDDLE,),
    ),
    "accumulated, the last window is short": (
        {"accumulate": 5, "kind": "masked"},
        (KillPoint.step(2), KillPoint.step(4)),
    ),
    "TRL, logged across a save": ({"kind": "sft", "logging_steps": 7}, TWICE),
    "TRL, preferences": ({"kind": "preferences", "logging_steps": 7}, TWICE),
    "TRL, preferences to a model that follows": (
        {"kind": "preferences", "sync_ref_model": True, "ref_model_sync_steps": 2},
        (MIDDLE,),
    ),
    "TRL, preferences to what was computed before": (
        {"kind": "preferences", "precompute_ref_log_probs": True},
        (BOUNDARY,),
    ),
    "TRL, a reward": ({"kind": "reward", "logging_steps": 7}, TWICE),
    "TRL, answers that are good or bad": ({"kind": "unpaired", "logging_steps": 7}, TWICE),
    "TRL, odds": ({"kind": "odds", "logging_steps": 7}, (MIDDLE,)),
    "TRL, completions that are used twice": (
        {
            "kind": "completions",
            "use_adaptive_entropy": True,
            "entropy_coef": 0.01,
            "entropy_target": 9.0,
            "log_completions": True,
        },
        TWICE,
    ),
    "TRL, completions in the middle of an accumulation window": (
        {"kind": "leave one out", "accumulate": 2, "epochs": 3, "logging_steps": 4},
        (KillPoint.step(8),),
    ),
}
# The loss falls, so nothing ever improves on the first one.
NEVER_BETTER = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
NEEDS = {"LoRA": "peft", **dict.fromkeys((row for row in ROWS if row.startswith("TRL")), "trl")}
needs_trl = pytest.mark.skipif("trl" not in OPTIONAL, reason="pip install trl")


def cell(options: dict[str, Any], *kills: KillPoint, world_size: int = 1) -> Cell:
    every = 1 if options.get("accumulate") else SAVE_EVERY
    return Cell(train, {"save_every": every, **options}, world_size, kills)


def require_exact(kit: Kit, one: Cell) -> None:
    verdict, run = kit.judge(one)
    assert not run.failure, run.failure
    assert not run.missed_kills
    assert verdict.exact, verdict
    expected = kit.run_uninterrupted(one).directory / "training" / RESULT
    found = run.directory / "training" / RESULT
    assert found.read_text(encoding="utf-8") == expected.read_text(encoding="utf-8")


@pytest.mark.quick(
    "masked by 2 workers",
    "LoRA",
    "a stream, in a later pass",
    "parameters*",
    "what every start and epoch changes",
    "a Trainer that holds something",
    "TRL, preferences",
)
@pytest.mark.parametrize("row", ROWS)
def test_a_killed_run_continues_exactly(kit: Kit, row: str) -> None:
    needed = NEEDS.get(row)
    if needed is not None and needed not in OPTIONAL:
        pytest.skip(f"pip install {needed}")
    options, kills = ROWS[row]
    require_exact(kit, cell(options, *kills))


@pytest.mark.quick("callbacks/attributes", "callbacks/trainer_state")
@pytest.mark.parametrize("component", ["callbacks/attributes", "callbacks/trainer_state", "model"])
def test_a_part_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(cell({"callbacks": "averaging"}, MIDDLE), component)


@pytest.mark.quick("attributes")
@pytest.mark.parametrize(
    ("options", "component"),
    [
        ({"kind": "weighed"}, "callbacks/attributes"),
        ({"callbacks": "freezing"}, "model/attributes"),
        ({"callbacks": "tightening"}, "callbacks/settings"),
        ({"callbacks": "halving"}, "callbacks/attributes"),
        ({"callbacks": "marking"}, "callbacks/settings"),
        ({"kind": "annealed"}, "model/attributes"),
    ],
    ids=["attributes", "frozen", "settings", "set once", "marks", "annealed"],
)
def test_what_user_code_has_set_is_caught_when_it_is_left_out(
    kit: Kit, options: dict[str, Any], component: str
) -> None:
    kit.assert_caught(cell(options, MIDDLE), component)


@pytest.mark.full
@needs_trl
@pytest.mark.parametrize(
    ("row", "component"),
    [
        ("TRL, logged across a save", "callbacks/trainer"),
        ("TRL, preferences to a model that follows", "callbacks/attributes"),
        ("TRL, completions that are used twice", "callbacks/generated"),
        ("TRL, completions that are used twice", "callbacks/attributes"),
    ],
)
def test_what_trl_holds_is_caught_when_it_is_left_out(kit: Kit, row: str, component: str) -> None:
    options, _ = ROWS[row]
    kit.assert_caught(cell(options, MIDDLE), component)


@pytest.mark.full
@needs_trl
def test_a_trainer_of_trl_that_holds_more_is_named_at_the_start(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(cell({"kind": "unknown"})))
    assert "InexactError" in run.failure
    assert "trl's GMPOTrainer" in run.failure


@pytest.mark.full
def test_early_stopping_ends_at_the_same_step(kit: Kit) -> None:
    options = {"stop_after": 3, "eval_strategy": "steps", "eval_steps": 2, **NEVER_BETTER}
    one = cell({"epochs": 3, **options}, KillPoint.step(6))
    require_exact(kit, one)
    result = kit.run_uninterrupted(one).directory / "training" / RESULT
    assert json.loads(result.read_text(encoding="utf-8"))["steps"] == 8  # of 36


@pytest.mark.full
@pytest.mark.parametrize("compiled_before", [True, False])
def test_compiled_on_one_side_only_continues_as_one_process_that_changes_over(
    kit: Kit, compiled_before: bool
) -> None:
    first, then = (
        {"compiled": each, "epochs": 1} for each in (compiled_before, not compiled_before)
    )
    reference = kit.run_uninterrupted(cell({**first, "switch_at": 6}))
    run = kit.run_again(kit.new_run(cell(first)), kill=KillPoint.step(8))
    run = kit.run_again(replace(run, cell=cell(then)))
    assert not run.failure, run.failure
    # In the first process the steps 7 and 8 were made in the former way; they do not count.
    verdict = compare(reference.trace, run.trace, expect_resume=True)
    assert verdict.exact, verdict
    assert [resume.step for resume in verdict.resumes] == [6]


@pytest.mark.quick("masked, unseeded")
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "masked", "seedable": False},
        {"kind": "stream", "max_steps": 12},
        pytest.param(
            {"kind": "completions", "log_completions": True, "epochs": 4}, marks=needs_trl
        ),
    ],
    ids=["masked, unseeded", "a stream", "completions"],
)
def test_two_ranks_continue_exactly(kit: Kit, options: dict[str, Any]) -> None:
    require_exact(kit, cell(options, KillPoint.step(10), world_size=2))


@pytest.mark.full
def test_four_ranks_sum_gradients_in_the_order_that_they_had(kit: Kit) -> None:
    # With ddp_find_unused_parameters=True, as it is by default, DDP never forms other buckets.
    options = {"kind": "seq2seq", "ddp_find_unused_parameters": False, "epochs": 1}
    one = cell({**options, "save_every": 1}, KillPoint.step(2), world_size=4)
    require_exact(kit, one)
    verdict, _ = kit.judge(one, inject="model/gradient_buckets")
    assert verdict.divergence is not None


CHANGES = ["world_size", "horizon", "batch_size"]


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_continues_between_two_epochs(
    kit: Kit, before: int, after: int
) -> None:
    """Each epoch is 92 samples, and 4 more that fill the last batches of two ranks."""
    boundary = KillPoint.checkpoint(STEPS_PER_EPOCH // before)
    one = cell({"allow": CHANGES}, boundary, world_size=before)
    run = kit.run_again(kit.new_run(one), kill=boundary)
    other = replace(one, world_size=after)
    run = kit.run_again(replace(run, cell=other))
    assert not run.failure, run.failure
    result = run.directory / "training" / RESULT
    steps = STEPS_PER_EPOCH // before + STEPS_PER_EPOCH // after
    assert json.loads(result.read_text(encoding="utf-8"))["steps"] == steps


ALLOWED = {"allow": CHANGES}
# 92 samples in batches of 8; after step 3 two ranks have used 48 of them, and one rank 24.
GEOMETRIES: dict[str, tuple[dict[str, Any], list[tuple[int, dict[str, Any], int]], list[int], int]]
GEOMETRIES = {
    "two to one": ({}, [(2, {}, 4), (1, {}, 0)], [0, 0], 3 + 6 + 12),
    "one to two": ({}, [(1, {}, 5), (2, {}, 0)], [12, 4], 3 + 5 + 6),
    "two to one and back": ({}, [(2, {}, 4), (1, {}, 8), (2, {}, 0)], [12, 4], 3 + 3 + 2 + 6),
    "two to one, in a later epoch": ({}, [(2, {}, 10), (1, {}, 0)], [4, 0], 9 + 6),
    "one to three, unseeded": ({"seedable": False}, [(1, {}, 5), (3, {}, 0)], [4, 4], 3 + 3 + 4),
    "two ranks with smaller batches": (
        {},
        [(2, {}, 4), (2, {"batch_size": 4}, 0)],
        [4, 4],
        3 + 6 + 12,
    ),
}


def relaunched(
    kit: Kit, common: dict[str, Any], plan: list[tuple[int, dict[str, Any], int]]
) -> Any:
    """A run whose launches have these ranks and options, killed at a step or (0) not at all."""
    run = kit.new_run(cell(common))
    for world_size, options, killed_at in plan:
        one = cell({**common, **options}, world_size=world_size)
        kill = KillPoint.step(killed_at) if killed_at else None
        run = kit.run_again(replace(run, cell=one), kill=kill)
    return run


@pytest.mark.quick("two to one and back")
@pytest.mark.parametrize("change", GEOMETRIES)
def test_within_an_epoch_other_ranks_use_each_sample_of_it_once(kit: Kit, change: str) -> None:
    common, plan, padding, steps = GEOMETRIES[change]
    run = relaunched(kit, {**ALLOWED, **common}, plan)
    used = counts(ledger(run))
    assert all(set(count) == set(range(NUM_BLOCKS)) for count in used.values())
    assert [used[epoch].total() - NUM_BLOCKS for epoch in (0, 1)] == padding
    result = run.directory / "training" / RESULT
    assert json.loads(result.read_text(encoding="utf-8"))["steps"] == steps


@pytest.mark.full
def test_with_the_global_batch_kept_by_accumulation_its_sequence_is_the_same(kit: Kit) -> None:
    allowed = {"allow": ["world_size"]}  # the run has as many steps as before
    whole = relaunched(kit, {**allowed, "save_every": 1}, [(2, {}, 0)])
    plan = [(2, {}, 4), (1, {"accumulate": 2}, 9), (2, {}, 0)]
    run = relaunched(kit, {**allowed, "save_every": 1}, plan)

    def steps(of: Any) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for each in ledger(of):
            found.setdefault(each.step, set()).update(each.samples)
        return found

    ends = (6, 12)  # the last step of an epoch on two ranks is filled up from its head
    before, after = steps(whole), steps(run)
    assert before.keys() == after.keys() == set(range(1, 13))
    assert all(before[step] == after[step] for step in before if step not in ends)
    assert all(before[step] >= after[step] for step in ends)


@pytest.mark.quick("options0-words0")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ("a job of 1 ranks", "2 ranks")),
        ({**ALLOWED, "sampling": "group_by_length"}, ("LengthGroupedSampler", "inside epoch 0")),
    ],
)
def test_another_number_of_ranks_within_an_epoch_may_be_refused(
    kit: Kit, options: dict[str, Any], words: tuple[str, str]
) -> None:
    options = {k if k != "sampling" else "train_sampling_strategy": v for k, v in options.items()}
    run = relaunched(kit, options, [(2, {}, 4), (1, {}, 0)])
    assert all(word in run.failure for word in words), run.failure
