"""Which tests a plain run leaves to ``nox -s full``.

The quick set keeps, for each adapter, a killed and resumed run of each feature and each negative
control once. What it leaves out repeats a cross product that the core's tests cover, or takes long.

Patterns are those of ``fnmatch`` on ``<folder>/<file>::<test>[<cell>]``, but for brackets, which
are meant as they stand. Tables are read from the top; the first pattern that matches decides.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# Tests of which only a sample runs: cells in which every value of every parameter occurs.
SAMPLED = (
    "accelerate/*::test_a_killed_run_continues_exactly*",
    "accelerate/*::test_a_run_that_saves_by_save_state_*",
    "data/*::test_every_way_to_feed_continues_exactly*",
    "deepspeed/*::test_every_stage_continues_exactly*",
    "lightning/test_lightning_sharded*::test_a_killed_run_continues_exactly*",
    "torch/*::test_a_loop_that_clears_them_*",
    "transformers/test_trainer_sharded*::test_a_*",
    "*::test_an_accumulated_run_continues_exactly*",
    "*::test_two_ranks_fed_otherwise_continue_exactly*",
)

QUICK, FULL = False, True

# Whether a test is left out. What no pattern names is in the quick set.
LEFT_OUT = (
    # Conformance suites: the matrix has each kill once on one rank, so two ranks are left.
    ("*/test_torch_exact*", QUICK),
    ("*_exact.py::*::test_a_killed_run_continues_exactly[*mid-epoch 0*", FULL),
    ("*_exact.py::*::test_a_killed_run_continues_exactly[*on the last step*", FULL),
    ("*_exact.py::*::test_a_killed_run_continues_exactly[*twice in one epoch*", FULL),
    ("deepspeed/*_exact.py::*::test_a_killed_run_continues_exactly*", QUICK),
    ("*_exact.py::*::test_a_killed_run_continues_exactly[*1 rank*", FULL),
    ("*_exact.py::*::test_the_identical_command_*[2 ranks]", FULL),
    # The journal of every adapter: the whole table under plain PyTorch, two rows of the others.
    ("shared/test_journal.py::test_the_journal_alone_*[test_torch_exact*", QUICK),
    ("shared/test_journal.py::test_the_journal_alone_*-model]", QUICK),
    ("shared/test_journal.py::test_the_journal_alone_*-data]", QUICK),
    ("shared/test_journal.py::test_the_journal_alone_*", FULL),
    # What takes minutes, or has the same code under it as a test of the core.
    ("shared/test_stock_resume.py::*", FULL),
    ("shared/test_benchmarks.py::*", FULL),
    ("data/test_data_ledger.py::test_every_kind_of_loader_is_fed_*", FULL),
    ("data/test_data_ledger.py::test_what_*", FULL),
    ("torch/test_faults.py::*at_every_call*", FULL),
    ("torch/test_faults.py::*in_the_middle_of_every_write*", FULL),
    ("torch/test_faults.py::test_a_rank_that_is_killed_in_a_save*[0-write:3*", QUICK),
    ("torch/test_faults.py::test_a_rank_that_is_killed_in_a_save*[1-fsync:2*", QUICK),
    ("torch/test_faults.py::test_a_rank_that_is_killed_in_a_save*", FULL),
    # Trainers of TRL: one of them.
    ("transformers/*[TRL, preferences]", QUICK),
    ("transformers/*[TRL, *", FULL),
    ("transformers/*::test_what_trl_holds_*", FULL),
    # Kinds of loaders and models, each in one form.
    ("lightning/test_lightning_rows.py::*, on the boundary]", FULL),
    ("lightning/test_lightning_rows.py::*, on the last step]", FULL),
    ("lightning/test_lightning_rows.py::*persistent workers]", FULL),
    ("lightning/test_lightning_rows.py::*2 workers]", FULL),
    ("data/test_data_many.py::*[zipped*", FULL),
    ("deepspeed/*[stage 3 on 2 ranks*", QUICK),
    ("deepspeed/*_left_out*[stage ? on *", FULL),
    ("deepspeed/*::test_fp16_with_skipped_steps_*[stage ? on *", FULL),
    ("deepspeed/test_deepspeed_gan.py::*[stage 0 on 2 ranks]", FULL),
    ("deepspeed/test_deepspeed_gan.py::*[stage 1 on ? ranks]", FULL),
    ("deepspeed/test_deepspeed_gan.py::*[stage 2 on ? ranks]", FULL),
    ("deepspeed/test_deepspeed_gan.py::*[stage 3 on 1 ranks]", FULL),
    ("lightning/test_lightning.py::*_no_bit_of_training_on[stream-2]", QUICK),
    ("lightning/test_lightning.py::*_no_bit_of_training_on[*-2]", FULL),
    ("transformers/test_trainer_rows.py::test_within_an_epoch_*[two ranks with *", FULL),
    ("transformers/test_trainer_rows.py::test_within_an_epoch_*, in a later epoch]", FULL),
    ("transformers/test_trainer_rows.py::test_within_an_epoch_*[two to one]", FULL),
    # Sharded models: every component under one layout, and each layout once.
    ("accelerate/test_accelerate_sharded.py::*[ZeRO-2-model]", QUICK),
    ("accelerate/test_accelerate_sharded.py::*[ZeRO-2-optimizer]", QUICK),
    ("accelerate/test_accelerate_sharded.py::test_a_component_left_out_*[ZeRO-2-*", FULL),
    ("*_sharded.py::test_accumulated_and_*[ZeRO-2]", FULL),
    ("*_sharded.py::test_accumulated_and_*[FSDP1]", FULL),
    ("torch/test_sharded.py::*_in_its_layout[fsdp1-2]", QUICK),
    ("torch/test_sharded.py::*_in_its_layout[fsdp1-?]", FULL),
    ("torch/test_sharded.py::*_in_its_layout[fsdp1 in bf16-2]", FULL),
    ("torch/test_sharded.py::*_in_its_layout[hsdp1-4]", FULL),
    ("torch/test_sharded.py::*_in_its_layout[offloaded-4]", FULL),
    ("torch/test_sharded.py::*_in_its_layout[tp-4]", FULL),
    ("torch/test_sharded.py::*_in_its_layout[fsdp-4]", FULL),
    ("torch/test_groups.py::*[2 stages of 2 ranks, by group]", FULL),
    ("torch/test_groups.py::*[4 stages]", FULL),
    ("torch/test_optimizer_parameters.py::*[* beside FSDP1]", FULL),
    ("torch/test_optimizer_parameters.py::*[* beside tensor parallel]", FULL),
    ("torch/test_optimizer_parameters.py::*[the head of a loss*", FULL),
    ("torch/test_optimizer_parameters.py::*[sharded layers in a list]", FULL),
)


def is_sampled(test: str) -> bool:
    """Whether only a sample of the cells of a test is in the quick set."""
    return any(_matches(test, pattern) for pattern in SAMPLED)


def is_left_out(test: str) -> bool:
    """Whether a test, with its cell, runs in ``nox -s full`` only."""
    return next((full for pattern, full in LEFT_OUT if _matches(test, pattern)), QUICK)


def _matches(test: str, pattern: str) -> bool:
    return fnmatchcase(test, pattern.replace("[", "[[]"))
