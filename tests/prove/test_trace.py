"""The trace as a process writes it: to the bit, a file per process, nothing when not asked."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.errors import ConfigurationError
from resumekit.record.moments import read_trace
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE, Trace, rng_digests, trace


def records_of(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    (attempt,) = read_trace(directory)[rank]
    return [{"kind": r.kind, "step": r.step, **r.fields} for r in attempt.records]


def traced_values(tmp_path: Path, **values: Any) -> dict[str, Any]:
    writer = Trace(tmp_path)
    writer.step(1, values=values)
    writer.close()
    written: dict[str, Any] = records_of(tmp_path)[0]["values"]
    return written


@pytest.mark.parametrize(
    "value", [0.1, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 1 / 3]
)
def test_floats_are_kept_to_the_bit(tmp_path: Path, value: float) -> None:
    written = traced_values(tmp_path, loss=value)["loss"]
    assert float.fromhex(written).hex() == value.hex()


def test_numbers_of_every_kind_are_kept_by_value(tmp_path: Path) -> None:
    written = traced_values(
        tmp_path,
        tensor=torch.tensor(0.5, requires_grad=True),
        half=torch.tensor(0.5, dtype=torch.bfloat16),
        numpy=np.float64(0.5),
        integer=torch.tensor(3),
        flag=True,
        word="warm-up",
        nothing=None,
        nan=math.nan,
    )
    half = (0.5).hex()
    assert [written[name] for name in ("tensor", "half", "numpy")] == [half] * 3
    assert [written[name] for name in ("integer", "flag", "word", "nothing")] == [
        3,
        True,
        "warm-up",
        None,
    ]
    assert written["nan"] == "nan"


def test_tensors_are_kept_as_digests_that_see_every_bit(tmp_path: Path) -> None:
    one = torch.zeros(3)
    other = torch.tensor([0.0, -0.0, 0.0])
    written = traced_values(tmp_path, one=one, same=one.clone(), other=other)
    assert written["one"] == written["same"] != written["other"]


@pytest.mark.parametrize(
    ("samples", "written"),
    [
        ([3, 1], [3, 1]),
        (torch.tensor([3, 1]), [3, 1]),
        (np.array([3, 1]), [3, 1]),
        ([torch.tensor(3), np.int64(1)], [3, 1]),
        (["a.jpg", "b.jpg"], ["a.jpg", "b.jpg"]),
        ([[3, 1], [2]], [[3, 1], [2]]),
    ],
)
def test_sample_ids_are_listed(tmp_path: Path, samples: Any, written: list[Any]) -> None:
    writer = Trace(tmp_path)
    writer.step(1, samples=samples)
    assert records_of(tmp_path)[0]["samples"] == written


def test_samples_that_are_not_ids_are_one_digest(tmp_path: Path) -> None:
    writer = Trace(tmp_path)
    writer.step(1, samples=torch.randn(8, 4))
    (digest,) = records_of(tmp_path)[0]["samples"]
    assert digest.startswith("digest ")


def test_states_are_digested_leaf_by_leaf(tmp_path: Path) -> None:
    writer = Trace(tmp_path)
    model = torch.nn.Linear(2, 1)
    writer.state("checkpoint", 4, {"model": model.state_dict()})
    with torch.no_grad():
        model.bias.add_(1)
    writer.state("end", 5, {"model": model.state_dict()})
    first, last = records_of(tmp_path)
    assert (first["kind"], first["step"], last["kind"]) == ("checkpoint", 4, "end")
    assert first["components"]["model"].keys() == {"weight", "bias"}
    assert first["components"]["model"]["weight"] == last["components"]["model"]["weight"]
    assert first["components"]["model"]["bias"] != last["components"]["model"]["bias"]


def test_one_line_in_a_script_traces_values_states_rates_and_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    assert Trace.from_environment() is Trace.from_environment(0)
    model = torch.nn.Linear(2, 1)
    groups: Any = [{"params": [model.weight]}, {"params": [model.bias], "lr": 2.0}]
    optimizer = torch.optim.SGD(groups)
    trace(7, loss=torch.tensor(0.25), model=model, optimizer=optimizer, samples=[4], epoch=1)
    (record,) = records_of(tmp_path)
    assert (record["kind"], record["step"], record["epoch"]) == ("step", 7, 1)
    assert record["values"] == {"loss": (0.25).hex()}
    assert record["lr"] == [(0.001).hex(), (2.0).hex()]
    assert record["components"].keys() == {"model", "optimizer"}
    assert record["rng"].keys() >= {"python", "numpy", "torch"}


def test_without_the_variable_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Trace.from_environment() is None
    trace(1, loss=torch.zeros(()), samples=[1])
    assert list(tmp_path.iterdir()) == []


def test_the_rank_is_asked_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    writer = Trace.from_environment()
    assert writer is not None
    writer.step(1)
    assert list(read_trace(tmp_path)) == [3]


def test_a_forked_child_writes_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path))
    writer = Trace.from_environment()
    assert writer is not None
    child = os.fork()
    if child == 0:
        trace(2, loss=0.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.step(1)
    attempts = read_trace(tmp_path)[0]
    assert [[r.step for r in attempt.records] for attempt in attempts] == [[1], [2]]


@pytest.mark.parametrize("kill", ["step", "step:x", "end:3", "checkpoint:-1"])
def test_a_kill_that_cannot_be_understood_is_refused(tmp_path: Path, kill: str) -> None:
    with pytest.raises(ConfigurationError, match=KILL_VARIABLE):
        Trace(tmp_path, kill=kill)


def test_a_process_that_is_killed_by_its_trace_leaves_every_record(tmp_path: Path) -> None:
    code = "import resumekit\nfor step in range(1, 9): resumekit.trace(step, loss=1.0)"
    settings = {TRACE_VARIABLE: str(tmp_path), KILL_VARIABLE: "step:5"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **settings}, check=False)
    assert done.returncode == -9
    assert [record["step"] for record in records_of(tmp_path)] == [1, 2, 3, 4, 5]


def test_digests_of_generators_follow_their_state() -> None:
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = rng_digests()
    assert rng_digests() == before
    random.random()
    assert changed(before) == {"python"}
    np.random.random()
    assert changed(before) == {"python", "numpy"}
    torch.rand(1)
    assert changed(before) == {"python", "numpy", "torch"}
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(pytorch)
    assert rng_digests() == before


def test_a_cached_normal_is_part_of_the_state() -> None:
    before = rng_digests()
    random.gauss(0.0, 1.0)
    after_one = rng_digests()
    random.gauss(0.0, 1.0)  # comes from the cache: the words of the generator stay
    assert before["python"] != after_one["python"] != rng_digests()["python"]


def changed(before: dict[str, str]) -> set[str]:
    now = rng_digests()
    return {name for name in now if now[name] != before[name]}


def test_every_line_is_one_json_object(tmp_path: Path) -> None:
    writer = Trace(tmp_path)
    writer.step(1, values={"note": "two\nlines\u2028here"})
    (path,) = tmp_path.iterdir()
    assert [json.loads(line)["kind"] for line in path.read_bytes().split(b"\n")[:-1]] == [
        "start",
        "step",
    ]
