"""Every command on every hostile file: exit code 1 or 2, one line, little time and memory."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import pytest
from _pytest.mark import ParameterSet

import resumekit.cli.diff_view
import resumekit.export
import resumekit.html_report
from crashlab.damage import Damage, files_of, special_files, whole_file_damages
from crashlab.hostile import hostile_files
from crashlab.hostile_json import (
    CONTROL,
    change_json,
    hostile_indices,
    hostile_manifests,
    sealed_fields,
)
from crashlab.training import NEWEST, OLDER, make_run
from resumekit.cli import main
from resumekit.storage.directories import unseal

# What the commands load; a child that is forked after it measures what a file costs.
LOADED = (jinja2, resumekit.cli.diff_view, resumekit.export, resumekit.html_report)
GOLDEN = Path(__file__).resolve().parents[2] / "integration" / "golden" / "checkpoints"
SHARDED = "step-00000008"

MAX_SECONDS = 5
MAX_MEGABYTES = 300
MAX_FILE_BYTES = 1_000_000


class Ended(NamedTuple):
    """The end of a command in a process of its own."""

    code: int
    megabytes: float
    out: str
    err: str


def _run(words: Sequence[object], output: Path) -> Ended:
    """Runs a command in a fork with a limit of its time."""
    files = (output / "out", output / "err")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
            for number, file in enumerate(files, start=1):
                os.dup2(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            logging.getLogger("resumekit").handlers.clear()
            main([str(word) for word in words])
        except SystemExit as ended:
            code = int(str(ended.code))
        except BaseException:  # noqa: BLE001 - a fork must not return into the tests
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    texts = (file.read_text(encoding="utf-8") for file in files)
    return Ended(os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024, *texts)


def _commands(run: Path, good: Path, step: str, output: Path) -> Iterator[list[object]]:
    exported = output / "exported"
    exported.unlink(missing_ok=True)
    yield ["list", run]
    yield ["verify", run]
    yield ["inspect", run]
    yield ["inspect", run / step]
    yield ["export", run, exported]
    yield ["diff", run, good]
    yield ["report", run, "-o", output / "page.html"]
    yield ["history", run]
    yield ["prune", run, "--keep-latest", 1, "--dry-run"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    run = make_run(tmp_path_factory.mktemp("pristine") / "run")
    shutil.rmtree(run / OLDER)
    return run


@pytest.fixture(scope="module")
def megabytes(good: Path) -> float:
    """The memory of a command that reads nothing."""
    return _run(["list", good / "missing"], good.parent).megabytes


def _check(
    run: Path, good: Path, megabytes: float, *, step: str = NEWEST, is_found: bool = True
) -> set[int]:
    """Runs all commands; returns their exit codes."""
    codes = set()
    for words in _commands(run, good, step, run.parent):
        ended = _run(words, run.parent)
        text = (words, ended.code, ended.out[-300:], ended.err[-300:])
        assert ended.code in ((1, 2) if is_found else (0, 1, 2)), text
        assert ended.megabytes - megabytes < MAX_MEGABYTES, text
        assert "Traceback" not in ended.err, text
        assert all(each.isprintable() or each == "\n" for each in ended.out + ended.err), text
        assert not any(line.startswith("forged") for line in ended.out.splitlines()), text
        if ended.code == 2:
            assert len(ended.err.splitlines()) == 1, text
            assert ended.err.startswith("error: "), text
        codes.add(ended.code)
    return codes


def _hostile(good: Path, marker: Path) -> Iterator[Damage]:
    for path in files_of(good, NEWEST):
        for name, content in hostile_files(marker).items():
            yield Damage(f"{path}: {name}", path, lambda run, p=path, c=content: _put(run / p, c))  # type: ignore[misc]
    yield from whole_file_damages(good, NEWEST)
    yield from special_files(good, NEWEST)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def test_the_commands_succeed_on_the_run_itself(good: Path, megabytes: float) -> None:
    assert _check(good, good, megabytes, is_found=False) == {0}


@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.full), 41])
def test_hostile_and_damaged_files_end_every_command_with_one_line(
    good: Path, megabytes: float, tmp_path: Path, apart: int
) -> None:
    for damage in list(_hostile(good, tmp_path / "x"))[::apart]:
        copy = tmp_path / "copy" / "run"
        shutil.copytree(good, copy)
        damage.do(copy)
        # Of a file with the right size, only the commands that read it notice anything.
        (changed, whole) = ((run / damage.path).lstat() for run in (copy, good))
        is_found = (changed.st_mode, changed.st_size) != (whole.st_mode, whole.st_size)
        is_found |= damage.path.endswith("manifest.json")
        _check(copy, good, megabytes, is_found=is_found)
        shutil.rmtree(copy.parent)


def _manifests() -> dict[str, bytes]:
    manifest = GOLDEN / "sharded" / SHARDED / "manifest.json"
    return dict(hostile_manifests(unseal(manifest.read_bytes(), where="")))


def _some(names: Iterable[str], *always: str) -> list[ParameterSet]:
    """Each fifth name and those that count most; the others in the full run only."""
    return [
        pytest.param(name, marks=() if number % 5 == 0 or name in always else pytest.mark.full)
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", _some(_manifests(), "many settings", "many forks"))
def test_a_hostile_manifest_with_a_right_digest_costs_little_and_prints_nothing_raw(
    good: Path, megabytes: float, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(good, copy)
    manifest = copy / NEWEST / "manifest.json"
    content = dict(hostile_manifests(unseal(manifest.read_bytes(), where="")))[name]
    assert len(content) < 1.1 * MAX_FILE_BYTES
    manifest.write_bytes(content)
    _check(copy, good, megabytes, is_found=False)


@pytest.mark.parametrize("name", _some(hostile_indices(), "a tensor of 4 TB"))
def test_a_hostile_index_with_a_right_digest_costs_little_and_prints_nothing_raw(
    megabytes: float, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(GOLDEN / "sharded", copy)
    step = copy / SHARDED
    change_json(step / "model" / "index.json", hostile_indices()[name], step)
    codes = _check(copy, GOLDEN / "sharded", megabytes, step=SHARDED, is_found=False)
    assert codes & {1, 2}  # who reads the tensors finds it


def test_names_with_control_characters_are_escaped(
    good: Path, megabytes: float, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(good, copy)
    for directory in (copy, copy / NEWEST, copy / "journal"):
        (directory / CONTROL).touch()
        (directory / os.fsdecode(b"\xff\xfe")).touch()
    assert _check(copy, good, megabytes, is_found=False) == {0}
    ended = _run(["verify", copy], tmp_path)
    assert r"evil\x1b[2J" in ended.err
    assert r"\n" in ended.err


def test_the_limits_are_felt(good: Path, tmp_path: Path) -> None:
    """Negative control: a child that takes too long or prints raw text is noticed."""
    manifest = unseal((good / NEWEST / "manifest.json").read_bytes(), where="")
    assert json.loads(sealed_fields(manifest))["step"] == 4
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        while True:
            pass
    _, status, _ = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) < 0
