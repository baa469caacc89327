"""Long states: read by several threads, into memory that belongs to each tensor alone."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import FailpointFileSystem, parse_failpoints

from resumekit.errors import UnreadableCheckpointError
from resumekit.serialization.reading import read_payload
from resumekit.storage.files import BLOCK_BYTES
from resumekit.storage.io import pipeline
from resumekit.storage.io.direct import address_of
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import StepReader

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """More blocks than are read without threads, in tensors that end within blocks."""
    generator = torch.Generator().manual_seed(0)
    sizes = (9 * BLOCK_BYTES, 3, 8 * BLOCK_BYTES + 12, BLOCK_BYTES // 2)
    return {
        f"t{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for number, size in enumerate(sizes)
    }


def read(step: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_payload(step, "state", 0)["w"]
    return found


def test_each_tensor_has_its_memory_to_itself(checkpoints: Any, state: Any) -> None:
    found = read(checkpoints.save({"w": state}))
    with pipeline.ring.lent() as memories:
        slots = [(address_of(each), address_of(each) + each.nbytes) for each in memories]
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in found.values()]
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # it keeps nothing else alive
    pairs = pairwise(sorted([*spans, *slots]))
    assert all(end <= begin for (_, end), (begin, _) in pairs)


@pytest.mark.skipif(not THP.exists(), reason="no transparent huge pages here")
def test_large_tensors_are_read_into_huge_pages(checkpoints: Any, state: Any) -> None:
    found = read(checkpoints.save({"w": state}))
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    address = found["t0"].data_ptr() + found["t0"].nbytes // 2
    for lines, flags in pairwise(mappings):
        for line in lines.splitlines():
            borders = line.split(" ", 1)[0].split("-")
            if len(borders) == 2 and int(borders[0], 16) <= address < int(borders[1], 16):
                assert "hg" in flags.splitlines()[0].split()
                return
    raise AssertionError("no mapping holds the tensor")


def test_an_error_of_any_read_ends_the_load_and_leaves_nothing_behind(
    checkpoints: Any, state: Any
) -> None:
    step = checkpoints.save({"w": state})
    counting = FailpointFileSystem(LocalFileSystem())
    read(_through(step, counting))
    num_reads = counting.counts["read_into"]
    assert num_reads >= 17
    for number in range(1, num_reads + 1):
        plan = parse_failpoints(f"read_into:{number}+=EIO")
        with pytest.raises(UnreadableCheckpointError, match="EIO"):
            read(_through(step, FailpointFileSystem(LocalFileSystem(), plan)))
        names = [each.name for each in threading.enumerate()]
        assert not [name for name in names if name.startswith("resumekit-read")]
    found = read(step)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def _through(step: Any, file_system: FailpointFileSystem) -> Any:
    return StepReader(file_system, step.path.parent, step.name)
