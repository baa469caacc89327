"""The commands that look at checkpoints: what they print, and that they change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import resumekit
from resumekit.cli import main
from resumekit.errors import ConfigurationError
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.store import Store

ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return run


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run with checkpoints at the steps 10, 20 and 30, the last one finished."""
    directory = tmp_path / "runs" / "a"
    store = Store(directory)
    store.acquire()
    for step in (10, 20, 30):
        _commit(store, step, finished="the horizon" if step == 30 else None)
    store.release()
    return directory


def _commit(store: Store, step: int, *, finished: str | None = None) -> None:
    name = store.next_name(step)
    staging = store.stage(name, num_bytes=100, num_files=2, directories=("model", "state"))
    entries = []
    for path, content in (("model/weights", b"w" * 1500), ("state/rank-00000.json", b"{}")):
        with staging.create(path, writer=0) as writer:
            writer.write([memoryview(content)])
            entries.append(writer.finish())
    component = ComponentRecord("model", "replicated", "exact", "", "model", (0,))
    lossy = ComponentRecord("data", "per_rank", "lost", "a shuffle buffer", "state", (0,))
    manifest = Manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        step=step,
        revision=name.revision,
        created="2026-01-31T12:00:00+00:00",
        world_size=1,
        progress={"step": step, "epoch": 1, "batch": step},
        finished=finished,
        metric={"name": "eval_loss", "mode": "min", "value": (0.25).hex()},
        components=(component, lossy),
        files=tuple(entries),
        capture={"ema": {"fidelity": None, "reason": "this run has none"}},
        fingerprint={"torch": "2.13.0"},
    )
    store.commit(staging, manifest)


def _flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _snapshot(directory: Path) -> dict[str, bytes]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_list_shows_the_newest_checkpoint_first(command: Command, run_directory: Path) -> None:
    code, out, _ = command("list", run_directory)
    rows = out.splitlines()[1:]
    assert code == 0
    assert [row.split()[0] for row in rows] == [f"step-000000{step}" for step in (30, 20, 10)]
    assert "finished (the horizon)" in rows[0]
    assert "eval_loss 0.25 (min)" in rows[0]


def test_list_shows_a_damaged_manifest_among_the_good_ones(
    command: Command, run_directory: Path
) -> None:
    _flip_byte(run_directory / "step-00000020" / "manifest.json")
    code, out, _ = command("list", run_directory)
    assert code == 1
    assert "DAMAGED" in next(line for line in out.splitlines() if "step-00000020" in line)
    assert out.count("DAMAGED") == 1


def test_list_as_json_is_read_back_by_a_program(command: Command, run_directory: Path) -> None:
    _, out, _ = command("list", "--json", run_directory)
    assert [row["step"] for row in json.loads(out)] == [30, 20, 10]


def test_inspect_shows_components_files_and_versions(command: Command, run_directory: Path) -> None:
    code, out, _ = command("inspect", run_directory / "step-00000010")
    assert code == 0
    for part in (
        "step-00000010",
        "epoch 1",
        "lost (a shuffle buffer)",
        "none (this run has none)",
        "model/weights",
        "1.5 KB",
        "2.13.0",
    ):
        assert part in out


def test_inspect_of_a_run_directory_shows_its_newest_readable_checkpoint(
    command: Command, run_directory: Path
) -> None:
    (run_directory / "step-00000030" / "model" / "weights").unlink()
    code, out, err = command("inspect", run_directory)
    assert code == 0
    assert "passed over: step-00000030/model/weights" in err
    assert "checkpoint  step-00000020" in out


def test_inspect_as_json_prints_the_manifest(command: Command, run_directory: Path) -> None:
    _, out, _ = command("inspect", "--json", run_directory / "step-00000010")
    manifest = run_directory / "step-00000010" / "manifest.json"
    assert json.loads(out) == json.loads(manifest.read_text(encoding="utf-8"))


def test_verify_reads_every_checkpoint_and_succeeds_when_all_are_whole(
    command: Command, run_directory: Path
) -> None:
    code, out, _ = command("verify", run_directory)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == ["ok", "ok", "ok"]


@pytest.mark.parametrize("path", ["model/weights", "state/rank-00000.json", "manifest.json"])
def test_verify_names_the_damaged_file_and_moves_nothing(
    command: Command, run_directory: Path, path: str
) -> None:
    _flip_byte(run_directory / "step-00000020" / path)
    before = _snapshot(run_directory)
    code, out, _ = command("verify", run_directory)
    assert code == 1
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert f"DAMAGED  step-00000020/{path}" in lines["step-00000020"]
    assert " ok " in lines["step-00000010"]
    assert _snapshot(run_directory) == before


@pytest.mark.parametrize(
    ("step", "found"), [("20", 1), ("step-00000020", 1), ("20-r1", 0), ("99", 0)]
)
def test_verify_of_one_step_looks_at_that_step_only(
    command: Command, run_directory: Path, step: str, found: int
) -> None:
    code, out, err = command("verify", run_directory, "--step", step)
    assert len(out.splitlines()) == found
    assert code == (0 if found else 2)
    assert ("no checkpoint" in err) == (not found)


def test_a_step_that_was_saved_twice_is_listed_with_both_revisions(
    command: Command, run_directory: Path
) -> None:
    store = Store(run_directory)
    store.acquire()
    _commit(store, 30)
    store.release()
    _, out, _ = command("verify", run_directory, "--step", "30")
    names = [line.split()[0] for line in out.splitlines()]
    assert names == [str(StepName(30, 1)), str(StepName(30))]


@pytest.mark.parametrize("name", ["list", "inspect", "verify"])
def test_a_pickle_in_place_of_a_file_is_never_run(
    command: Command, run_directory: Path, tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "it-ran"
    hostile = b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR."
    for path in list(run_directory.rglob("*")):
        if path.is_file():
            path.write_bytes(hostile)
    code, out, err = command(name, run_directory)
    assert code == {"list": 1, "inspect": 2, "verify": 1}[name]
    assert "step-00000030/manifest.json" in out + err
    assert not marker.exists()


@pytest.mark.parametrize("name", ["list", "inspect", "verify"])
def test_an_error_is_one_line_and_exit_code_two(
    command: Command, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, reason in (
        (tmp_path / "nothing", "no such directory"),
        (tmp_path / "file", "not a directory"),
        (tmp_path, "no checkpoint"),
    ):
        code, out, err = command(name, path)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {path}")
        assert reason in err
        assert len(err.splitlines()) == 1


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(command: Command) -> None:
    code, out, err = command("list", "x" * 5000)  # the system refuses to look such a name up
    assert (code, out) == (2, "")
    assert err.startswith("error: OSError: ")
    assert "resumekit --debug" in err
    assert len(err.splitlines()) == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such directory"):
        main(["--debug", "list", str(tmp_path / "nothing")])


def test_help_names_every_command_and_does_not_wait_for_torch() -> None:
    code = "import sys; from resumekit.cli import main\ntry: main(['--help'])\nfinally: " + (
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert all(name in done.stdout for name in ("demo", "prove", "list", "inspect", "verify"))
    assert done.stdout.endswith("False\n")


def test_version_prints_the_version(command: Command) -> None:
    assert command("--version") == (0, f"resumekit {resumekit.__version__}\n", "")
