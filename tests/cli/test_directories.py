"""Every command that reads a directory, on each kind of directory, on a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2
import pytest

import resumekit.cli.diff_view
import resumekit.export
import resumekit.html_report
from crashlab.training import NEWEST, OLDER, make_run
from resumekit.cli import main
from resumekit.cli.commands import app
from resumekit.storage.store import Store

ROOT = Path(__file__).resolve().parents[2]
LOADED = (jinja2, resumekit.cli.diff_view, resumekit.export, resumekit.html_report)
LONG = "a-run-with-a-name-that-is-longer-than-the-eighty-columns-of-a-terminal-" + 50 * "x"
HOSTILE = b"cos\nsystem\n(S'touch it-ran'\ntR.\x1b[2J"


def _child(words: Sequence[object]) -> int:
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        return int(str(ended.code))
    except BaseException:  # noqa: BLE001 - a fork must not return into the tests
        traceback.print_exc()
    return 99


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 98
    os._exit(code)


def on_terminal(words: Sequence[object]) -> tuple[int, str]:
    """Exit code and screen of a command, on a terminal of 80 columns."""
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.environ.update(TERM="xterm", COLUMNS="")
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        _end(_child(words))
    screen = b""
    while True:
        try:
            screen += (part := os.read(terminal, 1 << 16))
        except OSError:
            break
        if not part:
            break
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, re.sub(r"\x1b\[[0-9;]*m", "", screen.decode()).replace("\r\n", "\n")


def in_pipe(words: Sequence[object], *, is_closed: bool = False) -> tuple[int, str, str]:
    """Exit code, output and messages of a command, in pipes; nobody reads a closed one."""
    (out, writing), (err, errors) = os.pipe(), os.pipe()
    if is_closed:
        os.close(out)
    pid = os.fork()
    if not pid:
        os.dup2(writing, 1)
        os.dup2(errors, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        _end(_child(words))
    os.close(writing)
    os.close(errors)
    texts = []
    for handle in [] if is_closed else [out]:
        with os.fdopen(handle, encoding="utf-8") as stream:
            texts.append(stream.read())
    with os.fdopen(err, encoding="utf-8") as stream:
        messages = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "".join(texts), messages


def _make_special(run: Path) -> None:
    """Pipes, which nobody writes to, and a link in place of a step."""
    (journal,) = (run / "journal").iterdir()
    for path in (run / "owner.json", run / ".lock", journal):
        path.unlink()
        os.mkfifo(path)
    (run / NEWEST).rename(run.parent / "elsewhere")
    (run / NEWEST).symlink_to(run.parent / "elsewhere")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    parent = tmp_path_factory.mktemp("parent")
    good = make_run(parent / LONG)
    found = {"good": good, "parent": parent, "missing": parent / "missing"}
    for kind in ("damaged", "hostile", "live", "begun", "special"):
        found[kind] = tmp_path_factory.mktemp(kind) / LONG
        shutil.copytree(good, found[kind])
    for kind in ("empty", "foreign", "file"):
        found[kind] = tmp_path_factory.mktemp(kind)
    (found["foreign"] / "checkpoint-500").mkdir()
    (found["foreign"] / "checkpoint-500" / "model.safetensors").write_bytes(HOSTILE)
    (found["file"] / "file").touch()
    found["file"] /= "file"
    (found["damaged"] / NEWEST / "manifest.json").write_text("{}")
    found["trainer"] = found["foreign"] / "checkpoint-500"
    (found["trainer"] / "trainer_state.json").write_text('{"global_step": 500}')
    _make_special(found["special"])
    for path in found["hostile"].rglob("*"):
        if path.is_file():
            path.write_bytes(HOSTILE)
    for name in (NEWEST, OLDER):
        shutil.rmtree(found["begun"] / name)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # a record lock belongs to a process, so another one has to hold it
        store = Store(found["live"])
        store.acquire()
        os.write(writing, b"1")
        signal.pause()
    os.read(reading, 1)
    yield found
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


# The exit code on each kind of directory; a live run is as good as another one.
KINDS = (
    *("good", "live", "parent", "begun", "damaged", "hostile", "special"),
    *("empty", "foreign", "trainer", "missing"),
)
CODES = {
    "list": (0, 0, 0, 2, 1, 1, 1, 2, 2, 2, 2),
    "verify": (0, 0, 2, 2, 1, 1, 1, 2, 2, 2, 2),
    "inspect": (0, 0, 2, 2, 0, 2, 0, 2, 2, 2, 2),
    "export": (0, 0, 2, 2, 0, 2, 0, 2, 2, 2, 2),
    "diff": (0, 0, 2, 2, 1, 2, 1, 2, 2, 2, 2),
    "history": (0, 0, 2, 0, 1, 1, 1, 2, 2, 2, 2),
    "report": (0, 0, 2, 0, 1, 1, 1, 2, 2, 2, 2),
    "prune": (0, 0, 2, 2, 0, 2, 0, 2, 2, 2, 2),
    "fork": (0, 0, 2, 2, 0, 2, 0, 2, 2, 2, 2),
    "import": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "mirror": (0, 0, 2, 2, 1, 1, 1, 2, 2, 2, 2),
    "fetch": (0, 0, 2, 2, 0, 2, 0, 2, 2, 2, 2),
    "fetch into": (0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0),
    "replay": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "run": (3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3),
}
WITHOUT_DIRECTORY = {"prove", "doctor", "demo", "explain"}
WITH_JSON = ("list", "verify", "inspect", "diff", "history", "prune", "report")


def _words(command: str, directory: Path, good: Path, output: Path) -> list[object]:
    new = output / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.with_name("model.safetensors").unlink(missing_ok=True)
    ends = ["--", "sh", "-c", "exit 3"]
    if command == "fetch into":
        subprocess.run(["cp", "-a", directory, new], check=False, stderr=subprocess.DEVNULL)
        is_live = directory.parent.name.startswith("live")  # its lock is not copied
        return ["fetch", good, directory if is_live else new]
    rest: dict[str, list[object]] = {
        "export": [new.with_name("model.safetensors")],
        "diff": [good],
        "report": ["-o", output / "page.html"],
        "prune": ["--keep-latest", 1, "--dry-run"],
        "fork": [new],
        "import": [new],
        "mirror": [new],
        "fetch": [new],
        "replay": ["--from", 2, *ends],
        "run": ["--max-restarts", 0, *ends],
    }
    return [command, *(["--dir"] * (command == "run")), directory, *rest.get(command, [])]


def _cells(*quick: str) -> pytest.MarkDecorator:
    """Every command on every kind; without the mark ``full`` those of these commands or kinds."""
    cells = [(command, kind) for command in CODES for kind in KINDS]
    is_full = [not {command, kind} & set(quick) for command, kind in cells]
    marks = [[pytest.mark.full] if each else [] for each in is_full]
    params = [pytest.param(*cell, marks=each) for cell, each in zip(cells, marks, strict=True)]
    return pytest.mark.parametrize(("command", "kind"), params)


@_cells(*CODES)
def test_each_command_has_its_exit_code_and_no_traceback(
    directories: dict[str, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    command: str,
    kind: str,
) -> None:
    expected = CODES[command][KINDS.index(kind)]
    words = _words(command, directories[kind], directories["good"], tmp_path)
    code = _child(words)
    out, err = capfd.readouterr()
    assert (code, "Traceback" in err) == (expected, False), out + err
    assert "\x1b" not in out + err
    if expected == 2:
        *before, last = err.splitlines()
        assert (out, last[:7]) == ("", "error: ")
        assert len(before) == (command == "replay" and "replaying" in err)
    if command in WITH_JSON:
        code = _child([*words, "--json"])
        out, err = capfd.readouterr()
        assert code == expected
        assert expected == 2 or json.loads(out) is not None


@_cells("list", "good")
def test_each_command_is_the_same_on_a_terminal(
    directories: dict[str, Path], tmp_path: Path, command: str, kind: str
) -> None:
    words = _words(command, directories[kind], directories["good"], tmp_path)
    code, screen = on_terminal(words)
    assert (code, "Traceback" in screen) == (CODES[command][KINDS.index(kind)], False), screen
    assert code != 2 or [line[:7] for line in screen.splitlines()][-1] == "error: "


def test_every_command_is_tried() -> None:
    assert {command.split()[0] for command in CODES} | WITHOUT_DIRECTORY == _command_names()


def _command_names() -> set[str]:
    names = (
        each.name or (each.callback and each.callback.__name__) for each in app.registered_commands
    )
    return {str(name) for name in names}


def test_a_table_of_a_run_fits_a_terminal(directories: dict[str, Path], tmp_path: Path) -> None:
    for command, kind in (("list", "good"), ("list", "damaged"), ("history", "good")):
        words = _words(command, directories[kind], directories["good"], tmp_path)
        rows = on_terminal(words)[1].splitlines()[:3]
        assert all(len(row) <= 80 for row in rows), rows
        assert [row[:4] for row in rows[1:] if command == "list"] in ([], ["step", "step"])


def test_a_damaged_checkpoint_is_fetched_again(
    directories: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = _words("fetch into", directories["damaged"], directories["good"], tmp_path)
    assert _child(words) == 0
    out, err = capfd.readouterr()
    assert out == f"{words[2]}/{NEWEST}\n"
    assert f"{NEWEST}/manifest.json: 2 bytes" in err
    assert _child(["verify", words[2]]) == 0
    assert _child(words) == 0
    assert f"{NEWEST} was there" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("command", "kind", "names"),
    [
        ("list", "good", [NEWEST, OLDER]),
        ("list", "damaged", [f"{NEWEST}/manifest.json:"]),
        ("list", "parent", [LONG]),
        ("verify", "parent", [LONG]),
        ("inspect", "good", ["optimizer/rank-00000.safetensors", "model/attributes"]),
        ("diff", "good", [f"{LONG}/{NEWEST}"]),
        ("report", "begun", ["page.html"]),
        ("history", "missing", ["parent0/missing:"]),
    ],
)
def test_no_name_is_broken(
    directories: dict[str, Path], tmp_path: Path, command: str, kind: str, names: list[str]
) -> None:
    words = _words(command, directories[kind], directories["good"], tmp_path)
    _, screen = on_terminal(words)
    _, out, err = in_pipe(words)
    for text in (screen, out + err):
        assert not [name for name in names if name not in text], text
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize("command", ["list", "verify", "inspect", "diff", "history", "report"])
def test_a_closed_pipe_ends_a_command_quietly(
    directories: dict[str, Path], tmp_path: Path, command: str
) -> None:
    words = _words(command, directories["good"], directories["good"], tmp_path)
    assert in_pipe(words, is_closed=True) == (128 + signal.SIGPIPE, "", "")


def test_the_module_names_itself_as_it_was_called() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "resumekit", "bogus"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: python -m resumekit [OPTIONS] COMMAND")


def test_the_page_has_the_exit_codes_of_each_command() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("## Exit codes")[2].partition("\n## ")[0]
    table = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert set(table) == _command_names()


@pytest.mark.parametrize("command", ["list", "verify", "diff", "history", "prune", "report"])
def test_the_page_has_the_keys_of_the_json(
    directories: dict[str, Path], tmp_path: Path, command: str
) -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("## JSON")[2].partition("\n## ")[0]
    words = _words(command, directories["good"], directories["good"], tmp_path)
    if words[-1] == "--dry-run":
        words[2:4] = ["--weights-only-before", 3]
    document = json.loads(in_pipe([*words, "--json"])[1])
    objects = [document] if isinstance(document, dict) else document
    for key in ("attempts", "checkpoints"):
        objects += document.get(key, []) if isinstance(document, dict) else []
    assert {f"`{key}`" for each in objects for key in each} <= set(re.findall(r"`\w+`", section))
