"""Scripts that know nothing of resumekit train with an attached callback, and resume exactly.

They are compared by the files that they write themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from official_scripts import (
    ACCELERATE,
    LIGHTNING,
    MODULE,
    TORCHRUN,
    TRAINER,
    output_of,
    results_of,
)
from stock_cases import OFFICIAL

from resumekit.attach import AttachSettings, attached_environment, run_directories
from resumekit.storage.store import Store

SAVE_EVERY, KILL_AT_READ = 5, 8 * 13 + 1  # batches of 8: steps 1 to 13 were trained


class Job:
    """A script, launched again and again with the same files.

    Args:
        directory: of all its files.
        script: its name.
        *options: of the script.
        attached: whether callbacks are attached.
        kill_at_read: the read of the data that kills the first launch.
    """

    def __init__(
        self,
        directory: Path,
        script: str,
        *options: str,
        attached: bool = True,
        kill_at_read: int | None = None,
    ) -> None:
        self.out, self.run = directory / "out", directory / "run"
        self.private = directory / "launcher"
        self._command = [str(OFFICIAL / script), "--output_dir", str(self.out), *options]
        self._attached = attached
        self._kill = {}
        if kill_at_read is not None:
            self._kill = {"KILL_AT_READ": str(kill_at_read), "KILL_ONCE": str(directory / "killed")}

    def supervise(self, *launcher: str, expected: int = 0) -> str:
        """What ``resumekit run`` and all its launches write."""
        return self._output(self.supervised(*launcher), os.environ, expected)

    def supervised(self, *launcher: str) -> list[str]:
        """The command of ``resumekit run``."""
        words = [*("run", "--dir", str(self.run), "--save-every", str(SAVE_EVERY)), "--"]
        command = [*(launcher or [sys.executable]), *self._command]
        return [*MODULE, "resumekit.cli", *words, *command]

    def launch(
        self, *options: str, launcher: Sequence[str] = (), expected: int = 0, **variables: str
    ) -> str:
        """What one launch writes, after it has ended with this status."""
        environment: Mapping[str, str] = {**os.environ, **variables}
        if self._attached:
            settings = AttachSettings(str(self.run), SAVE_EVERY)
            environment = attached_environment(environment, self.private, settings)
        command = [*(launcher or [sys.executable]), *self._command, *options]
        return self._output(command, environment, expected)

    def _output(self, command: Sequence[str], environment: Mapping[str, str], expected: int) -> str:
        return output_of(command, {**environment, **self._kill}, expected)

    def results(self) -> dict[str, Any]:
        """Losses and weights, from the script's files."""
        return results_of(self.out)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of a script without resumekit, by its name and launcher; each is run once."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def results_of(script: str, *launcher: str) -> dict[str, Any]:
        key = (script, *launcher)
        if key not in known:
            job = Job(tmp_path_factory.mktemp("alone"), script, attached=False)
            job.launch(launcher=launcher)
            known[key] = job.results()
        return known[key]

    return results_of


@pytest.mark.parametrize("script", [pytest.param(TRAINER, marks=pytest.mark.full), LIGHTNING])
def test_an_unchanged_script_is_restarted_and_resumes_exactly(
    tmp_path: Path, uninterrupted: Any, script: str
) -> None:
    job = Job(tmp_path, script, kill_at_read=KILL_AT_READ)
    output = job.supervise()
    assert "newest checkpoint: step 10: restart 1 of 3 in 1 s" in output
    assert "(step 10) is not read" in output  # both have saved step 10
    assert "resuming at step 10 from" in output
    found, expected = job.results(), uninterrupted(script)
    assert len(expected["losses"]) == 20
    assert found == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [(TORCHRUN, 2), (ACCELERATE, 1)], ids=["torchrun", "accelerate"]
)
def test_the_ranks_of_a_launcher_are_restarted_and_resume_exactly(
    tmp_path: Path, uninterrupted: Any, launcher: Sequence[str], num_ranks: int
) -> None:
    job = Job(tmp_path, TRAINER, kill_at_read=KILL_AT_READ // num_ranks)
    output = job.supervise(*launcher)
    assert output.count("resuming at step 10 from") == 1
    assert job.results() == uninterrupted(TRAINER, *launcher)


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher", [(), TORCHRUN, ACCELERATE], ids=["python", "torchrun", "accelerate"]
)
def test_a_signal_lets_the_script_save_and_leave(
    tmp_path: Path, uninterrupted: Any, launcher: Sequence[str]
) -> None:
    job = Job(tmp_path, TRAINER)
    environment = {**os.environ, "READ_SECONDS": "0.05"}
    process = subprocess.Popen(
        job.supervised(*launcher), env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not list(job.run.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, output = process.communicate(timeout=300)
    assert process.returncode != 0, output[-3000:]
    assert "SIGUSR1 was forwarded" in output
    (newest, *_) = Store(job.run).step_names()
    assert newest.step % SAVE_EVERY, "it has saved after the signal"
    assert f"resuming at step {newest.step} from" in job.supervise(*launcher)
    assert job.results() == uninterrupted(TRAINER, *launcher)


@pytest.mark.full
@pytest.mark.parametrize("script", [TRAINER, LIGHTNING])
def test_without_a_callback_the_same_kill_changes_the_results(
    tmp_path: Path, uninterrupted: Any, script: str
) -> None:
    job = Job(tmp_path, script, attached=False, kill_at_read=KILL_AT_READ)
    job.launch(expected=-signal.SIGKILL)
    job.launch()
    assert job.results().keys() == uninterrupted(script).keys()
    assert job.results() != uninterrupted(script)


@pytest.mark.full
def test_both_packages_of_lightning_are_attached(tmp_path: Path, uninterrupted: Any) -> None:
    package = ("--package", "pytorch_lightning")
    job = Job(tmp_path, LIGHTNING, *package, kill_at_read=KILL_AT_READ)
    job.launch(expected=-signal.SIGKILL)
    assert "resuming at step 10 from" in job.launch()
    assert job.results() == uninterrupted(LIGHTNING)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "option"), [(TRAINER, "--only_evaluate"), (LIGHTNING, "--only_validate")]
)
def test_a_trainer_that_only_evaluates_gets_no_directory(
    tmp_path: Path, script: str, option: str
) -> None:
    job = Job(tmp_path, script, option)
    job.launch()
    assert not job.run.exists()
    assert run_directories(job.private) == set()


