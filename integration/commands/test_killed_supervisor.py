"""A supervisor is killed in mid-training: the ranks save, whatever has started them, and end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from resumekit.launcher.processes import is_running
from resumekit.storage.store import Store

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
MODULE = (sys.executable, "-m")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = (
    *("accelerate.commands.launch", "--cpu", "--num_machines=1", "--mixed_precision=no"),
    *("--dynamo_backend=no", "--main_process_port=0", "--num_processes=1"),
)
DEEPSPEED = ("deepspeed.launcher.runner", "--no_local_rank", "--num_gpus=1", "--master_port=0")
COMMANDS = {
    "python": [sys.executable, "train_torch.py"],
    "torchrun": [*MODULE, *TORCHRUN, "train_ddp.py"],
    "accelerate": [*MODULE, *ACCELERATE, "train_accelerate.py"],
    "deepspeed": [*MODULE, *DEEPSPEED, "train_deepspeed.py"],
}
EPOCHS = {"deepspeed": "6"}


def supervised(name: str, directory: Path) -> list[str]:
    """The command of ``resumekit run`` that trains in a directory."""
    *words, script = COMMANDS[name]
    words += [str(SCRIPTS / script), "--directory", str(directory)]
    words += ["--epochs", EPOCHS.get(name, "12")]
    return [*MODULE, "resumekit.cli", "run", "--dir", str(directory), "--", *words]


def processes_of_run(directory: Path) -> set[psutil.Process]:
    """The processes with the directory in their arguments: launchers, ranks and loader workers."""
    found = set()
    for process in psutil.process_iter():
        try:
            if str(directory) in process.cmdline() and is_running(process.pid):
                found.add(process)
        except psutil.Error:
            continue
    return found


def wait_while(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while condition():
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.02)


def contents(directory: Path) -> dict[str, str]:
    """The digests of the tensors in the newest checkpoint of a finished run."""
    store = Store(directory)
    manifest = store.open_step(store.step_names()[0]).manifest
    assert manifest.finished is not None
    # Not the random state: the scripts seed torch alone.
    folders = ("model", "optimizer", "zero")
    tensors = [each for each in manifest.files if each.path.partition("/")[0] in folders]
    assert len(tensors) > 1
    return {each.path: each.digest for each in tensors}


@pytest.mark.quick("python")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_ranks_save_and_end_with_a_killed_supervisor(tmp_path: Path, name: str) -> None:
    killed, whole, log = tmp_path / "killed" / "run", tmp_path / "whole" / "run", tmp_path / "log"
    with log.open("wb") as file:
        command = supervised(name, killed)
        supervisor = subprocess.Popen(command, stderr=file, stdout=file)
        try:
            wait_while(lambda: supervisor.poll() is None and not list(killed.glob("step-*")))
            started = processes_of_run(killed)
            supervisor.kill()
            assert supervisor.wait() == -signal.SIGKILL, log.read_text()[-3000:]
            wait_while(lambda: processes_of_run(killed))
        finally:
            for process in processes_of_run(killed):
                process.kill()
    text = log.read_text()
    assert len(started) > 2, "the supervisor, its watcher and the ranks"
    wait_while(lambda: list(killed.parent.iterdir()) != [killed])
    assert "SIGTERM" in text, text[-3000:]
    (newest, *_) = Store(killed).step_names()
    done = subprocess.run(supervised(name, killed), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resuming at step {newest.step} from" in done.stderr
    subprocess.run(supervised(name, whole), check=True, capture_output=True)
    assert contents(killed) == contents(whole)
