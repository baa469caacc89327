"""No byte of a run directory is ever unpickled, whatever stands in place of its files."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from crashlab.damage import files_of
from crashlab.hostile import Watch, hostile_files, run_hostile
from crashlab.training import NEWEST, make_run, resumed
from resumekit.cli import main
from resumekit.dcp import StorageReader
from resumekit.errors import ResumekitError
from resumekit.serialization.reading import read_payload
from resumekit.storage.store import Store

MARKER = "resumekit-was-here"
UNLISTED = (f"{NEWEST}/state/data.pkl", f"{NEWEST}/.metadata")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("pristine") / "run")


def _targets(run: Path) -> list[str]:
    """Every file that a resume may look at, and some that it should not."""
    return ["owner.json", "latest", *files_of(run, NEWEST), *UNLISTED, "step-00000008"]


def _poisoned(run: Path, tmp_path: Path, kinds: str) -> Iterator[tuple[str, Path]]:
    """Copies of the run with one hostile file each."""
    contents = {
        name: content for name, content in hostile_files(tmp_path / MARKER).items() if kinds in name
    }
    for target in _targets(run):
        for name, content in contents.items():
            copy = tmp_path / "copy" / "run"
            shutil.copytree(run, copy)
            (copy / target).write_bytes(content)
            yield f"{target}: {name}", copy
            shutil.rmtree(copy.parent)


def _read_all(run: Path) -> None:
    store = Store(run)
    for name in store.step_names():
        with suppress(ResumekitError):
            step = store.open_step(name)
            with suppress(ResumekitError):
                step.verify()
            for entry in step.manifest.files:
                with suppress(ResumekitError):
                    read_payload(step, str(Path(entry.path).parent), entry.writer)


def _command(*arguments: str) -> None:
    with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main(arguments)


@pytest.mark.parametrize("name", hostile_files(Path("marker")))
def test_each_hostile_file_would_run(name: str, watch: Watch, tmp_path: Path) -> None:
    marker = tmp_path / MARKER
    with watch.over(marker) as events:
        run_hostile(name, hostile_files(marker)[name])
    assert marker.exists()
    assert any(event.startswith("pickle.find_class") for event in events)


def test_opening_verifying_and_reading_run_nothing(
    run: Path, watch: Watch, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    num_files = 0
    with watch.over(tmp_path / MARKER) as events:
        for where, copy in _poisoned(run, tmp_path, ""):
            _read_all(copy)
            assert not events, where
            assert not (tmp_path / MARKER).exists(), where
            num_files += 1
    record_property("hostile pickle in a checkpoint", num_files)


@pytest.mark.parametrize("kinds", ["protocol 5, os.system", "torch zip, exec", "npy of objects, e"])
def test_resume_and_the_commands_run_nothing(
    kinds: str, run: Path, watch: Watch, tmp_path: Path
) -> None:
    with watch.over(tmp_path / MARKER) as events:
        for where, copy in _poisoned(run, tmp_path, kinds):
            _command("verify", str(copy))
            _command("list", str(copy))
            _command("inspect", str(copy))
            _command("inspect", str(copy / NEWEST))
            damaged = NEWEST in where and not where.startswith(UNLISTED)
            report, _ = resumed(copy)
            assert report.step == (2 if damaged else 4), where
            assert not events, where
            assert not (tmp_path / MARKER).exists(), where


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_a_load_by_dcp_runs_nothing(run: Path, watch: Watch, tmp_path: Path) -> None:
    num_loaded = 0
    with watch.over(tmp_path / MARKER) as events:
        for where, copy in _poisoned(run, tmp_path, "protocol 5, os.system"):
            for path in (copy, copy / NEWEST):
                with suppress(CheckpointException):
                    state = _load_state_dict_from_keys(storage_reader=StorageReader(path))
                    assert {"model", "optimizer"} <= state.keys()
                    num_loaded += 1
            assert not events, where
            assert not (tmp_path / MARKER).exists(), where
    assert num_loaded >= len(UNLISTED)
