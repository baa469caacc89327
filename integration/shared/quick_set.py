"""Which tests a plain run has, and which it leaves to ``nox -s full``.

The quick set keeps, for each adapter, a killed and resumed run of each feature and each negative
control once. What it leaves out repeats a cross product that tests of the core cover, shows the
same code in another form, or takes long. A file that no table names is in the quick set.

Patterns are those of ``fnmatch`` on ``<test>[<cell>]``, but for brackets, which are meant as they
stand. Files are given by their path in ``integration/``, without ``.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

# Of these files the quick set has these tests alone.
KEPT: dict[str, tuple[str, ...]] = {
    "transformers/test_transformers_script": ("test_it_is_*",),
    "torch/test_restarts": ("*[checkpoint:6]",),
    "golden/test_golden": (
        "test_an_earlier_*",
        "*[rng]",
        "test_the_files_*[torch]",
        "test_the_files_*[sharded]",
        "test_another_*",
    ),
    "user_scripts/test_user_state": (
        "*[torch]",
        "test_without_what_*",
    ),
    "shared/test_commands": ("test_a_command_*",),
    "accelerate/test_accelerate_elastic": (
        "test_the_rest_*[shuffle-ranks0-4]",
        "test_the_rest_*[generator-ranks5-12]",
        "test_a_position_*",
        "test_pin_*",
        "test_what_*",
    ),
    "accelerate/test_accelerate_loops": ("test_ranks_*", "test_the_turn_*", "*in the order of *"),
    "accelerate/test_accelerate_many": (
        "*test_two_models_*[2]",
        "*[marked]",
        "test_a_component_left_out_*",
        "test_ranks_that_are_apart_*",
    ),
    "accelerate/test_accelerate_sharded": (
        "test_a_killed_run_*[FSDP1-mid-epoch 0]",
        "test_a_killed_run_*[FSDP2-twice in one epoch]",
        "test_a_killed_run_*[ZeRO-2-on the boundary]",
        "test_a_component_left_out_*[FSDP2-*",
        "test_a_component_of_fsdp1_*[optimizer]",
        "test_a_second_engine_*",
        "test_damage_*",
    ),
    "accelerate/test_accelerate_states": (
        "test_a_run_*[load_state-between a folder *",
        "test_a_run_*[no load_state-after *",
        "test_a_component_left_out_*",
        "test_damage_*manifest.json*",
        "test_damage_*model.safetensors*",
        "test_before_*",
        "test_outside_*",
        "test_plain_*",
    ),
    "data/test_data_elastic": ("test_over_*[resumable]", "test_a_*", "test_the_*", "test_on_*"),
    "data/test_data_iterable": (
        "test_every_way_*, 2, *",
        "test_persistent_*[buffered-*",
        "test_loaders_*[dispatcher-*",
        "test_two_ranks_*[shard]",
        "test_a_position_*",
        "test_random_*",
        "test_what_*",
    ),
    "data/test_data_keyed": (
        "test_every_rank_*[train]",
        "*[whole batches]",
        "*[shuffle]",
        "test_a_part_*",
    ),
    "data/test_data_ledger": ("test_every_kind_*_page", "test_the_ledger_*", "test_without_*"),
    "data/test_data_many": (
        "test_a_loop_*[repeated]",
        "test_a_loop_*[endless]",
        "test_a_kill_inside_*[2]",
        "test_a_component_left_out_*[repeated-*",
        "test_on_two_ranks_too[zipped-*",
        "test_without_*[1]",
    ),
    "deepspeed/test_deepspeed_gan": (
        "test_two_engines_*[as upstream, stage 1]",
        "test_two_engines_*[accumulation in one engine]",
        "test_two_engines_*[stage 3 on 2 ranks]",
        "test_an_engine_*[stage 0-?]",
        "test_gradients_*",
    ),
    "deepspeed/test_zero": ("*[fewer and more ranks]", "test_a_component_*", "test_parameters_*"),
    "deepspeed/test_zero_export": ("*_gathers[*fp16*", "*_writes[*'stage': 2*", "*_needs_no_*"),
    "deepspeed/test_zero_lost": ("*[stage 3]",),
    "lightning/test_fabric": ("*[2]",),
    "lightning/test_lightning_rows": (
        "*[what its steps gave in a list, and a layer that anneals]",
        "*[a stateful loader]",
        "*_exactly[two loaders of which the shorter begins again]",
        "*_exactly[a stream]",
        "*[new loaders in every epoch]",
        "*[averaged weights, killed where they are swapped in]",
        "*[Lightning's own saving]",
        "*[outputs and metrics that the module and a callback keep]",
        "test_killed_around_*[during-3]",
        "test_killed_around_*[after-4]",
        "*left_out*",
        "*_are_caught[optimizer]",
    ),
    "lightning/test_lightning_sharded": (
        "test_a_killed_run_*[FSDP2-twice in one epoch]",
        "test_a_killed_run_*[ZeRO-2-on the boundary]",
        "test_a_component_left_out_*",
        "*_by_the_modules_own_names[FSDP2]",
        "test_ranks_*",
    ),
    "lightning/test_lightning_user_state": ("*[a helper object in the module]",),
    "shared/test_change_of_framework": ("test_it_goes_*", "test_a_component_*"),
    "shared/test_switch_mid_epoch": (
        "test_at_the_end_*",
        "test_another_seed_*",
        "test_where_each_*[to plain]",
        "test_where_each_*[to accelerate]",
        "test_where_the_next_*[lightning first]",
        "test_without_*[transformers]",
        "test_without_the_optimizer_*",
    ),
    # The whole table under plain PyTorch; of the other adapters one row.
    "shared/test_journal": ("*[test_torch_exact*", "*-data]", "test_every_*"),
    "shared/test_benchmarks": (),
    "shared/test_stock_resume": (),
    "torch/test_agreement": ("*[option]", "*[component]", "*[step]", "test_a_rank_*"),
    "torch/test_faults": (
        "test_a_rank_that_is_killed_*[0-write:3-3]",
        "test_a_rank_that_is_killed_*[1-fsync:2-3]",
        "test_a_full_disk_*[raise]",
        "test_a_directory_*",
        "test_a_finished_*",
        "test_a_read_only_*",
        "test_an_empty_*",
    ),
    "torch/test_gradients_across_steps": (
        "test_a_loop_that_clears_them_continues_*[3-top]",
        "test_a_loop_that_clears_them_continues_*[1-bottom zero]",
        "*_writes_no_gradient[plain-1-top]",
        "*_writes_no_gradient[ddp-2-bottom]",
        "*_never_clears_*[plain]",
        "*_never_clears_*[DDP]",
        "*_never_clears_*[FSDP2]",
        "*_saves_at_every_step_*[top]",
        "test_gradients_*",
        "test_what_*",
    ),
    "torch/test_groups": (
        "test_a_killed_pipeline_*[2 stages]",
        "test_a_killed_pipeline_*[2 stages of 2 ranks under FSDP2]",
        "test_a_component_left_out_*",
        "test_a_layer_*",
        "test_another_*",
        "test_stages_that_*",
    ),
    "torch/test_lost_ranks": ("*[SIGKILL]",),
    "torch/test_optimizer_parameters": (
        "*[a bare tensor]",
        "*[a group added later]",
        "*[a bare tensor beside DDP]",
        "*[a bare tensor beside FSDP2]",
        "test_a_run_*",
    ),
    "torch/test_sharded": (
        "*_in_its_layout[fsdp-2]",
        "*_in_its_layout[fsdp1-2]",
        "*_in_its_layout[hsdp-4]",
        "*_in_its_layout[fsdp x tp-4]",
        "*_in_its_layout[offloaded-2]",
        "*_in_its_layout[tp-2]",
        "test_every_way_*'ema'*",
        "test_every_way_*'layout': 'fsdp1', 'optimizer': 'sgd'*",
        "test_a_component_left_out_*",
        "test_one_left_out_*[optimizer]",
        "test_damage_*",
        "test_each_rank_*",
        "test_what_does_not_fit_*",
        "test_tied_*",
    ),
    "transformers/test_trainer_checkpoints": (
        "test_a_path_*",
        "test_pin_*",
        "test_to_resume_*0]",
        "test_the_best_*",
        "test_trials_*",
        "test_a_callback_*",
    ),
    "transformers/test_trainer_models": ("*[causal]", "test_an_adapter_*"),
    "transformers/test_trainer_options": (
        "*[reduce_lr_on_plateau, adafactor, *",
        "*[warmup_stable_decay, sgd, *",
        "*[greedy, *",
        "*[True]",
        "test_a_component_left_out_*",
        "test_tokens_*",
    ),
    "transformers/test_trainer_rows": (
        "test_a_killed_run_*[masked by 2 workers]",
        "test_a_killed_run_*[LoRA]",
        "test_a_killed_run_*[a stream, in a later pass]",
        "test_a_killed_run_*[averages in a callback]",
        "test_a_killed_run_*[parameters that are frozen at a step]",
        "test_a_killed_run_*[a Trainer that holds something]",
        "test_a_killed_run_*[accumulated, *",
        "test_a_killed_run_*[TRL, preferences]",
        "test_a_part_left_out_*",
        "test_what_user_code_*",
        "test_two_ranks_*[masked, unseeded]",
        "test_within_*[two to one and back]",
        "test_another_*_refused*",
        "test_early_stopping_*",
    ),
    "transformers/test_trainer_sharded": (
        "test_a_killed_run_*[FSDP2-twice in one epoch]",
        "test_a_killed_run_*[ZeRO-2-on the boundary]",
        "test_a_component_left_out_*-optimizer]",
        "test_from_pretrained_*[FSDP2]",
    ),
    "user_scripts/test_ddp_evaluation": ("*[inside]",),
    "user_scripts/test_journal_threads": ("test_a_*_the_same_*",),
    "user_scripts/test_scripts_engines": ("*[1]", "*_differs[D]", "test_strict_*"),
    "user_scripts/test_scripts_loops": ("*[nanogpt*", "test_a_second_*"),
    "user_scripts/test_scripts_objects": (
        "*[anneal]",
        "test_agent_*",
        "test_an_agent_*",
        "test_a_stream_*",
        "*[5]",
        "test_early_*",
    ),
    "user_scripts/test_scripts_optimizer": (
        "*[list]",
        "test_gradients_*_steps_*",
        "test_strict_*s_that_*",
    ),
    "user_scripts/test_scripts_ordinary": (
        "*:running_loss-*",
        "*:evaluation_and_best-*",
        "*:averaged_weights-*",
        "*:ddp_meters-*",
        "*:accelerate_accumulation-*",
        "*:deepspeed_running_loss-1]",
        "*:trainer_evaluating-*",
        "*:lightning_metrics-*",
    ),
    "user_scripts/test_scripts_trainer": ("*[callback*", "*[heads]"),
}

# Of all other files these tests are left out.
LEFT_OUT = (
    # One launch more of each kind, with nothing that another test has not.
    "test_a_killed_run_*values_it_does_not[transformers]",
    "test_a_killed_run_*values_it_does_not[lightning]",
    "test_a_killed_run_*values_it_does_not[deepspeed in bf16]",
    "test_no_sample_is_lost_or_used_twice[{'per_device_train_batch_size': 4, *",
    "test_no_sample_is_lost_or_used_twice[{'gradient_accumulation_steps': ?}-*",
    "TestTorch::test_a_cold_start_*",
    "TestTransformers::test_a_cold_start_*",
    "TestLightning::test_a_cold_start_*",
    "TestAccelerate::test_a_cold_start_*",
    # Conformance suites: the matrix has each kill once on one rank, so two ranks are left.
    "TestAccelerate::test_a_killed_run_*[*1 rank*",
    "TestTransformers::test_a_killed_run_*[*1 rank*",
    "TestLightning::test_a_killed_run_*[*1 rank*",
    "Test*::test_a_killed_run_*[*mid-epoch 0*",
    "Test*::test_a_killed_run_*[*on the last step*",
    "Test*::test_a_killed_run_*[*after the last save*",
    "Test*::test_the_identical_command_*[2 ranks]",
    "TestDeepSpeed::test_sums_over_*[stage 1]",
    "TestDeepSpeed::test_sums_over_*[stage 2]",
    "TestDeepSpeed::test_windows_*[on the boundary]",
    "TestDeepSpeed::test_every_way_*[bf16 *",
    "TestDeepSpeed::*_left_out*[stage 1 on *",
    "TestDeepSpeed::*_left_out*[stage 2 on *",
    "TestDeepSpeed::test_fp16_*[stage 1 on *",
    "TestDeepSpeed::test_fp16_*[stage 2 on *",
    # Lightning in one process: the same in workers, and what differs in the data alone.
    "test_the_callback_changes_no_bit_*-2]",
    "test_a_crashed_run_*, on the boundary]",
    "test_a_crashed_run_*every second epoch]",
    "test_a_crashed_run_*[a loader *",
    "test_a_crashed_run_*[a stop *",
    "test_a_crashed_run_*[a validation that *",
    "test_a_crashed_run_*[a validation of *",
)

# Of these the quick set has the cells in which each value of each parameter occurs.
SAMPLED = (
    "Test*::test_a_killed_run_continues_exactly*",
    "Test*::test_an_accumulated_run_continues_exactly*",
    "Test*::test_two_ranks_fed_otherwise_continue_exactly*",
    "TestDeepSpeed::test_every_stage_continues_exactly*",
)

# Every test of this run by its file, also those that a mark or an option deselects.
COLLECTED: dict[str, list[str]] = {}


def is_left_out(file: str, test: str) -> bool:
    """Whether a test, with its cell, runs in ``nox -s full`` only."""
    if file in KEPT:
        return not _matches(test, KEPT[file])
    return _matches(test, LEFT_OUT)


def is_sampled(test: str) -> bool:
    """Whether only a sample of the cells of a test is in the quick set."""
    return _matches(test, SAMPLED)


def unmatched(patterns: Iterable[str], tests: Iterable[str]) -> list[str]:
    """The patterns that match no test: what they named has another name now."""
    listed = list(tests)
    return [each for each in patterns if not any(_matches(test, (each,)) for test in listed)]


def _matches(test: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in patterns)