@pytest.mark.full
def test_the_second_trainer_of_a_process_has_a_directory_in_that_of_the_first(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, TRAINER, "--second_training")
    output = job.launch()
    assert run_directories(job.private) == {job.run, job.run / "trainer-2"}
    assert [Store(each).step_names()[0].step for each in (job.run, job.run / "trainer-2")] == [
        20,
        20,
    ]
    assert "not those of a run" not in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "argument", "name"),
    [
        (TRAINER, "--resume_from_checkpoint", "checkpoint-20"),
        (LIGHTNING, "--ckpt_path", "own/last.ckpt"),
    ],
)
def test_a_checkpoint_of_another_run_stops_it_unless_ours_is_as_far(
    tmp_path: Path, script: str, argument: str, name: str
) -> None:
    other = Job(tmp_path / "other", script, attached=False)
    other.launch()
    job = Job(tmp_path / "job", script)
    output = job.launch(argument, str(other.out / name), expected=2)
    assert "at step 20" in output.splitlines()[-1]
    assert "empty: step 0" in output.splitlines()[-1]
    assert "Traceback" not in output
    job.launch()
    assert "(step 20) is not read" in job.launch(argument, str(other.out / name))


# The process is killed when the script has saved step 10, before the callback has recorded it.
DYING = """
import os, signal, sys
from pathlib import Path
from {package} import Trainer
sys.path.insert(0, {folder!r})
marker, save = Path({marker!r}), Trainer.{method}
def save_and_die(self, *given, **named):
    save(self, *given, **named)
    if {is_due} and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
Trainer.{method} = save_and_die
exec(compile(Path({script!r}).read_text(), {script!r}, "exec"))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "package", "method", "is_due", "saved"),
    [
        (
            *(LIGHTNING, "lightning.pytorch", "save_checkpoint"),
            *("self.global_step == 10 and Path(given[0]).stem == 'last'", "last.ckpt"),
        ),
        (
            *(TRAINER, "transformers", "_save_checkpoint"),
            *("self.state.global_step == 10", "checkpoint-10"),
        ),
    ],
    ids=["lightning", "trainer"],
)
def test_a_checkpoint_of_the_step_that_a_kill_interrupts_is_of_this_run(
    tmp_path: Path,
    uninterrupted: Any,
    name: str,
    package: str,
    method: str,
    is_due: str,
    saved: str,
) -> None:
    script, marker = tmp_path / "train.py", tmp_path / "killed"
    paths = {"folder": OFFICIAL, "marker": marker, "script": OFFICIAL / name}
    words = {"package": package, "method": method, "is_due": is_due}
    script.write_text(DYING.format(**words, **{key: str(path) for key, path in paths.items()}))
    job = Job(tmp_path, str(script))
    output = job.supervise()
    assert marker.exists()
    assert f"{saved} (step 10) is not read" in output
    assert "resuming at step 5 from" in output
    assert job.results() == uninterrupted(name)


@pytest.mark.full
def test_the_steps_of_two_optimizers_are_not_taken_for_steps_of_the_run(tmp_path: Path) -> None:
    script, directory = OFFICIAL / "lightning_gan.py", tmp_path / "of_script"
    settings = AttachSettings(str(tmp_path / "run"), SAVE_EVERY)
    for expected in ("starting in", "(step 20) is not read"):
        done = subprocess.run(
            [sys.executable, str(script), "--default_root_dir", str(directory)],
            env=attached_environment(os.environ, tmp_path / "launcher", settings),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert expected in done.stderr
    (newest, *_) = Store(tmp_path / "run").step_names()
    assert newest.step == 24


@pytest.mark.full
@pytest.mark.parametrize("name", ["train_transformers.py", "train_lightning.py"])
def test_a_script_with_a_callback_keeps_its_own(tmp_path: Path, name: str) -> None:
    script = OFFICIAL.parents[1] / "scripts" / name
    private, directory = tmp_path / "launcher", tmp_path / "of_script"
    settings = AttachSettings(str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, str(script), "--directory", str(directory), "--epochs", "1"],
        env=attached_environment(os.environ, private, settings),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("none is attached") == 1
    assert not (tmp_path / "run").exists()
    assert run_directories(private) == {directory}


@pytest.mark.full
def test_what_the_training_process_starts_is_left_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, TRAINER)
    job.launch(PYTHONRESUMEKIT_TRAINS="1")
    assert not job.run.exists()
