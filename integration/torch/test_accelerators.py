"""A training on an accelerator that a plug-in registers resumes exactly, its generators too.

The device is real to torch: memory, copies, kernels and generators are of its backend, written in
C++ and compiled here. It runs on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from resumekit.testing import gpu

pytestmark = pytest.mark.full  # a compiler takes half a minute

BACKEND = Path(__file__).with_name("device_backend")
ROWS = {row.name: row for row in gpu.ROWS}

# Draws on the current device and on the other one; argv: directory, current device, step of a kill.
DRAWS = """
import json, os, signal, sys
import torch
from torch import nn
from resumekit.adapters.torch import Checkpointer

directory, current, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.simulated.set_device(current)
torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = Checkpointer(directory, model=model, optimizer=optimizer, save_every=2)
for _ in ckpt.batches(range(8), epochs=1):
    mine = torch.rand(2, device="simulated").tolist()
    others = torch.rand(3, device=f"simulated:{1 - current}").tolist()
    ckpt.step()
    print(json.dumps([ckpt.progress.step, mine, others]), flush=True)
    if ckpt.progress.step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
"""

# User state on the device that is not the current one.
LAST = """
import json, os, signal, sys
import torch
from torch import nn
from resumekit.adapters.torch import Checkpointer

extras = {"last": None}
ckpt = Checkpointer(sys.argv[1], model=nn.Linear(1, 1), save_every=2, extras=extras)
for _ in ckpt.batches(range(8), epochs=1):
    last = extras["last"]
    found = None if last is None else [last.item(), str(last.device)]
    print(json.dumps([ckpt.progress.step, found]))
    extras["last"] = torch.full((), ckpt.progress.step, device="simulated:1")
    ckpt.step()
    if ckpt.progress.step == int(sys.argv[2]):
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""

# The device still copies to host memory when the save begins; nothing else of it is saved.
PENDING = """
import sys
import torch
from torch import nn
from resumekit.adapters.torch import Checkpointer

directory, is_async = sys.argv[1], sys.argv[2] == "async"
model = nn.Linear(1, 1)
model.register_buffer("late", torch.zeros(1000))
values = torch.zeros(1000, device="simulated")
options = {"save_every": 1, "keep_latest": None, "async_save": is_async, "transient": {"values"}}
ckpt = Checkpointer(directory, model=model, **options)
for _ in ckpt.batches(range(4), epochs=1):
    values += 1
    model.late.copy_(values, non_blocking=True)
    ckpt.step()
"""

# Frozen weights on the device; one of them changes at step 6, in a way that no version counts.
FROZEN = """
import json, sys
import torch
from torch import nn
from resumekit.adapters.torch import Checkpointer
from resumekit.serialization import writing

calls, digest = [], writing.digest_of_block

def counted(parts):
    calls.append(parts)
    return digest(parts)

writing.digest_of_block = counted
model = nn.Sequential(nn.Linear(1500, 1501), nn.Linear(1501, 1)).to("simulated")
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
options = {"save_every": 1, "keep_latest": None, "async_save": sys.argv[2] == "async"}
ckpt = Checkpointer(sys.argv[1], model=model, optimizer=optimizer, **options)
for _ in ckpt.batches(range(8), epochs=1):
    model(torch.ones(1, 1500, device="simulated")).sum().backward()
    optimizer.step()
    if ckpt.progress.step == 5:
        model[0].weight.data[7, 7] = 5
    ckpt.step()
    ckpt.wait()
    print(json.dumps([ckpt.progress.step, len(calls), model[0].weight[7, 7].item()]))
    calls.clear()
"""


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plug-in")
    command = [sys.executable, str(BACKEND / "simulated_device.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return folder


@pytest.fixture(autouse=True)
def _installed(plug_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{plug_in}{os.pathsep}{os.environ['PYTHONPATH']}")


def launch(
    code: str, *arguments: Any, expected: int = 0, environment: Mapping[str, str] | None = None
) -> dict[int, Any]:
    """What a program prints of each step."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stderr
    lines = (json.loads(line) for line in done.stdout.splitlines())
    return {step: drawn for step, *drawn in lines}


@pytest.mark.parametrize(
    "name",
    [
        "RNG, dropout",
        "tensor formats, sync save",
        "tensor formats, async save",
        "tensors in extras and variables",
        "NAdam",
        gpu.ACROSS_DEVICES,
    ],
)
def test_a_row_of_the_checks_for_a_gpu(name: str, tmp_path: Path) -> None:
    """With its negative control: without one component, values must differ."""
    result = gpu.Judge(ROWS[name], tmp_path, "simulated").result()
    assert result.outcome == gpu.PASS, result


@pytest.mark.parametrize("resumed_on", [0, 1])
def test_draws_continue_on_the_devices_that_take_over(tmp_path: Path, resumed_on: int) -> None:
    expected = launch(DRAWS, tmp_path / "reference", 0, 0)
    killed = launch(DRAWS, tmp_path / "killed", 0, 5, expected=-signal.SIGKILL)
    assert killed == {step: expected[step] for step in range(1, 6)}
    resumed = launch(DRAWS, tmp_path / "killed", resumed_on, 0)
    assert resumed == {step: expected[step] for step in range(5, 9)}


def test_draws_differ_where_the_generators_are_not_restored(tmp_path: Path) -> None:
    expected = launch(DRAWS, tmp_path / "reference", 0, 0)
    launch(DRAWS, tmp_path / "killed", 0, 5, expected=-signal.SIGKILL)
    left_out = {"RESUMEKIT_INJECT": "rng"}
    resumed = launch(DRAWS, tmp_path / "killed", 0, 0, environment=left_out)
    assert sorted(resumed) == [5, 6, 7, 8]
    for step, (mine, others) in resumed.items():
        assert mine != expected[step][0]
        assert others != expected[step][1]


def test_a_value_returns_to_the_device_that_it_was_on(tmp_path: Path) -> None:
    launch(LAST, tmp_path, 5, expected=-signal.SIGKILL)
    resumed = launch(LAST, tmp_path, 0)
    assert resumed == {step: [[step - 1, "simulated:1"]] for step in range(4, 8)}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_save_waits_for_what_the_device_still_copies(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file

    launch(PENDING, tmp_path, kind)
    found = {}
    for path in tmp_path.glob("step-*/**/*.safetensors"):
        tensors = load_file(path)
        if "late" in tensors:
            found[path.relative_to(tmp_path).parts[0]] = tensors["late"].unique().tolist()
    assert found == {f"step-{step:08d}": [step] for step in range(1, 5)}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_frozen_weights_are_fetched_only_where_their_digest_changed(
    tmp_path: Path, kind: str
) -> None:
    from safetensors.torch import load_file

    fetched = launch(FROZEN, tmp_path / "run", kind)
    saved, calls, values, files = [], [], [], []
    for step, (number, value) in sorted(fetched.items()):
        (path,) = (tmp_path / "run" / f"step-{step:08d}").glob("**/*.frozen.safetensors")
        saved.append(float(load_file(path)["0.weight"][7, 7]))
        files.append(path.stat().st_ino)
        calls.append(number)
        values.append(value)
    assert saved == values
    assert values[4] != values[5] == 5
    assert files[0] == files[2] == files[4] != files[1] == files[3]
    assert len({*files[:2], *files[5:]}) == 4
    # Two are written, the third is fetched and compared; later ones are not, until one changes.
    assert calls == [0, 0, 0, 3, 0, 0, 3, 0]  # blocks; a step is saved when the next one begins
