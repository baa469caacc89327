"""What is read out of a trace beside the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from resumekit.record.moments import launch_directory
from resumekit.testing.trace_checks import changing_components, work_of_launch, wrong_length


def write(
    trace: Path, launch: int, *records: tuple[str, int, dict[str, Any]], rank: int = 0
) -> None:
    directory = launch_directory(trace, launch)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "start", "rank": rank}] + [
        {"kind": kind, "step": step, "components": components} for kind, step, components in records
    ]
    text = "".join(json.dumps({**line, "time_ns": 1}) + "\n" for line in lines)
    (directory / f"rank-{rank}.jsonl").write_text(text)


def whole_run(
    trace: Path, *, steps: int = 4, saves: tuple[int, ...] = (2, 4), rank: int = 0
) -> None:
    records: list[tuple[str, int, dict[str, Any]]] = []
    for step in range(1, steps + 1):
        records.append(("step", step, {}))
        if step in saves:
            state = {"model": {"w": f"{step}"}, "rng": {"torch": "same"}}
            records.append(("checkpoint", step, state))
    write(trace, 0, *records, ("end", steps, {}), rank=rank)


def test_a_run_of_the_right_length_has_nothing_wrong(tmp_path: Path) -> None:
    whole_run(tmp_path)
    assert wrong_length(tmp_path, num_steps=4, save_every=2) == ""


def test_a_step_or_a_save_too_few_on_any_rank_is_reported(tmp_path: Path) -> None:
    whole_run(tmp_path)
    whole_run(tmp_path, saves=(4,), rank=1)
    found = wrong_length(tmp_path, num_steps=4, save_every=2)
    assert found == "rank 1 committed no checkpoint of step 2"
    found = wrong_length(tmp_path, num_steps=6, save_every=2)
    assert found == "rank 0 counted 4 steps, from 1 to 4, expected 1 to 6"


def test_a_run_that_counts_nothing_is_reported(tmp_path: Path) -> None:
    write(tmp_path, 0)
    found = wrong_length(tmp_path, num_steps=4, save_every=2)
    assert found == "rank 0 counted no step, expected 1 to 4"


def test_a_launch_that_finds_the_end_again_did_nothing(tmp_path: Path) -> None:
    whole_run(tmp_path)
    write(tmp_path, 1, ("resumed", 4, {}), ("end", 4, {}))
    assert work_of_launch(tmp_path, 1) == ""


def test_a_step_a_save_or_no_end_after_the_end_is_reported(tmp_path: Path) -> None:
    whole_run(tmp_path)
    whole_run(tmp_path, rank=1)
    write(tmp_path, 1, ("end", 4, {}))
    assert work_of_launch(tmp_path, 1) == "rank 1 did not find the end again"
    write(tmp_path, 1, ("step", 5, {}), ("end", 5, {}), rank=1)
    assert work_of_launch(tmp_path, 1) == "rank 1 made a step record of step 5"
    write(tmp_path, 1, ("checkpoint", 4, {}), ("end", 4, {}), rank=1)
    assert work_of_launch(tmp_path, 1) == "rank 1 made a checkpoint record of step 4"


def test_a_function_that_traces_no_end_need_not_find_it_again(tmp_path: Path) -> None:
    write(tmp_path, 0, ("step", 1, {}))
    assert work_of_launch(tmp_path, 1) == ""


def test_what_differs_between_ranks_alone_does_not_change(tmp_path: Path) -> None:
    whole_run(tmp_path)
    state = ("checkpoint", 2, {"rng": {"torch": "another"}})
    write(tmp_path, 0, state, ("end", 4, {"rng": {"torch": "another"}}), rank=1)
    assert changing_components(tmp_path) == ("model",)
