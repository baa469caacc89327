"""The generators of an accelerator's devices continue on the devices that take over their work.

A child process registers an accelerator with torch, whose devices draw from generators on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from resumekit.capture.global_rng import DeviceStates, device_for, was_drawn_from

ACCELERATOR = """
import json, types
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
from resumekit.capture.rng import RngState
from resumekit.data.workers import read_states, write_states
from resumekit.record.step_values import RandomStates

toy = types.ModuleType("torch.toy")
toy.generators = [torch.Generator().manual_seed(seed) for seed in range(8)]
toy.current = 1
toy.started = True
toy.is_available = lambda: True
toy.is_initialized = lambda: toy.started
toy.device_count = lambda: len(toy.generators)
toy.current_device = lambda: toy.current
toy._is_in_bad_fork = lambda: False
toy.manual_seed_all = lambda seed: None
toy.get_rng_state = lambda device: toy.generators[device].get_state()
toy.set_rng_state = lambda state, device: toy.generators[device].set_state(state)
register("toy", backend_module=toy)


def draw(device):
    return torch.rand((), generator=toy.generators[device]).item()


def launched_again(num_devices, current):
    toy.generators = [torch.Generator().manual_seed(100 + index) for index in range(num_devices)]
    toy.current = current
    draw(0)
"""

# CUDA's module without the library behind it: torch's own queue, run by torch's own `init`.
CUDA_WITHOUT_A_DRIVER = """
import json
import torch

torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_init = lambda: None
torch.cuda._cudart = object()
torch.cuda.default_generators = (torch.Generator(),)
saved = torch.Generator().manual_seed(5).get_state()
"""

has_python_accelerators = pytest.mark.skipif(
    not hasattr(torch._C, "_acc"), reason="torch registers accelerators in Python since 2.10"
)


def run(*parts: str) -> Any:
    """What a program prints last, in a process of its own: torch has one accelerator for good."""
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(parts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def states(*drawn: int, num: int = 8, current: int | None = 0) -> DeviceStates:
    """States as CUDA has them: a seed and an offset."""
    offsets = [4 * (index in drawn) for index in range(num)]
    found = [torch.tensor([[9, offset]]).view(torch.uint8).flatten() for offset in offsets]
    return DeviceStates("cuda", current, found)


# ---------------------------------------------------------------- which device continues which


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        (0, 0, {0: 0, 1: 1, 5: 5}),
        (3, 3, {0: 0, 1: 1, 3: 3}),
        (1, 5, {1: 5}),  # 2 nodes of 4 -> 1 node of 8
        (5, 1, {5: 1}),
        (1, 0, {1: 0, 0: 1}),  # CUDA_VISIBLE_DEVICES=0,1 -> 1,0
        (None, 5, {0: 0, 5: 5}),  # an older checkpoint
    ],
)
def test_the_current_device_continues_the_current_one(
    then: int | None, now: int, expected: Mapping[int, int]
) -> None:
    assert {index: device_for(index, then, now) for index in expected} == expected
    assert sorted(device_for(index, then, now) for index in range(8)) == list(range(8))


@pytest.mark.parametrize(("then", "now"), [(a, b) for a in range(4) for b in range(4)])
def test_states_in_one_order_are_equal_after_another_launch(then: int, now: int) -> None:
    """So the journal can compare one digest of all of them."""
    saved = states(then, num=4, current=then)
    live = dict(enumerate(saved.states))
    for index, state in enumerate(saved.states):
        live[device_for(index, then, now)] = state
    moved = DeviceStates("cuda", now, [live[index] for index in range(4)])
    for before, after in zip(saved.current_first(), moved.current_first(), strict=True):
        assert torch.equal(before, after)


def test_a_generator_that_was_seeded_alone_was_not_drawn_from() -> None:
    assert [was_drawn_from(state) for state in states(1, num=3).states] == [False, True, False]
    assert was_drawn_from(torch.Generator().get_state())  # nothing shows it


# ---------------------------------------------------------------- an accelerator


@has_python_accelerators
def test_the_devices_of_another_accelerator_continue() -> None:
    found = run(
        ACCELERATOR,
        """
draw(0), draw(1)
saved, recorded = RngState().state_dict(), read_states()
digest = RandomStates({}).devices()
expected = [draw(device) for device in range(8)]
found = {"current": saved["current_device"], "cuda": saved["cuda"], "same": [], "messages": []}
for num_devices, current in ((8, 1), (8, 5), (4, 3), (1, 0)):
    for restores in (True, False):
        launched_again(num_devices, current)
        rng = RngState()
        rng.check_state_dict(saved)
        messages = rng.load_state_dict(saved) if restores else ()
        same_digest = RandomStates({}).devices() == digest
        same = [draw(current) == expected[1], same_digest]
        if restores:
            launched_again(num_devices, current)
            write_states(recorded)
            same.append(draw(current) == expected[1])
        found["same"].append(same)
        found["messages"] += messages
