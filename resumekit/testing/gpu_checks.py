"""Measures of one process for ``python -m resumekit.testing.gpu``: stalls and memory on the device.

Each function raises AssertionError, or leaves one line of figures.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.adapters.torch import Checkpointer
from resumekit.record.journal import DIRECTORY, find_attempts
from resumekit.record.trace import TRACE_VARIABLE

NUM_SAVES = 40
_RECORDED = ("gpus", "driver", "cudnn", "torch.backends.cuda.matmul.fp32_precision")  # torch 2.9
_cuda: Any = torch.cuda  # torch 2.13 annotates only a part of it


def frozen_stall(directory: str, *, device: str) -> None:
    """The stalls of saves of a model with 2 GB of frozen weights, after the first one.

    The second save copies the weights, and the third compares them with the files before. They must
    not take much longer than a copy of the weights into ordinary memory. In the fourth the device
    computes a digest: nothing is copied.
    """
    num_values = 1 << 30 if device != "cpu" else 32 << 20
    model, adapter = nn.Module(), nn.Linear(64, 64, device=device)
    model.adapter = adapter
    for number in range(8):
        values = torch.randn(num_values // 8, dtype=torch.bfloat16, device=device)
        model.register_parameter(f"frozen{number}", nn.Parameter(values, requires_grad=False))
    frozen = [each for each in model.parameters() if not each.requires_grad]
    pinned, ordinary = (_seconds_of_copy(frozen, is_pinned=each) for each in (True, False))
    inputs = torch.randn(8, 64, device=device)
    _, *stalls = _train(directory, model, inputs, forward=adapter, num_saves=5, kept=2)
    copied, compared, digested = stalls
    stated = f"copied {copied:.3f} s, compared {compared:.3f} s, digested {digested:.3f} s"
    figure = f"{stated}; one copy, pinned {pinned:.3f} s, ordinary {ordinary:.3f} s"
    is_short = max(copied, compared) < 2 * ordinary + 0.5 and digested < ordinary + 0.1
    _conclude(directory, figure, passed=is_short or device == "cpu")


def save_speed(directory: str, *, device: str) -> None:
    """What a save of 2 GB blocks, beside one copy into pinned memory and one write with fsync.

    A save that training waits for must not take twice as long as the write and half a second more,
    and one in the background not twice as long as the copy and a tenth of a second more.
    """
    num_values = 1 << 28 if device != "cpu" else 1 << 20
    model: Any = nn.Module()
    model.weight = nn.Parameter(torch.randn(num_values, device=device))
    inputs = torch.ones(1, device=device)
    copy = 2 * _seconds_of_copy([model.weight], is_pinned=True)  # the momentum, too
    write = copy + _seconds_of_write(Path(directory, "raw"), 2 * model.weight.nbytes)
    options: Any = {"forward": model.weight.mul}
    folder, blocked = Path(directory), {}
    for is_async in (False, True):
        run = str(folder / f"{is_async}")
        blocked[is_async] = min(_train(run, model, inputs, is_async=is_async, **options)[1:])
    stated = f"waits {blocked[False]:.3f} s, in the background {blocked[True]:.3f} s"
    figure = f"{stated}; copy and write {write:.3f} s, copy {copy:.3f} s"
    is_short = blocked[False] < 2 * write + 0.5 and blocked[True] < 2 * copy + 0.1
    _conclude(directory, figure, passed=is_short or device == "cpu")


def reserved_memory(directory: str, *, device: str) -> None:
    """The memory that torch reserves on the device, over many async saves of convolutions.

    After the first saves it must not grow by more than the size of the state.
    """
    model: Any = nn.Sequential(*(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4)))
    model.to(device).to(memory_format=torch.channels_last)
    reserved: list[int] = []
    inputs = torch.randn(1, 256, 8, 8, device=device)
    _train(directory, model, inputs, num_saves=NUM_SAVES, reserved=reserved)
    size = 2 * sum(each.nbytes for each in model.parameters())  # SGD's momentum, too
    growth = max(reserved) - reserved[2]
    figure = f"grows by {growth / 1e6:.0f} MB in {NUM_SAVES} saves of {size / 1e6:.0f} MB"
    _conclude(directory, figure, passed=growth <= size)


def memory_on_first_device(directory: str, *, device: str) -> None:
    """What a run on the second GPU takes up on the first one: nothing."""
    before, second = _used_bytes(), f"{device}:1"
    model = nn.Linear(1024, 1024, device=second)
    _train(directory, model, torch.randn(8, 1024, device=second))
    growth = _used_bytes() - before
    _conclude(directory, f"{growth / 1e6:.0f} MB by a run on GPU 1", passed=growth < 50e6)


def recorded_machine(directory: str, *, device: str) -> None:
    """What the journal records of the GPU, and of the settings that decide its results."""
    model = nn.Linear(8, 8, device=device)
    _train(directory, model, torch.randn(2, 8, device=device))
    found = find_attempts(Path(directory, "run", DIRECTORY))[-1].header.environment
    figure = ", ".join(f"{name} {found.get(name)}" for name in _RECORDED)
    _conclude(directory, figure, passed=all(found.get(name) for name in _RECORDED))


def _conclude(directory: str, figure: str, *, passed: bool) -> None:
    Path(directory, "figure.txt").write_text(figure)
    assert passed, figure


def _used_bytes() -> int:
    query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def _seconds_of_write(file: Path, num_bytes: int) -> float:
    block = os.urandom(1 << 24)
    began = time.monotonic()
    with file.open("wb") as opened:
        for _ in range(-(-num_bytes // len(block))):
            opened.write(block)
        os.fsync(opened.fileno())
    file.unlink(missing_ok=True)
    return time.monotonic() - began


def _seconds_of_copy(sources: list[nn.Parameter], *, is_pinned: bool) -> float:
    device = sources[0].device
    options: Any = {"device": "cpu", "pin_memory": is_pinned and device.type == "cuda"}
    targets = [torch.empty_like(each, **options) for each in sources]
    seconds = 0.0
    for _ in range(2):  # the first one warms up
        _synchronize(device)
        began = time.monotonic()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.detach(), non_blocking=True)
        _synchronize(device)
        seconds = time.monotonic() - began
    return seconds


def _train(
    directory: str,
    model: nn.Module,
    inputs: Tensor,
    *,
    forward: Any = None,
    is_async: bool = True,
    num_saves: int = 4,
    kept: int = 1,
    reserved: list[int] | None = None,
) -> list[float]:
    """Trains on one batch and saves at each step; the seconds that each but the last blocks."""
    os.environ.pop(TRACE_VARIABLE, None)  # a trace would read the state at each step
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    options: Any = {"save_every": 1, "async_save": is_async, "keep_latest": kept}
    ckpt = Checkpointer(Path(directory, "run"), model=model, optimizer=optimizer, **options)
    stalls: list[float] = []
    ended = 0.0
    for _ in ckpt.batches(range(num_saves), epochs=1):
        if ended:
            stalls.append(time.monotonic() - ended)
        optimizer.zero_grad()
        (forward or model)(inputs).square().mean().backward()
        optimizer.step()
        ckpt.wait()
        if reserved is not None:
            reserved.append(_cuda.memory_reserved() if inputs.is_cuda else 0)
        ckpt.step()
        _synchronize(inputs.device)
        ended = time.monotonic()
    return stalls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        _cuda.synchronize(device)
