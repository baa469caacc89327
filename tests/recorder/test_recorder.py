"""The recorder in real processes: it sees every step, and changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resumekit.prove.execution import failure_of_recorder, recorded_environment
from resumekit.record.moments import STEP, Moment, TracedProcess, find_trace, records_of
from resumekit.recorder import RecorderSettings
from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task

SCRIPT = Path(__file__).parent / "scripts" / "several_models.py"
RECORDED = SCRIPT.with_name("recorded_program.py")


def run(program: list[str], records: Path | None = None) -> str:
    """What a program prints, recorded or not."""
    environment = dict(os.environ)
    if records is not None:
        asked = RecorderSettings(directory=str(records))
        environment = recorded_environment(environment, records.with_name("launcher"), asked)
    done = subprocess.run(
        [sys.executable, *program], env=environment, capture_output=True, text=True, check=True
    )
    assert "resumekit" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer((*DEFAULT_PRELOAD, "resumekit.recorder"), os.environ)
    yield server
    server.close()


@pytest.fixture
def record(server: ForkServer, tmp_path: Path) -> Callable[..., str]:
    """Records a program in a fork of a warm process, with the same hooks; what it prints."""

    def record(program: str, *, digest_every: int = 1) -> str:
        path, log = tmp_path / "program.py", tmp_path / "output"
        path.write_text(program)
        settings = RecorderSettings(directory=str(tmp_path / "records"), digest_every=digest_every)
        options = {"program": str(path), "settings": settings.as_dict()}
        ended = server.run([Task(f"{RECORDED}:run", str(tmp_path), options, {}, str(log))], 60)
        output = log.read_text()
        assert ended == {0: 0}, output
        return output

    return record


def steps_in(records: Path) -> list[Moment]:
    (attempts,) = find_trace(records).values()
    assert all(isinstance(attempt, TracedProcess) for attempt in attempts)
    return list(records_of(attempts, STEP))


def test_a_recorded_run_is_the_unrecorded_one_and_every_step_is_in_its_records(
    tmp_path: Path,
) -> None:
    assert run([str(SCRIPT)], tmp_path / "records") == run([str(SCRIPT)])
    steps = steps_in(tmp_path / "records")
    # Two optimizers; the scaler skipped one step of the first.
    assert [record.step for record in steps] == [*range(1, 12)]
    first, second = steps[:2]
    assert list(first.fields["values"]) == ["loss", "loss 2"]  # one for each micro-batch
    assert len(first.fields["samples"]) == 2  # keyword arguments; the loss function is no model
    assert first.components.keys() == {
        *("parameters", "buffers", "optimizer", "modules/AveragedModel", "grad_scaler")
    }
    # The rows of both tensors, and the generators of three kinds.
    assert len(first.fields["sample_counts"]) == len(first.fields["sample_sets"]) == 2
    assert first.fields["rng_positions"].keys() == {"python", "numpy", "torch"}
    assert "Model.layers.1.running_mean" in first.components["buffers"]
    assert "Model.head.weight" in first.components["parameters"]
    assert "Model.head.weight.exp_avg" in first.components["optimizer"]
    assert "Linear.weight" in first.components["parameters"]  # its optimizer has not stepped yet
    assert second.fields["lr"] == [(0.1).hex()]
    assert "optimizer/1" in second.components
    averages = [step.components["modules/AveragedModel"]["n_averaged"] for step in steps[::2]]
    assert len(set(averages)) > 3
    assert {"python", "numpy", "torch"} <= first.parts["rng"].keys()


def test_the_batch_of_a_model_is_recorded_whose_wrapper_is_in_evaluation(
    record: Callable[..., str], tmp_path: Path
) -> None:
    program = (
        "import torch\n"
        "wrapper = torch.nn.Sequential(torch.nn.Linear(2, 1)).eval()\n"
        "optimizer = torch.optim.SGD(wrapper.parameters())\n"
        "for is_training in (False, True):\n"
        "    wrapper[0].train(is_training)\n"
        "    wrapper(torch.ones(2)).backward()\n"
        "    optimizer.step()\n"
    )
    record(program)
    steps = steps_in(tmp_path / "records")
    assert [len(step.fields["samples"]) for step in steps] == [0, 1]


@pytest.mark.parametrize(
    ("extra", "order", "losses"),
    [
        ("buckets.after_resume()", ["weight", "bias"], ["loss"]),
        ("(model.module.weight.sum() * 0).backward()", ["bias", "weight"], ["loss", "loss 2"]),
    ],
)
def test_a_pass_that_restores_the_buckets_of_ddp_is_no_loss_of_the_script(
    record: Callable[..., str], tmp_path: Path, extra: str, order: list[str], losses: list[str]
) -> None:
    """A pass of zeros that the script makes is one."""
    program = (
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from resumekit.capture.ddp_buckets import GradientBuckets\n"
        "store = torch.distributed.HashStore()\n"
        "torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=store)\n"
        "model = DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "buckets = GradientBuckets(model, key='model/gradient_buckets')\n"
        "buckets.load_state_dict({'': {'buckets': [['weight', 'bias']]}})\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        f"{extra}\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "buckets.before_save()\n"
        "print(buckets.state_dict()['']['buckets'])\n"
        "torch.distributed.destroy_process_group()\n"
    )
    assert record(program) == f"[{order}]\n"
    (step,) = steps_in(tmp_path / "records")
    assert list(step.fields["values"]) == losses


@pytest.mark.parametrize("lr", [0.1, 0.0])  # a warmup begins with 0
def test_the_step_by_which_torch_makes_moments_is_no_step_of_the_training(
    record: Callable[..., str], tmp_path: Path, lr: float
) -> None:
    record(
        "import torch\n"
        "from torch.distributed.checkpoint.state_dict import get_state_dict\n"
        "model = torch.nn.Linear(3, 2)\n"
        f"optimizer = torch.optim.AdamW(model.parameters(), lr={lr})\n"
        "get_state_dict(model, optimizer)\n"
        "for _ in range(2):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(1, 3)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    steps = steps_in(tmp_path / "records")
    assert [(step.step, step.fields["lr"]) for step in steps] == [(1, [lr.hex()]), (2, [lr.hex()])]


def test_states_are_digested_at_every_nth_step(record: Callable[..., str], tmp_path: Path) -> None:
    record(SCRIPT.read_text(), digest_every=4)
    steps = steps_in(tmp_path / "records")
    assert [step.step for step in steps if step.components] == [1, 5, 9]
    assert all(step.fields["weights"] for step in steps)


def test_a_process_that_does_not_train_writes_nothing(tmp_path: Path) -> None:
    run(["-c", "import torch; torch.nn.Linear(2, 2)(torch.ones(2))"], tmp_path / "records")
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_recorder_that_fails_writes_why_and_the_script_runs_on(
    record: Callable[..., str], tmp_path: Path, is_broken: bool
) -> None:
    """A parameter group of this optimizer has a learning rate that is no number."""
    lr = "lambda: 0.1" if is_broken else "0.1"
    program = (
        "import torch\n"
        "class Odd(torch.optim.Optimizer):\n"
        "    def step(self): print('stepped')\n"
        f"Odd([torch.nn.Parameter(torch.ones(2))], {{'lr': {lr}}}).step()\n"
    )
    assert record(program) == "stepped\n"
    assert ("TypeError" in failure_of_recorder(tmp_path / "records")) == is_broken


@pytest.mark.parametrize("is_nested", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_script_that_a_training_process_starts_is_not_recorded(
    tmp_path: Path, is_nested: bool
) -> None:
    """Between two steps, or before the first one: then both are of the run."""
    step = "o.zero_grad(); m(torch.ones(2)).sum().backward(); o.step()\n"
    training = "import torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
    other = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {training + step!r}])\n"
    program = training + step + other + step if is_nested else training + other + step
    run(["-c", program], tmp_path / "records")
    (attempts,) = find_trace(tmp_path / "records").values()
    assert len(attempts) == (1 if is_nested else 2)
    assert len(list(records_of(attempts, STEP))) == 2
