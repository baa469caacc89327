"""What the supervisor must know of launchers: on how many nodes, and who gets a signal."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from resumekit.attach import training_processes
from resumekit.errors import ConfigurationError
from resumekit.launcher import option_against_environment, refuse_launched


@dataclass(frozen=True)
class Launcher:
    """A program that starts the ranks.

    Args:
        names: of the program, or of the module after ``python -m``.
        forwards: whether it forwards a signal to its ranks; if not, they get it themselves.
        nodes: its options that give a number of nodes.
        node_files: its options that name a file of nodes.
    """

    names: tuple[str, ...]
    forwards: bool
    nodes: tuple[str, ...] = ()
    node_files: tuple[str, ...] = ()


_LAUNCHERS = (
    # torch 2.13 distributed/elastic/multiprocessing/api.py PContext.start
    Launcher(
        ("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        forwards=True,
        nodes=("--nnodes",),
    ),
    # accelerate 1.15 commands/launch.py simple_launcher only waits for its child
    Launcher(
        ("accelerate", "accelerate.commands.launch"),
        forwards=False,
        nodes=("--num_machines", "--nnodes"),
        node_files=("--deepspeed_hostfile",),
    ),
    # deepspeed 0.19 launcher/launch.py terminates the loader workers of the ranks, too
    Launcher(
        ("deepspeed", "ds", "deepspeed.launcher.runner"),
        forwards=False,
        nodes=("--num_nodes", "--nnodes"),
        node_files=("--hostfile", "-H"),
    ),
)

# The default of torchrun --signals-to-handle lacks the signal that schedulers send in advance.
# torch 2.13 distributed/argparse_util.py env: an option's default is read from the environment.
SIGNALS_OF_TORCHRUN = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}


FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def forward_signal(number: int, command: Sequence[str], private: Path, root: int) -> None:
    """Sends a signal to those processes of a command that can save and leave.

    Args:
        number: of the signal.
        command: program and arguments.
        private: the launcher's directory.
        root: the id of the process that was started.
    """
    launcher = launcher_of(command)
    # A shell or another launcher may forward no signal; loader workers need none.
    forwards = launcher is not None and launcher.forwards
    targets = [] if forwards else training_processes(private)
    for pid in targets or [root]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def launcher_of(command: Sequence[str]) -> Launcher | None:
    """The launcher that a command starts; None for any other program."""
    words = _before_script(command)
    for index, word in enumerate(words):
        name = Path(word).name
        if re.fullmatch(r"python[\d.]*", name):
            rest = [each for each in words[index + 1 :] if each not in ("-u", "-B", "-O")]
            name = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
            return _named(name)
        if _named(name) is not None:
            return _named(name)
    return None


def check_command(
    command: Sequence[str], environment: Mapping[str, str], *, max_restarts: int
) -> None:
    """Raises ConfigurationError unless the command can be supervised.

    Args:
        command: program and arguments.
        environment: of the supervisor.
        max_restarts: 0 asks for no restart.

    Raises:
        ConfigurationError: nothing could be attached, or restarts belong to somebody else, such as
            ``resumekit prove``.
    """
    refuse_launched(environment, "resumekit run")
    text = " ".join(command)
    option = option_against_environment(command)
    if option is not None:
        raise ConfigurationError(
            text,
            found=f"python {option}, under which nothing can be attached",
            expected="python without it",
            remedy=f"Remove {option}, or add a ResumeCallback to the script",
        )
    nodes = _nodes_of(command, environment)
    if nodes and max_restarts:
        raise ConfigurationError(
            f"--max-restarts {max_restarts}",
            found=f"{nodes}, each with a supervisor of its own",
            expected="one node",
            remedy="Pass --max-restarts 0; let torchrun --max-restarts or the scheduler restart",
        )


def _named(name: str) -> Launcher | None:
    return next((each for each in _LAUNCHERS if name in each.names), None)


def _nodes_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What says that there is more than one node; empty for one."""
    launcher = launcher_of(command)
    for name in () if launcher is None else launcher.nodes:
        value = _value_of(command, name)
        # A range such as 1:4 is elastic.
        if value is not None and value.rpartition(":")[2] not in ("0", "1", "-1"):
            return f"{name} {value}"
    for name in () if launcher is None else launcher.node_files:
        if _value_of(command, name) is not None:
            return f"{name} names the nodes"
    number = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_JOB_NUM_NODES", "1")
    return f"{number} nodes of SLURM" if number not in ("", "1") else ""


def _value_of(command: Sequence[str], name: str) -> str | None:
    words = _before_script(command)
    for index, word in enumerate(words):
        option, has_value, value = word.partition("=")
        if option.replace("_", "-") == name.replace("_", "-"):
            return value if has_value else "".join(words[index + 1 : index + 2])
    return None


def _before_script(command: Sequence[str]) -> list[str]:
    """The words before the script, whose options may have any names."""
    return list(takewhile(lambda word: not word.endswith(".py"), command))
