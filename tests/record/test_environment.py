"""What the header of an attempt records of the machine, and of its GPUs where it trains on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from resumekit.record.conditions import environment, gpu_settings
from resumekit.run.unsaved_changes import ProcessSettings
from resumekit.state import Fidelity

has_new_name = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="the name is new in torch 2.9"
)


@pytest.fixture
def matmul() -> Iterator[Any]:
    backend = torch.backends.cuda.matmul
    before = getattr(backend, "fp32_precision", "")
    yield backend
    if before:
        backend.fp32_precision = before


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def recorded() -> dict[str, Any]:
    return environment([torch.optim.SGD(nn.Linear(1, 1).parameters())])


def test_a_run_on_the_cpu_records_nothing_of_gpus() -> None:
    assert recorded()["device"] == "cpu"
    assert not recorded().keys() & gpu_settings().keys()


@pytest.mark.usefixtures("deterministic")
def test_algorithms_that_only_warn_are_not_deterministic() -> None:
    found = []
    for is_on, warns in ((False, False), (True, False), (True, True)):
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        found.append(recorded()["deterministic"])
    assert found == [False, True, False]


@pytest.mark.parametrize(
    "variable", ["CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "LOCAL_WORLD_SIZE"]
)
def test_a_variable_that_chooses_algorithms_is_recorded(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = gpu_settings()
    monkeypatch.setenv(variable, "other")
    assert gpu_settings() == {**before, variable: "other"}


def test_the_search_for_the_fastest_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu_settings()["cudnn.benchmark"]
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not before)
    assert gpu_settings()["cudnn.benchmark"] is not before


@has_new_name
def test_tf32_is_recorded_by_its_new_name(matmul: Any) -> None:
    found = set()
    for precision in ("ieee", "tf32"):
        matmul.fp32_precision = precision
        found.add(gpu_settings()["torch.backends.cuda.matmul.fp32_precision"])
    assert found == {"ieee", "tf32"}


@has_new_name
def test_tf32_that_training_sets_by_its_new_name_is_reported(matmul: Any) -> None:
    """torch 2.13 then raises where it reads the former name."""
    settings = ProcessSettings()
    assert list(settings.lines([])) == []
    matmul.fp32_precision = "tf32"
    (line,) = settings.lines([])
    name = "torch.backends.cuda.matmul.fp32_precision"
    assert (line.key, line.fidelity) == (name, Fidelity.LOST)
    assert "to tf32; set it before the loop" in line.reason


@has_new_name
def test_a_precision_set_by_its_former_name_is_reported() -> None:
    before, settings = torch.get_float32_matmul_precision(), ProcessSettings()
    try:
        torch.set_float32_matmul_precision("medium")
        keys = {line.key for line in settings.lines([])}
    finally:
        torch.set_float32_matmul_precision(before)
    assert keys == {f"torch.backends.{it}.matmul.fp32_precision" for it in ("cuda", "mkldnn")}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_run_on_a_gpu_records_all_of_them() -> None:
    found = environment([torch.optim.SGD(nn.Linear(1, 1).cuda().parameters())])
    assert found["gpus"].startswith(("1 x ", f"{torch.cuda.device_count()} x "))
    assert gpu_settings().items() <= found.items()
