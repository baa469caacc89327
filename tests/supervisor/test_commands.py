"""What is known of the commands that start ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from resumekit.errors import ConfigurationError
from resumekit.supervisor.commands import check_command, launcher_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py", None),
        ("python -m train", None),
        ("./train.sh", None),
        ("python train.py deepspeed", None),
        ("torchrun --nproc-per-node=2 train.py", "torchrun"),
        ("python -u -m torch.distributed.run train.py", "torchrun"),
        ("/usr/bin/accelerate launch train.py", "accelerate"),
        ("env A=1 deepspeed train.py", "deepspeed"),
    ],
)
def test_launchers_are_known_by_their_names(command: str, name: str | None) -> None:
    launcher = launcher_of(command.split())
    assert (launcher and launcher.names[0]) == name


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("torchrun --nnodes=2 train.py", {}),
        ("torchrun --nnodes 1:4 train.py", {}),
        ("accelerate launch --num_machines 2 train.py", {}),
        ("deepspeed --hostfile=nodes train.py", {}),
        ("python train.py", {"SLURM_JOB_NUM_NODES": "4"}),
    ],
)
def test_restarts_on_several_nodes_are_left_to_the_launcher_or_scheduler(
    command: str, environment: Mapping[str, str]
) -> None:
    check_command(command.split(), environment, max_restarts=0)
    with pytest.raises(ConfigurationError, match="Pass --max-restarts 0"):
        check_command(command.split(), environment, max_restarts=3)


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ("torchrun --nnodes=1 train.py", {}),
        ("torchrun train.py --nnodes 2", {}),
        ("python train.py", {"SLURM_JOB_NUM_NODES": "1"}),
        ("python train.py", {"SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "1"}),
    ],
)
def test_one_node_is_supervised(command: str, environment: Mapping[str, str]) -> None:
    check_command(command.split(), environment, max_restarts=3)


def test_an_option_of_python_under_which_nothing_can_be_attached_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Remove -I"):
        check_command(["python", "-I", "train.py"], {}, max_restarts=0)
