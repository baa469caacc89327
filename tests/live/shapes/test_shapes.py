"""Shapes of keeping state in a loop: crashed and launched again, each is exact or was reported.

The state of each decides how it trains, so a value that is lost changes the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from judge import (
    KILLS,
    KILLS_OF_EPOCHS,
    SAVE_EVERY_EPOCH,
    Judge,
    Verdict,
    assert_verdict,
)

# The shapes that are exact, by file; those below a line of dashes are in the full set only.
EXACT = {
    "shapes_of_values": """
        float_assigned_in_each_step
        float_at_module_level
        value_that_changes_once
        object_that_is_replaced_once
        integer_of_more_than_64_bits
        enum_member
        named_tuple
        list_appended_in_the_loop
        set_of_integers
        set_of_tuples
        numpy_array_rolled_in_place
        python_generator
        hidden_state_detached
        none_until_it_is_an_object
        readings_of_clocks
        ---
        value_that_returns_to_its_start
        string
        tensor
        deque_appended
        functions_in_another_order
        partial_with_more_arguments
        list_of_the_first_rank
        dictionary
        tensor_changed_in_place
        numpy_generator
        hidden_state_with_its_graph
        complex_number
        byte_string
        truth_value
        nested_tuple
        frozen_set
        numpy_scalar
        comprehension_over_itself
        list_appended
        list_as_a_heap
        default_dictionary
        counter
        numpy_random_state
        torch_generator
        temporaries_that_are_deleted
        names_swapped_in_each_step
        decimal_number
        byte_array
        array_of_the_stdlib
        time_delta
        fraction
        path
    """,
    "shapes_of_objects": """
        dataclass_with_aliases
        object_that_training_makes
        object_with_a_partial_state
        object_that_loads_new_objects
        names_of_one_list_that_part
        views_of_one_tensor
        views_that_part
        views_that_training_makes
        arrays_that_share_memory
        gradient_without_an_optimizer
        object_with_slots
        ring_of_objects
        class_attribute
        attributes_that_are_deleted
        method_that_changes_its_object
        closure_with_nonlocal
        lambda_over_a_list
        mutable_default_argument
        function_attribute
        global_that_another_function_changes
        global_of_another_module
        ---
        helper_object
        partial_with_a_list
        cell_of_a_decorator
        namespace_of_arguments
        list_with_attributes
        private_attribute
        loss_module_that_is_not_given
        object_in_an_object
        one_list_with_two_names
        closure_of_a_function_that_is_over
        bound_method
        list_in_a_closure
    """,
    "shapes_of_loops": """
        while_loop_with_next
        generator_that_keeps_the_previous_batch
        generator_that_iterates_over_the_epochs
        accumulation_from_an_attribute
        generator_in_an_attribute
        with_statement
        try_except_and_continue
        list_that_appends_an_epoch
        consecutive_loops_in_an_epoch
        early_stopping
        rate_passed_to_a_function
        weights_as_an_epoch_found_them
        rate_halved_at_the_start_of_an_epoch
        count_of_enumerate
        count_in_a_bar
        count_of_epochs_and_of_batches
        ---
        count_in_a_variable
        count_kept_by_a_method_named_log
        count_next_to_an_absolute_one
        rate_read_at_the_start_of_an_epoch
        epoch_in_a_function
        sums_of_both_loops
        weights_scaled_at_the_start_of_an_epoch
        while_loop_with_walrus
        progress_bar
        name_read_only_by_a_handler
        decorated_training_function
        loop_in_a_callback
        dictionary_of_epochs
        list_popped_at_the_end_of_an_epoch
        rate_of_the_epoch_from_a_variable
        noise_on_weights_at_the_start_of_an_epoch
        momentum_cleared_at_the_start_of_an_epoch
        list_cleared_at_the_start_of_an_epoch
        numbers_drawn_at_the_start_of_an_epoch
    """,
    "shapes_of_learning": """
        average_of_the_weights_by_hand
        target_network_that_is_not_given
        second_optimizer_that_is_not_given
        optimizer_with_a_base_optimizer
        optimizer_with_slow_weights
        replay_buffer
        average_with_a_partial_state
        ---
        average_among_the_extras
        optimizer_with_a_counter
        curriculum_with_a_counter
        warm_up_by_a_step_counter
        average_that_is_swapped_in
        optimizer_with_a_running_norm
        weights_kept_and_restored
        gradient_of_the_step_before
        adversarial_noise
    """,
    "shapes_of_epochs": """
        loader_chosen_in_each_epoch
        loader_recreated_in_each_epoch
        epochs_on_the_whole_data
        ---
        loader_chosen_by_a_number
        loader_with_a_generator_recreated
        loader_kept_through_the_epochs
        epochs_on_the_whole_data_with_step
        epochs_without_an_optimizer
        optimizer_made_in_each_epoch
    """,
}
EXACT |= {
    "shapes_of_libraries": """
        data_frame
        table_with_more_rows
        bytes_in_memory
        average_in_a_wrapper
        former_weights
        fitted_estimator
        shared_number
        generator_around_the_loop
        ---
        shared_numbers
        numbers_of_c
        series
        table_with_more_columns
        pattern_of_digits
        text_in_memory
        record_array
        masked_array
        tensor_of_a_class
    """,
}
# Of code between epochs() and the first batch; what is left out in the negative controls.
DATA: dict[str, dict[str, Any]] = {
    "shapes_of_data": {
        "subset_drawn_at_random": {"exclude": ["rng"]},
        "subset_of_the_hardest": {"loop_variables": "off"},
        "order_drawn_by_the_script": {"exclude": ["rng"]},
        "factors_of_each_epoch": {"exclude": ["data"]},
        "loader_of_each_stage": {"exclude": ["data"]},
        "---": {},
        "subset_that_shrinks": {"loop_variables": "off"},
        "tensors_of_the_hardest": {"loop_variables": "off"},
        "samples_by_their_losses": {"exclude": ["data"]},
    }
}
# What cannot be read or set: one of these names is reported in time. It may be exact instead.
REPORTED = {
    "shapes_of_values": {
        "builtin_function": "value",
        "variable_that_is_deleted": "warm_up",
        "setting_of_the_process": "getcontext",
        "---": "",
        "function": "value",
        "function_in_a_dictionary": "value",
        "module_of_the_stdlib": "value",
        "exception": "value",
    },
    "shapes_of_objects": {
        "function_of_the_model": "activation",
        "environment_variable": "environ SHAPE_SCALE",
        "cache_of_a_random_number": "noise",
        "count_of_itertools": "counts",
        "hook_of_a_tensor": "scale calls",
        "---": "",
        "hook_of_a_module": "weigh scale",
        "hook_of_an_optimizer": "anneal calls",
    },
    "shapes_of_loops": {
        "batch_fetched_ahead": "batch following ahead",
        "sum_with_an_epoch_as_operand": "total add_epochs",
        "maximum_with_an_epoch": "best best_of_epochs",
        "range_around_steps": "range",
        "phases_in_an_epoch": "name weight each phases_in_an_epoch",
        "iterator_of_factors": "factors",
        "---": "",
        "two_trainings_in_one_process": "fold results",
        "second_iterator": "iterator",
        "cycle_of_factors": "factors",
        "schedule_that_is_a_generator": "rates",
        "loop_in_a_coroutine": "coroutine",
        "count_of_zip": "index count zip",
        "list_with_an_epoch_as_operand": "sums concatenate_epochs",
    },
    "shapes_of_libraries": {
        "queue_of_a_thread": "value Queue",
        "---": "",
        "thread_that_reads_ahead": "value Reader",
    },
    "shapes_of_epochs": {
        "loader_rebound_in_the_loop": "source",
        "loader_rebound_in_an_attribute": "source",
        "---": "",
        "loader_rebound_in_a_list": "sources",
        "loader_rebound_in_an_epoch": "source",
        "loader_added_in_the_loop": "source",
    },
}
# They are found and saved as components, so they are exact without variables too.
COMPONENTS = {
    "shapes_of_learning": """
        ---
        scheduler_that_is_not_given
        averaged_model_that_is_not_given
        plateau_scheduler_that_is_not_given
    """
}
WITHOUT_STATE = (
    "progress_bar_with_the_loss",
    "seconds_of_each_step",
    "settings_of_each_launch",
    "writer_of_scalars",
    "best_value_by_report",
    "profiler_context",
    "objects_that_cannot_be_saved",
    "count_that_is_displayed",
    "---",
    "attribute_of_the_model",
    "dataset_of_each_epoch",
    "running_loss",
    "bar_over_the_epochs",
    "named_bar_over_the_epochs",
    "function_that_fetches_a_batch",
    "evaluation_every_few_steps",
    "losses_of_each_epoch",
    "meters",
    "mixed_precision_and_clipping",
    "value_kept_in_extras",
    "constants_and_helpers",
    "metrics_that_are_switched_off",
)
# Saved and crashed where an epoch ends: the safe point is in the fetch of the next epoch.
AT_THE_END_OF_AN_EPOCH = """
    float_assigned_in_each_step
    float_at_module_level
    method_that_changes_its_object
    generator_that_iterates_over_the_epochs
    epoch_in_a_function
    list_that_appends_an_epoch
    sums_of_both_loops
    rate_halved_at_the_start_of_an_epoch
    weights_scaled_at_the_start_of_an_epoch
    list_popped_at_the_end_of_an_epoch
