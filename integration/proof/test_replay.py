"""Random steps of runs under each adapter, replayed by the command as a user types it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from resumekit.cli import main
from resumekit.storage.store import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"
SAVE_EVERY = 10  # of all these scripts
ADAPTERS = ("torch", "accelerate", "lightning", "transformers", "deepspeed")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def replay(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and messages of the command, in the working directory."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["replay", *words])
    assert isinstance(ended.value.code, int)
    return (ended.value.code, *capfd.readouterr())


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def trained(
    directory: Path, name: str, *launcher: str, edits: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """The command of a run that kept all checkpoints, in the directory ``run``."""
    text = (SCRIPTS / f"train_{name}.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    kept = "directory=arguments.directory, keep_latest=None"
    text = re.sub(r"(?<!=)arguments\.directory", kept, text)
    (directory / "train.py").write_text(text)
    command = [sys.executable, *launcher, "train.py", "--directory", "run", "--epochs", "2"]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    return command


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def replay_random_steps(
    command: list[str], num_ranges: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Replays random ranges of steps; all are equal, and no file changes."""
    seed = int.from_bytes(os.urandom(4), "big")
    draw, kept = random.Random(seed), sorted(name.step for name in Store(Path("run")).step_names())
    before = content(Path.cwd())
    for _ in range(num_ranges):
        first = draw.randrange(kept[0], kept[-1])
        num_steps = draw.randrange(1, min(20, kept[-1] - first) + 1)
        words = ["run", "--from", str(first), "--steps", str(num_steps), "--", *command]
        code, out, err = replay(capfd, *words)
        total = first + num_steps - max(step for step in kept if step <= first)
        assert code == 0, (seed, first, num_steps, out, err)
        assert re.search(rf"^{total} steps? replayed, identical", out, re.M), out
        assert content(Path.cwd()) == before


@pytest.mark.full
@pytest.mark.parametrize("name", ADAPTERS)
def test_random_steps_are_identical_to_the_journal(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name)
    replay_random_steps(trained(tmp_path, name), 20, capfd)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "deepspeed"])
def test_random_steps_on_two_ranks(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed" if name == "deepspeed" else "torch")
    replay_random_steps(trained(tmp_path, name, *TWO_RANKS), 4, capfd)


@pytest.mark.full
@pytest.mark.parametrize("name", [*ADAPTERS, "ddp", "deepspeed on 2 ranks"])
def test_without_the_optimizer_a_replay_takes_other_steps(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = name.split()[0]
    pytest.importorskip("torch" if script == "ddp" else script)
    command = trained(tmp_path, script, *(() if name in ADAPTERS else TWO_RANKS))
    monkeypatch.setenv("RESUMEKIT_INJECT", "optimizer")
    code, out, _ = replay(capfd, "run", "--from", str(SAVE_EVERY), "--steps", "4", "--", *command)
    assert code == 1
    first = r"different from (rank 0, )?step 1[12]: (loss|learning rate|weights)"
    assert re.search(first, out), out


@pytest.mark.full
def test_a_logger_that_replaces_its_files_leaves_them_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """lightning 2.6 fabric/loggers/csv_logs.py removes the metrics of an earlier version 0."""
    pytest.importorskip("lightning")
    logger = "lightning.pytorch.loggers.CSVLogger('logs', version=0, flush_logs_every_n_steps=1)"
    loss = "nn.functional.cross_entropy(self.layers(inputs), targets)"
    logging = f"loss = {loss}\n        self.log('loss', loss)\n        return loss"
    edits = [
        ("logger=False", f"logger={logger}, log_every_n_steps=1"),
        (f"return {loss}", logging),
    ]
    command = trained(tmp_path, "lightning", edits=edits)
    before = content(tmp_path)
    (metrics,) = tmp_path.glob("logs/*/*/metrics.csv")
    assert replay(capfd, "run", "--from", "20", "--steps", "5", "--", *command)[0] == 0
    assert content(tmp_path) == before
    subprocess.run([*command, "--directory", "other"], check=True)
    assert content(tmp_path)[str(metrics)] != before[str(metrics)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests to a Hub on this machine, which has room for one repository and no file."""
    requests: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps({"url": f"{endpoint}/user/run"}).encode()
            self.send_response(200 if self.path == "/api/repos/create" else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield requests
        server.shutdown()
        thread.join()


@pytest.mark.full
def test_a_trainer_that_pushes_to_the_hub_pushes_nothing(
    tmp_path: Path, hub: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pushing = "report_to='none', push_to_hub=True, hub_token='token'"
    command = trained(tmp_path, "transformers", edits=[('report_to="none"', pushing)])
    assert "/api/repos/create" in hub
    assert any("/user/run/" in path for path in hub)
    hub.clear()
    code, out, err = replay(capfd, "run", "--from", "20", "--steps", "10", "--", *command)
    assert code == 0, err
    assert "10 steps replayed, identical" in out
    assert "changed since the run" not in out
    assert "WARNING: run/checkpoint" not in err
    assert hub == []
