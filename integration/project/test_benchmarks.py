"""The benchmarks run at tiny sizes; what their tables hold and how targets are judged."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ADAPTERS = ("torch", "accelerate", "transformers", "lightning", "deepspeed")
FRAMEWORKS = ("transformers", "accelerate", "lightning", "deepspeed-3")
VERDICTS = {"", "met", "not met", "not measurable", "not built", "does not apply"}
SYNC = "synchronous saves"
RAW_WRITE, RAW_COPY = "raw write + fsync", "one warm copy in memory"

Rows = list[dict[str, str]]


def _module(name: str) -> ModuleType:
    """A module of the benchmarks, which are scripts and no package."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


judging, measuring = _module("judging"), _module("measuring")
UP_TO_1_10 = judging.Target(1.10)


def _run(directory: Path, script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _table(directory: Path, script: str, *arguments: str) -> Rows:
    """The rows of a script's table, measured in one round of a tiny state."""
    lines = _run(directory, script, "--tiny", "--rounds", "1", *arguments).splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    headings, _, *rows = cells
    assert all(len(row) == len(headings) for row in rows)
    assert any(line.startswith("load: ") for line in lines)
    assert not list(directory.iterdir()), "nothing of what was written is left"
    return [dict(zip(headings, row, strict=True)) for row in rows]


def _check_targets(rows: Rows) -> None:
    """One round is too few for any verdict; what is not built has no median."""
    for row in rows:
        assert row["verdict"] in VERDICTS
        if row["verdict"] == "not built":
            assert not row["median"]
        elif row["target"] and row["verdict"] != "does not apply":
            assert row["verdict"] == "not measurable"
        assert row["median"] or row["verdict"], row


def _figures(rows: Rows) -> set[str]:
    return {row["figure"] for row in rows}


# The judgement


def test_a_target_is_met_when_the_whole_interval_is_below_it() -> None:
    judgement = judging.judge([1.02, 1.03, 1.05, 1.01, 1.04, 1.03, 1.02], UP_TO_1_10)
    assert judgement.verdict is judging.Verdict.MET
    assert judgement.low <= judgement.value <= judgement.high <= 1.10


def test_a_target_is_not_met_when_the_whole_interval_is_above_it() -> None:
    judgement = judging.judge([1.32, 1.23, 1.25, 1.21, 1.24, 1.23, 1.22], UP_TO_1_10)
    assert judgement.verdict is judging.Verdict.NOT_MET


@pytest.mark.parametrize("shift", [0.0, 0.1], ids=["median met", "median not met"])
def test_rounds_on_both_sides_of_the_target_are_not_measurable(shift: float) -> None:
    rounds = [0.7, 1.4, 1.02, 0.95, 1.35, 1.05, 1.3]
    judgement = judging.judge([value + shift for value in rounds], UP_TO_1_10)
    assert judgement.low < 1.10 < judgement.high
    assert judgement.verdict is judging.Verdict.NOT_MEASURABLE
    assert judgement.cells()[-1] == "not measurable"


def test_too_few_rounds_are_not_measurable_however_close_they_are() -> None:
    assert judging.judge([0.5] * 6, UP_TO_1_10).verdict is judging.Verdict.NOT_MEASURABLE
    assert judging.judge([0.5] * 7, UP_TO_1_10).verdict is judging.Verdict.MET
    paired = judging.Target(1.04, min_rounds=9)
    assert judging.judge([1.0] * 8, paired).verdict is judging.Verdict.NOT_MEASURABLE


def test_a_strict_target_is_not_met_by_its_limit() -> None:
    below = judging.Target(1.0, is_strict=True)
    assert judging.judge([1.0] * 7, below).verdict is judging.Verdict.NOT_MET
    assert judging.judge([1.0] * 7, judging.Target(1.0)).verdict is judging.Verdict.MET


def test_a_paired_difference_cancels_what_both_runs_of_a_pair_share() -> None:
    drifting = [(10.0 + drift, (10.0 + drift) * 1.01) for drift in range(9)]
    target = judging.Target(1.04, min_rounds=9, is_upper_bound=True)
    judgement = judging.judge_statistic(drifting, judging.paired_ratio, target)
    assert judgement.verdict is judging.Verdict.MET
    assert judgement.value == pytest.approx(1.01)
    slow = [(first, first * 1.1) for first, _ in drifting]
    judgement = judging.judge_statistic(slow, judging.paired_ratio, target)
    assert judgement.verdict is judging.Verdict.NOT_MET


def test_a_row_of_what_is_not_built_has_no_ratio() -> None:
    row = judging.compared("async", [], "copy", [0.1, 0.2, 0.3], UP_TO_1_10)
    assert row == ("async", "", "copy", "200 ms", "", "", "≤ 1.10x", "not built", "")
    assert len(row) == len(judging.HEADINGS)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    ours, theirs = [1.0, 2.0, 9.0], [2.0, 2.0, 3.0]
    row = judging.compared("ours", ours, "theirs", theirs, None)
    assert row[4] == "1.00x"
    assert statistics.median(ours) / statistics.median(theirs) == 1.0
    assert judging.compared("ours", [1, 2, 8], "theirs", [2, 1, 8], None)[4] == "1.00x"


# The scripts


@pytest.mark.full
def test_saves_and_loads_are_compared_with_the_limits_of_the_machine(tmp_path: Path) -> None:
    rows = _table(tmp_path, "save_load.py")
    _check_targets(rows)
    figures = _figures(rows)
    assert {RAW_WRITE, "raw read, cold", RAW_COPY, "torch.save"} < figures
    against = {(row["figure"], row["against"]) for row in rows}
    assert ("save, an old one deleted", RAW_WRITE) in against
    assert ("blocked by an async save", RAW_COPY) in against
    assert ("load after a restart, through the buffer", "raw read + one copy") in against
    assert ("load after a restart, without the buffer", "raw read, cold") in against
    assert "CPU time of an async save" in figures


@pytest.mark.full
def test_cost_is_measured_against_all_that_can_grow(tmp_path: Path) -> None:
    rows = _table(tmp_path, "scaling.py")
    figures = {(row["against"], row["figure"]) for row in rows}
    for against in ("size", "tensors", "ranks"):
        for figure in ("save", "async save, blocked", "async save, durable"):
            assert (against, figure) in figures
    assert {against for against, _ in figures} > {"kept", "stock", "sampler", "journal"}
    verdicts = {"linear or flat", "superlinear", "below a millisecond"}
    assert {row["verdict"] for row in rows} <= verdicts


@pytest.mark.full
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_saves_are_compared_with_the_frameworks_saver(framework: str, tmp_path: Path) -> None:
    rows = _table(tmp_path, "framework_savers.py", "--only", framework)
    _check_targets(rows)
    assert {row["framework"] for row in rows} == {framework}
    assert {RAW_WRITE, RAW_COPY} < _figures(rows)
    judged = {(row["figure"].partition(",")[0], row["against"]) for row in rows if row["target"]}
    assert judged == {
        ("save", "framework's own saver + fsync"),
        ("blocked by an async save", "framework's own saver"),
    }


@pytest.mark.full
@pytest.mark.parametrize(("saves", "figure"), [("async", "async saves"), ("sync", SYNC)])
def test_a_training_with_saves_is_compared_with_one_without(
    saves: str, figure: str, tmp_path: Path
) -> None:
    rows = _table(tmp_path, "training_with_saves.py", "--steps", "101", "--saves", saves)
    _check_targets(rows)
    assert {"without saves", figure, RAW_WRITE} < _figures(rows)
    (compared,) = [row for row in rows if row["against"]]
    assert compared["against"] == "without saves"
    assert bool(compared["target"]) == (saves == "async")


@pytest.mark.full
def test_a_training_with_a_mirror_is_compared_with_one_without(tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs")
    rows = _table(tmp_path, "mirror_cost.py", "--steps", "101", "--save-every", "75")
    _check_targets(rows)
    assert {RAW_WRITE, "raw upload", "without a mirror"} < _figures(rows)
    compared = [row["figure"] for row in rows if row["target"]]
    assert compared == ["mirror", "mirror, 20 MB/s"]


def test_a_part_of_a_benchmark_adds_a_section_to_the_page_of_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    for part in ("first", "second"):
        measuring.Findings(
            "parts", "Page", ["Once."], "", ("a",), [(part,)], (), part=part
        ).record()
    (page,) = tmp_path.iterdir()
    text = page.read_text()
    assert [text.count(each) for each in ("# Page", "Once.", "| --- |")] == [1, 1, 2]
    assert text.index("## first") < text.index("| first |") < text.index("## second")
    measuring.Findings("parts", "Page", [], "", ("a",), [("whole",)], ()).record()
    assert "first" not in page.read_text()


@pytest.mark.full
def test_a_restart_is_compared_with_a_fresh_start_under_each_framework(tmp_path: Path) -> None:
    rows = _table(tmp_path, "restart.py")
    assert {row["under"].partition(",")[0] for row in rows} == set(ADAPTERS)
    assert len(rows) == len(ADAPTERS) + 1, "torch with a large dataset, too"
    for row in rows:
        assert row["verdict"] == "not measurable", "one round is too few"
        assert float(row["fresh start"].split()[0]) > 0


def test_a_copy_in_memory_is_compared_with_one_copy_and_a_digest(tmp_path: Path) -> None:
    rows = _table(tmp_path, "memory_copies.py")
    _check_targets(rows)
    assert rows[0]["against"] == "one copy and digest"


@pytest.mark.full
def test_a_save_of_dcp_is_compared_with_its_own_writer(tmp_path: Path) -> None:
    rows = _table(tmp_path, "dcp_save.py")
    _check_targets(rows)
    assert rows[1]["against"] == "dcp.save, FileSystemWriter"
    assert rows[1]["target"] == "≤ 0.40x"


@pytest.mark.full
def test_frozen_parameters_are_judged_only_when_they_are_linked(tmp_path: Path) -> None:
    rows = _table(tmp_path, "frozen_saves.py")
    _check_targets(rows)
    assert {"first save", "third save", "third save, linked", RAW_WRITE} < _figures(rows)


@pytest.mark.full
def test_the_script_for_a_gpu_runs_on_a_cpu_to_be_tried(tmp_path: Path) -> None:
    rows = _table(tmp_path, "gpu.py", "--device", "cpu")
    _check_targets(rows)
    assert len({row["on"] for row in rows}) == 2, "one process, and two ranks"
    assert {RAW_WRITE, "copy into pinned memory", "blocked by an async save"} < _figures(rows)


@pytest.mark.full
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert "no CUDA device" in _run(tmp_path, "gpu.py")


@pytest.mark.full
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_overheads_are_measured_under_each_adapter(adapter: str, tmp_path: Path) -> None:
    printed = _run(tmp_path, "overheads.py", "--child", "--quick", "--adapter", adapter)
    rows = {row[1]: row[2:] for row in json.loads(printed.splitlines()[-1])}
    _, step, reports, save = rows.values()
    bare, ours, _, journal, watch = map(_number, step)
    assert 0 < journal < ours
    assert 0 < watch < ours
    assert bare > 0
    assert _number(reports[-1]) > 0
    assert 0 < _number(save[-1]) < _number(save[1]), "the tracker's share is less than the save"


def _number(text: str) -> float:
    return float(text.replace(",", ""))