"""
MADE_WHEN_AN_EPOCH_BEGINS = """
    rate_read_at_the_start_of_an_epoch
    rate_passed_to_a_function
    weights_as_an_epoch_found_them
    rate_halved_at_the_start_of_an_epoch
"""
KILLS_OF_THE_FIRST_EPOCH = (5, 5, 12)
# Where the default does not reach the state: in the second of two trainings, in a first loop.
KILLS_OF = {
    "shapes_of_loops:two_trainings_in_one_process": (10, 25),
    "shapes_of_loops:count_next_to_an_absolute_one": (5,),
}


def cells(
    table: Mapping[str, Any], *, only: str = "", first: int | None = None
) -> pytest.MarkDecorator:
    """The parametrization of a test by the shapes of a table.

    Args:
        table: the names of the shapes by file.
        only: the names of the shapes; empty for all.
        first: how many are in a plain run; None for those above the lines.
    """
    chosen: list[Any] = []
    for module, listed in table.items():
        names = listed.split() if isinstance(listed, str) else list(listed)
        line = names.index("---")
        for name in filter(lambda name: name in (only.split() or names), names):
            is_plain = names.index(name) < line if first is None else len(chosen) < first
            marks = () if is_plain else (pytest.mark.full,)
            if name != "---":
                chosen.append(pytest.param(f"{module}:{name}", id=name, marks=marks))
    assert len(chosen) >= len(only.split())
    return pytest.mark.parametrize("shape", chosen)


def names_of(shape: str) -> list[str]:
    """What a report of a shape names; empty for any report."""
    module, _, name = shape.partition(":")
    return REPORTED[module].get(name, "").split()


@cells(EXACT)
def test_a_crashed_training_is_exact(judge: Judge, shape: str) -> None:
    assert_verdict(judge.verdict(shape), Verdict.EXACT)


@cells(DATA)
def test_data_that_an_epoch_begins_with_is_exact(judge: Judge, shape: str) -> None:
    assert_verdict(judge.verdict(shape), Verdict.EXACT)


@cells(DATA)
def test_without_what_an_epoch_began_with_its_data_differs(judge: Judge, shape: str) -> None:
    module, _, name = shape.partition(":")
    options: dict[str, Any] = DATA[module][name]
    assert judge.verdict(shape, kills=(10,), **options).difference


@cells(DATA)
def test_data_is_exact_where_an_epoch_was_saved_at_its_end(judge: Judge, shape: str) -> None:
    judgement = judge.verdict(shape, kills=KILLS_OF_EPOCHS, save_every=SAVE_EVERY_EPOCH)
    assert_verdict(judgement, Verdict.EXACT)


@cells(COMPONENTS)
def test_an_object_that_was_not_given_is_found(judge: Judge, shape: str) -> None:
    assert_verdict(judge.verdict(shape, loop_variables="off"), Verdict.EXACT)


@cells(EXACT, only=AT_THE_END_OF_AN_EPOCH, first=3)
def test_it_is_exact_where_an_epoch_was_saved_at_its_end(judge: Judge, shape: str) -> None:
    judgement = judge.verdict(shape, kills=KILLS_OF_EPOCHS, save_every=SAVE_EVERY_EPOCH)
    assert_verdict(judgement, Verdict.EXACT)


@cells(EXACT, only=MADE_WHEN_AN_EPOCH_BEGINS, first=3)
def test_what_an_epoch_begins_with_is_exact_in_the_first_epoch(judge: Judge, shape: str) -> None:
    """It is computed again before the first batch, from what the resume has restored."""
    assert_verdict(judge.verdict(shape, kills=KILLS_OF_THE_FIRST_EPOCH), Verdict.EXACT)


@cells(REPORTED)
def test_what_cannot_be_restored_is_reported_in_time(judge: Judge, shape: str) -> None:
    names, kills = names_of(shape), KILLS_OF.get(shape, KILLS)
    judgement = judge.verdict(shape, names=names, kills=kills)
    assert_verdict(judgement, Verdict.EXACT, Verdict.REPORTED)


@pytest.mark.parametrize("save_every", [1, 7])
@pytest.mark.parametrize(
    "name",
    ["recreated_in_each_epoch", "with_a_generator_recreated", "kept_through_the_epochs"],
)
def test_a_second_loader_is_exact_at_each_kill_of_later_epochs(
    judge: Judge, name: str, save_every: int
) -> None:
    shape, kills = f"shapes_of_epochs:loader_{name}", range(7, 21)
    judgement = judge.verdict(shape, kills=[*kills], save_every=save_every)
    assert_verdict(judgement, Verdict.EXACT)
    assert judge.verdict(shape, kills=(10,), exclude=["data"]).difference


@pytest.mark.parametrize("save_every", [1, 2])
@pytest.mark.parametrize("name", ["", "_with_step"])
def test_epochs_without_batches_are_exact_at_each_kill(
    judge: Judge, name: str, save_every: int
) -> None:
    shape = f"shapes_of_epochs:epochs_on_the_whole_data{name}"
    assert_verdict(
        judge.verdict(shape, kills=[*range(1, 21)], save_every=save_every), Verdict.EXACT
    )
    assert judge.verdict(shape, kills=(10,), exclude=["optimizer"]).difference


@pytest.mark.parametrize("save_every", [3, 7])
def test_a_loader_rebound_in_one_epoch_is_refused_after_it(judge: Judge, save_every: int) -> None:
    """Inside the epoch that binds it, a resume binds it again."""
    shape, kills = "shapes_of_epochs:loader_rebound_in_the_second_epoch", (13, 20)
    judgement = judge.verdict(shape, kills=kills, save_every=save_every)
    first, second = judgement.launches
    assert (first.end, first.warnings, second.end) == ("crashed", (), "refused"), str(judgement)
    assert "source: lost (training rebound it" in second.error
    assert judge.verdict(shape, kills=(20,), loop_variables="off").difference


@pytest.mark.parametrize("save_every", [1, 5])
def test_a_dataset_made_of_that_of_the_epoch_before_is_refused(
    judge: Judge, save_every: int
) -> None:
    """Also inside an epoch: its code makes it of the one that the epoch began with."""
    shape, kills = "shapes_of_libraries:dataset_shuffled_again", (12,)
    judgement = judge.verdict(shape, kills=kills, save_every=save_every)
    assert "data: lost (training rebound it to another Dataset" in judgement.strict.error
    assert judgement.difference


# The negative controls: with nothing saved, each must differ.
@cells(EXACT, first=6)
def test_without_loop_variables_it_differs(judge: Judge, shape: str) -> None:
    kills = KILLS_OF.get(shape, (10,))
    assert judge.verdict(shape, kills=kills, loop_variables="off").difference


@cells(REPORTED, first=0)
def test_without_loop_variables_what_is_reported_differs(judge: Judge, shape: str) -> None:
    kills = KILLS_OF.get(shape, (10,))
    assert judge.verdict(shape, kills=kills, loop_variables="off").difference


@cells({"shapes_without_state": WITHOUT_STATE})
def test_an_ordinary_loop_is_exact_under_strict_without_a_warning(judge: Judge, shape: str) -> None:
    judgement = judge.verdict(shape)
    assert (judgement.verdict, judgement.noise) == (Verdict.EXACT, []), str(judgement)
