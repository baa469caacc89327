"""The table of the quick set names files that are there."""

from __future__ import annotations

from pathlib import Path

from quick_set import KEPT, is_left_out, is_sampled

INTEGRATION = Path(__file__).parents[1]


def test_every_file_of_the_table_is_there() -> None:
    assert not [file for file in KEPT if not (INTEGRATION / f"{file}.py").is_file()]


def test_a_test_is_found_with_its_cell() -> None:
    faults = "torch/test_faults"
    assert not is_left_out(faults, "test_a_full_disk_costs_nothing_that_was_saved[raise]")
    assert is_left_out(faults, "test_a_full_disk_costs_nothing_that_was_saved[warn]")
    suite = "TestTorch::test_a_killed_run_continues_exactly[mid-epoch 0-2 ranks]"
    assert is_left_out("torch/test_torch_exact", suite)
    assert is_sampled(suite)
