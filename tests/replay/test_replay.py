"""``resumekit replay``: equal steps, the first that differs, and files that stay as they are."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from resumekit.cli import main
from resumekit.launcher.processes import handled_signals, is_running, kill_processes
from resumekit.replay.isolation import Isolation, outermost
from resumekit.replay.mounts import NOT_POSSIBLE

NUM_STEPS = 64
SAVED = (10, 20, 30, 40, 50, 60, 64)

MODEL = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.layers(inputs)
"""

SCRIPT = """
from pathlib import Path

import torch
from model import Model
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

torch.manual_seed(0)
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
with Checkpointer(
    "runs/a", model=model, optimizer=optimizer, save_every=10, keep_latest=None
) as checkpointer:
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    for (batch,) in checkpointer.batches(loader, epochs=4):
        loss = (model(batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(loss=loss)
        step = checkpointer.progress.step
        Path("best.pt").write_text(f"weights of step {step}")
        with Path("runs/tracker.csv").open("a") as file:
            file.write(f"{step},{batch.max().item()}\\n")
        print("done", step)
"""


class Outcome(NamedTuple):
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str


def content(directory: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of each file."""
    return {
        str(path.relative_to(directory)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


class Job:
    """A directory with scripts and a finished run.

    Args:
        directory: of the scripts.
        monkeypatch: enters it.
        capfd: reads what the command prints.
    """

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.directory = directory
        self._capfd = capfd
        monkeypatch.chdir(directory)

    def replay(self, *options: object, script: str = "train.py") -> Outcome:
        """Runs the command; no file of the job may change.

        Args:
            *options: of it.
            script: and its arguments.
        """
        before = content(self.directory)
        command = [sys.executable, *shlex.split(script)]
        words = ["replay", "runs/a", *map(str, options), "--", *command]
        with pytest.raises(SystemExit) as ended:
            main(words)
        after = content(self.directory)
        assert {path: after[path] for path in before} == before
        assert all(path.startswith("kept") for path in after.keys() - before.keys())
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, *self._capfd.readouterr())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a script, its model, and the finished run."""
    directory = tmp_path_factory.mktemp("job")
    (directory / "train.py").write_text(SCRIPT)
    (directory / "model.py").write_text(MODEL)
    subprocess.run([sys.executable, "train.py"], cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture
def job(trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Job:
    """The same, entered."""
    return Job(trained, monkeypatch, capfd)


def test_random_steps_are_identical_to_the_journal(job: Job) -> None:
    first = random.Random(os.urandom(8)).randrange(10, 50)
    num_steps = random.Random(first).randrange(1, 14)
    begin = max(step for step in SAVED if step <= first)
    found = job.replay("--from", first, "--steps", num_steps)
    total = first + num_steps - begin
    assert found.code == 0, (first, num_steps, found)
    assert f"{total} step{'s' if total > 1 else ''} replayed, identical" in found.out
    assert f"from step-{begin:08d}, overlay over the files" in found.err
    printed = [line for line in found.out.splitlines() if line.startswith("done")]
    assert printed == [f"done {step}" for step in range(begin + 1, first + num_steps + 1)]
    for step in SAVED:
        was_compared = f"step-{step:08d}: " in found.out
        assert was_compared == (first < step <= first + num_steps)


def clamped_model(directory: Path, limit: float) -> None:
    """Edits the model: its inputs have this upper limit."""
    changed = MODEL.replace("self.layers(inputs)", f"self.layers(inputs.clamp(max={limit}))")
    (directory / "model.py").write_text(changed)


def first_step_above(directory: Path, after: int) -> tuple[int, float]:
    """The last step whose batch has a larger input than all before it, and a limit between."""
    lines = (directory / "runs" / "tracker.csv").read_text().splitlines()
    maxima = {int(step): float(value) for step, value in (line.split(",") for line in lines)}
    found, largest = (0, 0.0), maxima[after + 1]
    for step in range(after + 2, NUM_STEPS + 1):
        if maxima[step] > largest:
            found, largest = (step, (largest + maxima[step]) / 2), maxima[step]
    return found


@pytest.fixture
def copied(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Job:
    """A copy of the job, to edit."""
    shutil.copytree(trained, tmp_path / "job")
    return Job(tmp_path / "job", monkeypatch, capfd)


def test_a_changed_line_of_the_model_is_found_at_the_first_step_that_it_affects(
    copied: Job, tmp_path: Path
) -> None:
    step, limit = first_step_above(copied.directory, 20)
    assert step > 21
    clamped_model(copied.directory, limit)
    page, plain = tmp_path / "replay.html", tmp_path / "replay.json"
    found = copied.replay("--from", 20, "--until-differs", "--html", page, "--json", plain)
    assert found.code == 1
    assert f"{step - 20} steps replayed, different from step {step}: loss" in found.out
    assert "changed since the run: source of model.py" in found.out
    assert "did not save there" not in found.out
    assert f"done {step}\n" in found.out
    assert f"done {step + 1}\n" not in found.out
    result = json.loads(plain.read_text())
    assert (result["is_equal"], result["first_step"]) == (False, 21)
    assert result["ranks"][0]["difference"]["step"] == step
    assert result["ranks"][0]["fields"]["loss"] == step - 20
    text = page.read_text()
    for part in (
        f"<title>first difference at step {step}</title>",
        "<title>begins from step 20</title>",
        "loss: a change since the run",
        "source of model.py",
    ):
        assert part in text, part


@pytest.mark.full
def test_a_changed_line_without_an_effect_is_listed_and_nothing_differs(copied: Job) -> None:
    clamped_model(copied.directory, 99.0)
    found = copied.replay("--from", 20, "--until-differs")
    assert found.code == 0
    assert "44 steps replayed, identical" in found.out
    assert "changed since the run: source of model.py" in found.out


def losses_in(page: str) -> list[dict[int, float]]:
    """The losses of the run and of the replay by step, as a page draws them."""
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page)[0])
    return [dict(map(tuple, line["points"])) for line in data["lines"]]


def test_the_page_of_an_identical_replay_lists_its_checkpoints(job: Job, tmp_path: Path) -> None:
    page = tmp_path / "replay.html"
    assert job.replay("--from", 30, "--steps", 10, "--html", page).code == 0
    text = page.read_text()
    assert '<div class="verdict good"><strong>10 steps replayed, identical</strong>' in text
    assert re.search(r"<title>step-00000040: \d+ tensors and \d+ other values equal", text)
    assert "First differences" not in text
    run, replayed = losses_in(text)
    assert sorted(replayed) == list(range(31, 41))
    assert sorted(run) == list(range(21, 51))
    assert replayed == {step: run[step] for step in replayed}


@pytest.mark.parametrize("option", ["--html", "--json"])
@pytest.mark.parametrize("file", ["runs/a/file", "nowhere/file"])
def test_a_file_that_cannot_be_written_is_refused_before_the_replay(
    job: Job, option: str, file: str
) -> None:
    found = job.replay("--from", 20, option, file)
    assert (found.code, found.out) == (2, "")
    assert file in found.err


def test_a_command_that_fails_is_no_verdict(job: Job, trained: Path) -> None:
    stop = 'print("done", step)\n        assert step < 23'
    (trained / "fails.py").write_text(SCRIPT.replace('print("done", step)', stop))
    found = job.replay("--from", 20, script="fails.py")
    assert (found.code, found.out.splitlines()[-1]) == (2, "done 23")
    assert "fails.py: ended with exit status 1 after step 23." in found.err


def test_steps_that_the_command_has_not_done_are_not_compared(job: Job, tmp_path: Path) -> None:
    stop = 'print("done", step)\n        if step == 23:\n            break'
    (job.directory / "ends.py").write_text(SCRIPT.replace('print("done", step)', stop))
    plain = tmp_path / "replay.json"
    found = job.replay("--from", 20, "--steps", 5, "--json", plain, script="ends.py")
    assert (found.code, "3 steps replayed, the other 2 not compared" in found.out) == (1, True), (
        found
    )
    assert "the command ended after 3 of 5 steps" in found.out
    assert not json.loads(plain.read_text())["is_equal"]


@pytest.mark.parametrize(("step", "num_steps"), [(22, 5), (33, 15)])  # before and after a save
def test_a_command_that_restarts_itself_is_compared_up_to_its_end(
    copied: Job, step: int, num_steps: int
) -> None:
    death = f"""
        if step == {step} and not Path("died").exists():
            Path("died").touch()
            os._exit(1)"""
    dies = SCRIPT.replace('print("done", step)', f'print("done", step, flush=True){death}')
    (copied.directory / "train.py").write_text(f"import os{dies}")
    launch = 'subprocess.call([sys.executable, "train.py"])'
    (copied.directory / "twice.py").write_text(
        f"import subprocess, sys\nsys.exit({launch} and {launch})"
    )
    found = copied.replay("--from", 20, "--steps", num_steps, script="twice.py")
    assert found.out.count(f"done {step}\n") == 2
    assert (found.code, f"{num_steps} steps replayed, identical" in found.out) == (0, True), found
    assert f"sample ids ({num_steps})" in found.out
    assert ("step-00000030: " in found.out) == (num_steps > 10)
    assert "ended after" not in found.out


def test_a_command_that_trains_another_run_is_no_verdict(job: Job) -> None:
    (job.directory / "other.py").write_text("print('nothing')")
    found = job.replay("--from", 20, script="other.py")
    assert found.code == 2
    assert "other.py: took no step of this run" in found.err


def test_without_the_random_state_a_replay_differs(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMEKIT_INJECT", "rng")
    page = tmp_path / "replay.html"
    found = job.replay("--from", 20, "--steps", 4, "--html", page)
    assert found.code == 1
    assert "4 steps replayed, different from step 21: " in found.out
    run, replayed = losses_in(page.read_text())
    assert sorted(run) == list(range(11, 35))
    assert sorted(replayed) == [21, 22, 23, 24]


@pytest.mark.parametrize(
    ("number", "trap"), [(signal.SIGTERM, "true"), (signal.SIGHUP, "trap '' HUP")]
)
def test_a_signal_ends_the_command_and_leaves_nothing(
    job: Job, tmp_path: Path, number: int, trap: str
) -> None:
    waits = f"{trap}; sleep 300 & echo $!; wait"
    replay = ("replay", "runs/a", "--from", "20", "--", "sh", "-c", waits)
    with handled_signals(signal.SIG_DFL, number):  # ignored where the tests run under nohup
        process = subprocess.Popen(
            [sys.executable, "-m", "resumekit.cli", *replay],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    with process.stdout as output:
        child = int(output.readline())
        process.send_signal(number)
        try:
            assert process.wait(60) == 128 + number
            assert not is_running(child)
        finally:
            kill_processes(child)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that finished at step 32, and was continued to step 64 then."""
    directory = tmp_path_factory.mktemp("extended")
    text = SCRIPT.replace("epochs=4", "epochs=int(sys.argv[1])").replace(
        "import torch", "import sys\n\nimport torch", 1
    )
    text = text.replace("keep_latest=None", "keep_latest=None, allow_changes={'horizon'}")
    (directory / "train.py").write_text(text)
    (directory / "model.py").write_text(MODEL)
    for epochs in ("2", "4"):
        words = [sys.executable, "train.py", epochs]
        subprocess.run(words, cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture
def extended_job(
    extended: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Job:
    """The same, entered."""
    return Job(extended, monkeypatch, capfd)


def test_a_replay_up_to_the_end_of_the_first_part_of_an_extended_run(extended_job: Job) -> None:
    found = extended_job.replay("--from", 30, "--steps", 2, script="train.py 4")
    assert "replaying steps 31 to 32 of" in found.err
    assert [line for line in found.out.splitlines() if "done" in line] == ["done 31", "done 32"]
    assert "2 steps replayed, " in found.out


def test_the_length_of_the_run_is_no_difference(extended_job: Job) -> None:
    found = extended_job.replay("--from", 20, "--steps", 12, script="train.py 4")
    assert (found.code, "12 steps replayed, identical" in found.out) == (0, True), found.out
    for step in (30, 32):  # of which the run has finished at one
        assert re.search(rf"step-{step:08d}: .* values equal; progress not compared", found.out)


def test_a_command_that_has_nothing_left_to_do_is_no_verdict(extended_job: Job) -> None:
    found = extended_job.replay("--from", 40, script="train.py 2")
    assert found.code == 2
    assert "train.py 2: took no step of this run" in found.err
    assert "the arguments that the run was started with" in found.err


@pytest.mark.full
def test_the_last_steps_of_a_finished_run(job: Job) -> None:
    found = job.replay("--from", 60, "--keep", "kept")
    assert found.code == 0
    assert "4 steps replayed, identical" in found.out
    assert "step-00000064: 17 tensors and" in found.out


def test_a_step_before_the_first_checkpoint_is_refused(job: Job) -> None:
    found = job.replay("--from", 9)
    assert found.code == 2
    assert "no checkpoint at or before step 9, expected --from 10 or more" in found.err


def test_where_no_overlay_is_possible_the_command_does_not_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(job.directory / "runs" / "a")
    monkeypatch.chdir("/")  # /proc is mounted below it
    with pytest.raises(SystemExit) as ended:
        main(["replay", run, "--from", "10", "--", sys.executable, "no.py"])
    assert ended.value.code == 2
    assert "Pass --allow-writes" in capfd.readouterr().err


def test_the_limit_that_switches_user_namespaces_off_is_named(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv takes a privilege away")
    words = Isolation((tmp_path,), tmp_path / "layers", tmp_path).command(())
    switch_off = "echo 0 > /proc/sys/user/max_user_namespaces"
    script = f"{switch_off} && setpriv --bounding-set=-sys_admin {shlex.join(words)}"
    found = subprocess.run(
        ["unshare", "--map-root-user", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in found.stderr:
        pytest.skip("no user namespaces")
    limit = "no user namespace: the limit user.max_user_namespaces is reached\n"
    assert (found.returncode, found.stderr) == (NOT_POSSIBLE, limit)


def test_without_an_overlay_the_files_that_were_written_are_listed(
    trained: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job"
    shutil.copytree(trained, job)
    (job / "mounted").mkdir()
    words = [
        *(sys.executable, "-m", "resumekit.cli", "replay", "runs/a", "--from", "20"),
        *("--steps", "2", "--allow-writes", "--", sys.executable, "train.py"),
    ]
    mounted = f"mount -t tmpfs none mounted && {shlex.join(words)}"
    found = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted],
        cwd=job,
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in found.stderr:
        pytest.skip("no user namespaces")
    assert found.returncode == 0, found
    assert "2 steps replayed, identical" in found.stdout
    written = f"{job}/best.pt, {job}/runs/tracker.csv"
    assert f"written in the working and the run directory: {written}\n" in found.stdout
    assert "no overlay" in found.stderr


@pytest.mark.parametrize("may_mount", [True, False])
def test_an_overlay_keeps_files_as_they_are(may_mount: bool, tmp_path: Path) -> None:
    drop = [] if may_mount else ["setpriv", "--bounding-set=-sys_admin"]
    if drop and (os.getuid() or shutil.which("setpriv") is None):
        pytest.skip("only root has this privilege, and setpriv takes it away")
    directory, layers = tmp_path / "a,b:c", tmp_path / "layers"
    visible = directory / "in"
    for each in (directory, layers, visible):
        each.mkdir()
    (directory / "file").write_text("before")
    isolation = Isolation(outermost([directory, visible]), layers, visible)
    words = isolation.command(["sh", "-c", "echo after > file && cat file && echo new > in/new"])
    found = subprocess.run(
        [*drop, *words], cwd=directory, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "after\n", "")
    assert (directory / "file").read_text() == "before"
    assert (visible / "new").read_text() == "new\n"
