"""Runs scripts uninterrupted and killed by SIGKILL, and compares what they recorded of each step.

The scripts write the records themselves (``scripts/judged_script.py``): loss, digests of all that
the optimizers train, of the inputs and of further state. resumekit is not asked for anything.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from journals import worst_verdict
from official_scripts import MODULE

from resumekit.launcher.processes import Launch, kill_processes
from resumekit.record.comparison import StepsVerdict
from resumekit.record.trace import INJECT_VARIABLE
from resumekit.testing.launchers import ForkServer, distributed_environment, free_port
from resumekit.testing.task import Task, load_function, target_of

# Read by scripts/judged_script.py, which must not import this.
RECORDS_VARIABLE = "SCRIPT_RECORDS"
WAIT_VARIABLE = "SCRIPT_WAITS_AT"
THREADS_VARIABLE = "SCRIPT_THREADS"  # of the intra-op pool, for scripts of integration/scripts

# Components that hold what user code keeps in attributes.
USER_STATE = "model/attributes,callbacks/attributes,callbacks/held"

SCRIPTS = Path(__file__).parents[1] / "scripts"
SHARED = Path(__file__).parents[1] / "shared"
ROOT = Path(__file__).parents[2]
LAST_RECORD_SECONDS = 90.0
POLL_SECONDS = 0.01

# Controls that the journal cannot find: all that its records hold is as before.
NOT_IN_THE_JOURNAL = {
    "early_stopping.py": "its counters only decide at which step the run stops",
    "ddp_evaluation.py": "in training a batch norm does not read the buffers that differ",
}

Records = Mapping[int, Mapping[str, str]]  # the last execution of each step


@dataclass(frozen=True)
class Script:
    """A script and how it is launched.

    Args:
        name: a file of ``integration/scripts``, or ``file.py:function`` beside this one, which
            is called with the directory.
        arguments: of the command line, behind ``--directory``.
        num_ranks: processes of each launch.
        kills: the steps after which the launches are killed.
        torchrun: start the ranks by torchrun, each launch cold, instead of one process each.
        attached: the options of ``resumekit run``, which then starts torchrun; None without it.
    """

    name: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = 1
    kills: tuple[int, ...] = (9, 12)  # the scripts save at 6 and 9: each resume repeats two steps
    torchrun: bool = False
    attached: tuple[str, ...] | None = None

    def with_arguments(self, *arguments: str) -> Script:
        """The same script with further arguments."""
        return replace(self, arguments=(*self.arguments, *arguments))


@dataclass(frozen=True)
class Execution:
    """What the launches of one run recorded and printed.

    Args:
        records: of each rank.
        outputs: of each launch, all ranks together.
        statuses: the exit statuses of the ranks in the last launch.
        verdict: the worst one of the journals on the steps that the resumes repeated; None where
            no attempt resumed.
    """

    records: tuple[Records, ...]
    outputs: tuple[str, ...]
    statuses: tuple[int, ...]
    verdict: StepsVerdict | None

    @property
    def messages(self) -> list[str]:
        """The lines of resumekit, of all launches."""
        lines = "\n".join(self.outputs).splitlines()
        return [line for line in lines if line.startswith("resumekit: ")]

    @property
    def warnings(self) -> list[str]:
        """The warnings of resumekit."""
        return [line for line in self.messages if line.startswith("resumekit: WARNING: ")]

    @property
    def word(self) -> str:
        """Of the journal; empty where no step was repeated."""
        word = "" if self.verdict is None else self.verdict.word
        return "" if word == "nothing repeated" else word

    def require_success(self) -> Execution:
        """This execution, unless its last launch failed.

        Raises:
            AssertionError: with the last output.
        """
        if any(self.statuses):
            raise AssertionError(f"exit statuses {self.statuses}:\n{self.outputs[-1][-3000:]}")
        return self


def differences(reference: Execution, run: Execution) -> list[str]:
    """One line for each rank, step and field that is not the same."""
    lines = []
    for rank, (expected, found) in enumerate(zip(reference.records, run.records, strict=True)):
        if expected.keys() != found.keys():
            lines.append(f"rank {rank}: steps {sorted(expected)} became {sorted(found)}")
        for step in sorted(expected.keys() & found.keys()):
            fields = [k for k, v in expected[step].items() if found[step][k] != v]
            if fields:
                lines.append(f"rank {rank}, step {step}: {', '.join(fields)}")
    return lines


class ScriptJudge:
    """Launches scripts, one judge for many of them.

    Args:
        directory: an empty directory for all that the scripts write.
        server: forks every launch; the modules that it imported are imported there.
    """

    def __init__(self, directory: Path, server: ForkServer) -> None:
        self._directory = directory
        self._num_runs = 0
        self._uninterrupted: dict[Script, Execution] = {}
        self._server = server
        self._environment = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS, SHARED))),
        }

    def run_uninterrupted(self, script: Script) -> Execution:
        """One launch that nobody kills; made once for each script and its arguments."""
        script = replace(script, kills=())
        if script not in self._uninterrupted:
            self._uninterrupted[script] = self.run(script)
        return self._uninterrupted[script]

    def run(
        self, script: Script, *, without: str | None = None, num_threads: int | None = None
    ) -> Execution:
        """One launch for each kill and one that runs to its end, with the same command.

        Args:
            script: what to run.
            without: component keys or slots that the resumes do not restore, separated by commas.
            num_threads: of the resumes, where it is not the first launch's.
        """
        self._num_runs += 1
        directory = self._directory / f"run-{self._num_runs:04d}"
        directory.mkdir()
        outputs: list[str] = []
        statuses: tuple[int, ...] = ()
        for kill in (*script.kills, None):
            log = directory / f"launch-{len(outputs)}.log"
            environment = {
                RECORDS_VARIABLE: str(directory / "records"),
                WAIT_VARIABLE: None if kill is None else str(kill),
                INJECT_VARIABLE: without if outputs else None,
                THREADS_VARIABLE: str(num_threads) if outputs and num_threads else None,
            }
            is_cold = script.torchrun or script.attached is not None
            launch = self._launch_torchrun if is_cold else self._launch_forked
            statuses = launch(script, directory, environment, log, kill)
            outputs.append(log.read_text(encoding="utf-8", errors="replace"))
            if kill is not None and statuses:
                break  # it ended by itself before the step was reached
        records = [_records(directory, rank) for rank in range(script.num_ranks)]
        worst = worst_verdict(directory / "run")
        verdict = None if worst is None else worst.verdict
        return Execution(tuple(records), tuple(outputs), statuses, verdict)

    def _run_killed(self, script: Script, without: str | None = None) -> Execution:
        run = self.run(script, without=without).require_success()
        assert len(run.outputs) == len(script.kills) + 1, f"ended early:\n{run.outputs[-1][-3000:]}"
        return run

    def assert_exact(self, script: Script) -> None:
        """Fails unless the killed run did what the uninterrupted one did, bit for bit.

        The journal must not report a difference either.
        """
        reference = self.run_uninterrupted(script).require_success()
        assert all(reference.records), "the script recorded no step"
        run = self._run_killed(script)
        found = differences(reference, run)
        assert not found, f"{script.name} {' '.join(script.arguments)}: " + "; ".join(found)
        assert run.word in ("identical", ""), f"{script.name}: the journal says {run.verdict}"

    def assert_differs(self, script: Script, *fields: str, without: str | None = None) -> None:
        """The negative control of a script: fails if a field of the records never differs.

        The journal must report a difference too, except for ``NOT_IN_THE_JOURNAL``.

        Args:
            script: what to run.
            *fields: of the records; what was trained by default.
            without: component keys or slots that the resumes do not restore.
        """
        reference = self.run_uninterrupted(script).require_success()
        run = self._run_killed(script, without)
        found = differences(reference, run)
        for field in fields or ("trained",):
            assert _names(found, field), f"{script.name}: {field} is exact without {without}"
        expected = "identical" if script.name in NOT_IN_THE_JOURNAL else "different"
        assert run.word == expected, f"{script.name}: the journal says {run.verdict}"

    def assert_warns(self, script: Script, *names: str) -> None:
        """Fails unless warnings of an uninterrupted run name each of these variables."""
        run = self.run_uninterrupted(script).require_success()
        missing = [name for name in names if not _names(run.warnings, name)]
        assert not missing, f"{script.name}: no warning names {missing}: {run.messages}"

    def assert_strict_refuses(self, script: Script, *names: str) -> None:
        """Fails unless ``strict=True`` ends the run with an InexactError that has these names."""
        run = self.run_uninterrupted(script.with_arguments("--strict"))
        errors = [line for line in run.outputs[-1].splitlines() if "InexactError" in line]
        assert errors, f"{script.name}: strict=True started: {run.messages}"
        text = run.outputs[-1]
        missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
        assert not missing, f"{script.name}: the error does not name {missing}: {errors}"

    # ---------------------------------------------------------------- launching

    def _launch_forked(
        self,
        script: Script,
        directory: Path,
        environment: Mapping[str, str | None],
        log: Path,
        kill: int | None,
    ) -> tuple[int, ...]:
        """The exit statuses of the ranks; none where they were killed after a step."""
        port = free_port()
        started = []
        for rank in range(script.num_ranks):
            ranks = distributed_environment(rank, script.num_ranks, port)
            whole = {**self._environment, **environment, **ranks}
            options = {"script": script.name, "arguments": list(script.arguments)}
            target = target_of(run_script)
            task = Task(target, str(directory / "run"), options, whole, str(log))
            started.append(self._server.start(task))
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + LAST_RECORD_SECONDS
        while len(statuses) < len(started) and time.monotonic() < deadline:
            running = [pid for pid in started if pid not in statuses]
            ended = self._server.wait_any(running, POLL_SECONDS)
            if ended is not None:
                statuses[ended[0]] = ended[1]
                if ended[1] != 0:  # the other ranks would wait for it
                    deadline = min(deadline, time.monotonic() + 1.0)
            elif kill is not None and kill in _records(directory, 0):
                break
        for pid in started:
            kill_processes(pid)
            if pid not in statuses:
                self._server.wait_any([pid], LAST_RECORD_SECONDS)
        if kill is not None and not statuses:
            return ()
        return tuple(statuses.get(pid, -9) for pid in started)

    def _launch_torchrun(
        self,
        script: Script,
        directory: Path,
        environment: Mapping[str, str | None],
        log: Path,
        kill: int | None,
    ) -> tuple[int, ...]:
        marker = "SCRIPT_JUDGE"
        given = {**os.environ, **self._environment, **environment, marker: str(log)}
        given["OMP_NUM_THREADS"] = given[THREADS_VARIABLE] or given["OMP_NUM_THREADS"]
        command = [*MODULE, "torch.distributed.run"]
        command += [f"--nproc-per-node={script.num_ranks}", f"--master-port={free_port()}"]
        command += [str(SCRIPTS / script.name), "--directory", str(directory / "run")]
        if script.attached is not None:
            words = ("run", "--dir", str(directory / "run"), "--max-restarts", "0")
            command = [*MODULE, "resumekit.cli", *words, *script.attached, "--", *command]
        launch = Launch(
            [*command, *script.arguments],
            {k: v for k, v in given.items() if v is not None},
            marker=marker,
            log=log,
        )
        deadline = time.monotonic() + LAST_RECORD_SECONDS
        try:
            while time.monotonic() < deadline:
                status = launch.poll()
                if status is not None:
                    return (status,)
                if kill is not None and kill in _records(directory, 0):
                    return ()
                time.sleep(POLL_SECONDS)
        finally:
            launch.kill_all()
        return (-9,)


def run_script(directory: str, *, script: str, arguments: Sequence[str]) -> None:
    """Runs a script as ``python script --directory directory arguments`` does, in this process."""
    sys.path.insert(0, str(SCRIPTS))
    if ":" in script:
        load_function(str(Path(__file__).with_name(script)))(directory)
        return
    path = str(SCRIPTS / script)
    sys.argv = [path, "--directory", directory, *arguments]
    if THREADS_VARIABLE in os.environ:
        torch.set_num_threads(int(os.environ[THREADS_VARIABLE]))
    runpy.run_path(path, run_name="__main__")


def _names(lines: Sequence[str], name: str) -> bool:
    return any(re.search(rf"(?<![\w.]){re.escape(name)}\b", line) for line in lines)


def _records(directory: Path, rank: int) -> Records:
    path = directory / f"records-rank-{rank}.jsonl"
    if not path.exists():
        return {}
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # the last one may be incomplete
    parsed = [json.loads(line) for line in lines]
    return {each["step"]: each for each in parsed}
