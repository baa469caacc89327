"""Killed and resumed trainings on file systems that are not a local disk.

Each launch has a mount of its own, so that nothing is read from a cache of the one before.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import network_training
import pytest
from faults_trials import Trial, Trials
from small_volumes import fuse, mounted

from resumekit.storage.directories import StepName
from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer

PRELOAD = (*DEFAULT_PRELOAD, "resumekit.adapters.torch")
MOUNT = Path(__file__).with_name("copying_mount.py")
CACHED_SECONDS = 2.0  # of a network file system
# After a step, and at calls of the save of step 6 and of the deletion of step 3.
KILLS: list[dict[str, Any]] = [
    {"kill": "step:4"},
    {"failpoints": "30=kill"},
    {"failpoints": "55=kill"},
    {"failpoints": "75=kill"},
]

Mounting = Callable[[], AbstractContextManager[object]]


@pytest.fixture
def trials(tmp_path: Path, server: ForkServer) -> Trials:
    return Trials(tmp_path, server)


def check_killed_and_resumed(
    trial: Trial, reference: Path, mount: Mounting, **options: Any
) -> None:
    """Kills a training several times; the last launch ends as if undisturbed."""
    for kill in KILLS:
        with mount():
            ended = trial.launch(**kill, **options)
        assert ended.was_killed, ended.output
    with mount():
        newest = trial.newest_complete()
        assert newest is not None
        ended = trial.launch(**options)
        assert ended.succeeded, ended.output
        assert trial.newest_complete() == StepName(7)
        assert [path.name for path in trial.run.glob("step-*")] == ["step-00000007"]
        assert not (trial.run / "quarantine").exists()
    verdict = trial.judge(reference)
    assert verdict.exact, verdict
    assert verdict.resumes[-1].step == newest.step


# ---------------------------------------------------------------- overlay


class Layers:
    """An overlay whose every mount finds what was written before in read-only lower layers.

    Args:
        folder: for the layers.
        path: where it is mounted.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path
        self._lower = [folder / "empty"]
        self._lower[0].mkdir(parents=True)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """The overlay, with a new upper layer."""
        number = len(self._lower)
        upper, work = self._folder / f"upper-{number}", self._folder / f"work-{number}"
        upper.mkdir()
        work.mkdir()
        lower = ":".join(map(str, self._lower))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        with mounted(self._path, "-t", "overlay", "-o", options, "overlay"):
            yield
        self._lower.insert(0, upper)


def test_a_killed_training_continues_on_an_overlay(trials: Trials, tmp_path: Path) -> None:
    trial = trials.fresh()
    layers = Layers(tmp_path / "layers", trial.run)
    check_killed_and_resumed(trial, trials.reference, layers.mounted)


# ---------------------------------------------------------------- s3fs


@pytest.fixture
def s3_port() -> Iterator[int]:
    """The port of an S3 server with a bucket; s3fs needs one that keeps keys such as ``a/``."""
    folders = (str(Path(sys.executable).parent), os.environ["PATH"])
    program = shutil.which("moto_server", path=os.pathsep.join(folders))
    if program is None:
        pytest.skip("needs moto_server: pip install moto[s3] flask flask-cors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with suppress(URLError):
                    urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT"))
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.kill()


@pytest.mark.full
def test_a_killed_training_continues_on_a_mounted_bucket(
    trials: Trials, tmp_path: Path, s3_port: int
) -> None:
    program = shutil.which("s3fs")
    if program is None:
        pytest.skip("needs the program s3fs")
    password = tmp_path / "password"
    password.write_text("user:a-secret-of-the-tests\n")
    password.chmod(0o600)
    options = f"passwd_file={password},url=http://127.0.0.1:{s3_port},use_path_request_style"
    trial = trials.fresh()
    command = [program, "bucket", str(trial.run), "-f", "-o", f"{options},retries=1"]
    check_killed_and_resumed(trial, trials.reference, lambda: fuse(trial.run, *command))


# ---------------------------------------------------------------- a network file system


class OnTwoNodes(Trial):
    """Two ranks, each with a mount of its own and what it has cached."""

    def run_of(self, rank: int) -> Path:
        """The run directory, as the node of a rank names it."""
        return self.run.with_name(f"run-{rank}") if rank else self.run

    def mounted(self) -> AbstractContextManager[object]:
        """The run directory on both nodes."""
        root = self.run.with_name("root")
        root.mkdir(exist_ok=True)
        with ExitStack() as stack:
            for rank in range(2):
                path = self.run_of(rank)
                command = (
                    sys.executable,
                    str(MOUNT),
                    str(root),
                    str(path),
                    "network",
                    str(CACHED_SECONDS),
                )
                stack.enter_context(fuse(path, *command))
            return stack.pop_all()


class Renaming(OnTwoNodes):
    """The same, on a file system that is known to rename a directory as a whole."""

    training = staticmethod(network_training.launch)


def is_stale(path: Path) -> bool:
    """Whether a file cannot be read once it is open."""
    try:
        path.read_text()
    except OSError as error:
        return error.errno == errno.ESTALE
    return False


def test_the_two_nodes_see_what_a_network_file_system_shows(
    tmp_path: Path, server: ForkServer
) -> None:
    """The control: the mounts are stale, cached and late."""
    pytest.importorskip("mfusepy", reason="needs mfusepy")
    nodes = OnTwoNodes(server, tmp_path / "trial")
    with nodes.mounted():
        first, second = (nodes.run_of(rank) / "file" for rank in range(2))
        assert not second.exists()
        with first.open("w") as file:
            file.write("content")
            file.flush()
            assert nodes.run.with_name("root").joinpath("file").read_text() == ""
        assert nodes.run.with_name("root").joinpath("file").read_text() == "content"
        assert not second.exists()
        time.sleep(CACHED_SECONDS + 1)
        assert second.exists()
        assert [is_stale(first) for _ in range(6)] == [False, False, True] * 2
        with first.open():
            first.unlink()
            assert [path.name[:12] for path in nodes.run.iterdir()] == [".fuse_hidden"]


@pytest.mark.full
@pytest.mark.parametrize("kind", [OnTwoNodes, Renaming], ids=["manifest", "rename"])
def test_a_killed_training_continues_on_a_network_file_system(
    kind: type[OnTwoNodes], tmp_path: Path, server: ForkServer
) -> None:
    pytest.importorskip("mfusepy", reason="needs mfusepy")
    reference = Trials(tmp_path, server, world_size=2).reference
    trial = kind(server, tmp_path / "trial")
    check_killed_and_resumed(trial, reference, trial.mounted, world_size=2)


@pytest.mark.full
@pytest.mark.parametrize("kind", [OnTwoNodes, Renaming], ids=["manifest", "rename"])
def test_a_checkpoint_that_another_program_reads_is_removed_by_the_next_launch(
    kind: type[OnTwoNodes], tmp_path: Path, server: ForkServer
) -> None:
    pytest.importorskip("mfusepy", reason="needs mfusepy")
    trial = kind(server, tmp_path / "trial")
    with trial.mounted():
        ended = trial.launch(kill="step:4", world_size=2)
        assert ended.was_killed, ended.output
        with (trial.run / "step-00000003" / "model" / "rank-00000.safetensors").open("rb"):
            ended = trial.launch(world_size=2)
            assert ended.succeeded, ended.output
            assert list(trial.run.rglob(".fuse_hidden*"))
        ended = trial.launch(world_size=2)
        assert ended.succeeded, ended.output
        names = [path.name for path in trial.run.glob("step-*")]
        assert (names, [*(trial.run / ".staging").iterdir()]) == (["step-00000007"], [])
