"""The first call of torch's vector math in a process is made by one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOTS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Roots(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sqrt.default:
            print(args[0].numel())
        return func(*args, **(kwargs or {}))

with Roots():
    """
TRAINING = """
import torch, xxhash

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.1))
optimizer = torch.optim.Adam(model.parameters())
for x in torch.randn(5, 16, 256):
    (model(x) - x).square().mean().backward()
    optimizer.step()
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print(xxhash.xxh3_64_hexdigest(weights))
"""
NUM_LAUNCHES = 40


def output(program: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import resumekit.adapters.torch",
        "from resumekit.recorder import record_torch; record_torch({'directory': '.'})",
    ],
)
def test_an_adapter_and_the_recorder_make_it(statement: str) -> None:
    assert output(ROOTS + statement) == "1\n"
    assert output(ROOTS + "import resumekit.record.journal") == ""


@pytest.mark.full
def test_launches_with_two_threads_compute_the_same(
    record_property: Callable[[str, object], None],
) -> None:
    """More of them run at once than there are cores: then threads wait in the middle of a call."""
    programs = [TRAINING, f"import resumekit.adapters.torch\n{TRAINING}"]
    with ThreadPoolExecutor(3 * (os.cpu_count() or 1)) as pool:
        found = [*pool.map(output, programs * NUM_LAUNCHES)]
    alone, attached = found[::2], found[1::2]
    (expected,) = {*attached}
    others = NUM_LAUNCHES - Counter(alone)[expected]
    record_property("launches with two threads that computed other bits, alone", others)
    record_property("launches with two threads, with the library", f"{len(attached)}: equal")
