"""Memory that a driver writes to by itself: its registration ends before its mapping does.

The driver is stood in for by a list of what is registered: what a GPU does with it needs one, see
``python -m resumekit.testing.gpu``.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.run.saving import snapshot
from resumekit.run.saving.snapshot import (
    CudaDriver,
    PinnedBuffer,
    pinned_buffer,
    snapshot_buffer,
    used_gpus,
    wait_for_devices,
)
from resumekit.storage.io.direct import address_of
from resumekit.storage.io.pipeline import HostBuffer

SIZE = 8 << 20


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    borders = (line.split()[0].split("-") for line in lines)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in borders)


class ListedDriver(CudaDriver):
    """Notes what is registered, and whether it is mapped when that ends."""

    def __init__(self, *errors: int) -> None:
        super().__init__(0)
        self.errors = list(errors)
        self.registered: list[int] = []
        self.ended: list[tuple[int, bool]] = []

    def register(self, memory: memoryview) -> int:
        error = self.errors.pop(0) if self.errors else 0
        self.registered += [] if error == 1 else [address_of(memory)]
        return error

    def unregister(self, memory: memoryview) -> int:
        self.ended.append((address_of(memory), is_mapped(address_of(memory))))
        return 0


@pytest.mark.parametrize("end", ["released", "collected", "in a cycle", "released in use"])
def test_the_registration_ends_before_the_mapping(end: str) -> None:
    driver = ListedDriver()
    buffer = PinnedBuffer(SIZE, driver)
    address, in_use = address_of(buffer.view), None
    assert driver.registered == [address]
    if end == "in a cycle":
        buffer.itself = buffer  # type: ignore[attr-defined]
    if end == "released in use":
        in_use = buffer.view[10:20]
    if end.startswith("released"):
        buffer.release()
        buffer.release()
    del buffer
    gc.collect()
    assert driver.ended == [(address, True)]
    assert is_mapped(address) == (in_use is not None)


def test_a_plain_buffer_that_ends_is_not_mapped() -> None:
    buffer = HostBuffer(SIZE)
    address = address_of(buffer.view)
    assert is_mapped(address)
    del buffer
    assert not is_mapped(address)


def test_the_registration_ends_with_the_process_but_not_with_a_forked_child() -> None:
    script = """
import os
from resumekit.run.saving.snapshot import CudaDriver, PinnedBuffer
class Driver(CudaDriver):
    def register(self, memory):
        return 0
    def unregister(self, memory):
        print("ended", flush=True)
        return 0
buffer = PinnedBuffer(1 << 20, Driver(0))
if os.fork() == 0:
    del buffer
else:
    os.wait()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("ended\n", "")


def test_an_address_that_is_registered_already_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = ListedDriver(712, 712)
    buffer = pinned_buffer(SIZE, driver)
    assert len(set(driver.registered)) == 3
    assert address_of(buffer.view) == driver.registered[-1]
    assert not driver.ended  # the others' registrations
    assert [is_mapped(each) for each in driver.registered] == [False, False, True]
    assert not caplog.records


def test_without_another_address_there_is_no_memory() -> None:
    with pytest.raises(OSError, match="still refers to memory that was unmapped"):
        pinned_buffer(SIZE, ListedDriver(*[712] * 100))


def test_memory_that_cannot_be_registered_is_used_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = ListedDriver(1)
    with caplog.at_level(logging.WARNING, "resumekit"):
        buffer = pinned_buffer(SIZE, driver)
    assert "block training longer" in caplog.text
    buffer.view[0] = 5
    buffer.release()
    assert not driver.ended


@pytest.mark.parametrize("end", ["over", "an error"])
def test_the_registration_ends_with_the_run_and_another_run_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    driver = ListedDriver()
    monkeypatch.setattr(snapshot, "snapshot_buffer", lambda size: pinned_buffer(size, driver))
    kept = []

    def train(name: str) -> None:
        options: Any = {"save_every": 1, "async_save": True}
        ckpt = Checkpointer(tmp_path / name, model=nn.Linear(1000, 100), **options)
        kept.append(ckpt)  # as a notebook does
        with ckpt:
            for _ in ckpt.batches(range(4), epochs=1):
                ckpt.step()
                if ckpt.progress.step == 3 and end == "an error":
                    raise RuntimeError("in the loop")

    for number, name in enumerate("ab", start=1):
        with suppress(RuntimeError):
            train(name)
        gc.collect()
        assert len(driver.registered) == number
        assert driver.ended == [(address, True) for address in driver.registered]
        assert not any(is_mapped(address) for address, _ in driver.ended)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a process that uses no GPU")
def test_without_a_gpu_nothing_is_registered_and_nothing_waited_for() -> None:
    assert used_gpus() == []
    wait_for_devices()
    assert type(snapshot_buffer(SIZE)) is HostBuffer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_torch_still_says_which_devices_have_a_context() -> None:
    assert callable(torch._C._cuda_hasPrimaryContext)  # type: ignore[attr-defined]  # pinned
    torch.zeros(1, device="cuda:0")
    assert 0 in used_gpus()