print(json.dumps(found))
""",
    )
    assert (found["current"], found["cuda"]) == ("toy:1", [])
    without = [False, False]
    all_same, draws_same = (
        [True, True, True],
        [True, False, True],
    )  # of other devices a digest differs
    assert found["same"] == [
        *(all_same, without, all_same, without),
        *(draws_same, without, draws_same, without),
    ]
    moved, fewer, one = found["messages"]
    assert moved.startswith("draws may differ on toy:0, toy:2, ")
    assert moved.endswith(
        "the RNG states of 8 toy devices, and toy:1 was the current one; here are 8"
    )
    assert "toy:1," not in fewer + one
    assert fewer.endswith("here are 4")
    assert one.endswith("here are 1")


@has_python_accelerators
def test_an_accelerator_is_read_and_reported_once_it_is_in_use() -> None:
    found = run(
        ACCELERATOR,
        """
from resumekit.capture.global_rng import accelerator_in_use
from resumekit.recorder.digests import rng_positions
from resumekit.run.randomness import RandomState
from resumekit.record.trace import rng_digests

def seen():
    return [
        "current_device" in RngState().state_dict(),
        RandomStates({}).devices() is not None,
        "toy:1" in rng_digests(),
        accelerator_in_use(if_unknown=False),
    ]

found = {"in use": seen()}
toy.started = False
saved = RngState().state_dict()
found["before"], found["silent"] = seen(), RngState().load_state_dict(saved)
toy.started = True
found["cpu to toy"] = RngState().load_state_dict(saved)
found["fidelity"] = RngState().fidelity
with_devices = RngState().state_dict()
found["positions"] = list(rng_positions())
toy.set_rng_state = lambda state, device: None
draw(1)
try:
    RngState().load_state_dict(with_devices)
except Exception as error:
    found["no effect"] = f"{type(error).__name__} {error}"
del toy.get_rng_state
found["component"] = RandomState({}, None).fidelity
found["lost"] = [RngState().fidelity, seen(), RngState().load_state_dict(saved)]
toy.generators = []
found["toy to cpu"] = RngState().load_state_dict(with_devices)
print(json.dumps(found))
""",
    )
    assert found["in use"] == [True, True, True, "toy"]
    assert found["before"] == [False, False, False, ""]
    assert found["silent"] == []
    (message,) = found["cpu to toy"]
    assert message.startswith("the checkpoint has no RNG state of toy devices")
    assert found["fidelity"] is None
    assert found["positions"] == ["python", "numpy", "torch"]
    assert found["no effect"].startswith("StateMismatchError rng: toy:1: another state")
    (fidelity, reason), nothing_seen, _ = found["lost"]
    assert found["component"] == [fidelity, reason]
    assert (fidelity, nothing_seen) == ("lost", [False, False, False, "toy"])
    assert reason.startswith("the generators of toy devices are not saved")
    (message,) = found["toy to cpu"]
    assert message.startswith("draws may differ on toy:0, toy:1, ")


# ---------------------------------------------------------------- CUDA before its start


def test_torch_runs_a_queued_seed_after_a_queued_state() -> None:
    """The control of the next test: what a restore without a start of CUDA comes to."""
    queue = "torch.cuda.set_rng_state(saved, 0)\ntorch.cuda.manual_seed_all(0)"
    for code in (queue, "\n".join(reversed(queue.splitlines()))):
        show = (
            "torch.cuda.init()\nprint(json.dumps(torch.cuda.default_generators[0].initial_seed()))"
        )
        assert run(CUDA_WITHOUT_A_DRIVER, code, show) == 0


def test_a_seed_from_before_the_restore_does_not_overwrite_a_cuda_state() -> None:
    code = """
from resumekit.capture.rng import RngState
from resumekit.data.workers import write_states
found = []
torch.manual_seed(0)
state = RngState().state_dict()
found.append(torch.cuda.is_initialized())
messages = RngState().load_state_dict({**state, "cuda": [saved], "current_device": "cuda:0"})
found += [torch.cuda.is_initialized(), torch.cuda.default_generators[0].initial_seed(), messages]
torch.cuda.default_generators[0].manual_seed(1)
write_states({"cuda:0": saved.numpy().tobytes()})
found.append(torch.cuda.default_generators[0].initial_seed())
print(json.dumps(found))
"""
    assert run(CUDA_WITHOUT_A_DRIVER, code) == [False, True, 5, [], 5]
