from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from failpoints import Failpoint, FailpointFileSystem, failing, parse_failpoints

from resumekit.errors import ConfigurationError, DirectoryError
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.store import Store


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("17=kill", (Failpoint(17, "kill"),)),
        ("17=EIO", (Failpoint(17, "EIO"),)),
        ("17+=ENOSPC", (Failpoint(17, "ENOSPC", sticky=True),)),
        ("write:3=torn", (Failpoint(3, "torn", "write"),)),
        ("list:1+=EIO, 2=kill", (Failpoint(1, "EIO", "list", True), Failpoint(2, "kill"))),
        ("open:2=EACCES", (Failpoint(2, "EACCES", "open"),)),
        ("1+=log", (Failpoint(1, "log", sticky=True),)),
        ("", ()),
    ],
)
def test_a_plan_says_which_call_fails_and_how(text: str, points: tuple[Failpoint, ...]) -> None:
    assert parse_failpoints(text) == points


@pytest.mark.parametrize(
    "text", ["17", "0=kill", "-1=kill", "x=kill", "17=explode", "17=EWHAT", "chmod:1=EIO", "=EIO"]
)
def test_a_plan_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="failpoints"):
        parse_failpoints(text)


def _failing(text: str) -> FailpointFileSystem:
    return FailpointFileSystem(LocalFileSystem(), parse_failpoints(text))


def test_the_numbered_call_fails_once_and_is_not_made(tmp_path: Path) -> None:
    failing = _failing("2=EIO")
    failing.mkdir(tmp_path / "a")
    with pytest.raises(OSError, match="error") as caught:
        failing.mkdir(tmp_path / "b")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "b"))
    failing.mkdir(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    assert failing.num_write_calls == 3


def test_a_sticky_failure_stays(tmp_path: Path) -> None:
    failing = _failing("mkdir:2+=ENOSPC")
    failing.mkdir(tmp_path / "a")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            failing.mkdir(tmp_path / "b")
    failing.rmdir(tmp_path / "a")


def test_read_side_calls_do_not_count_and_fail_only_by_name(tmp_path: Path) -> None:
    failing = _failing("1=EIO,list:2=EACCES")
    failing.list(tmp_path)
    with pytest.raises(PermissionError):
        failing.list(tmp_path)
    with pytest.raises(OSError, match="error"):
        failing.mkdir(tmp_path / "a")


def test_a_logged_call_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged = _failing("2+=log")
    logged.mkdir(tmp_path / "a")
    handle = logged.create(tmp_path / "a" / "file")
    logged.write(handle, [memoryview(b"content")])
    logged.fsync(handle)
    logged.close(handle)
    logged.rename(tmp_path / "a" / "file", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"content"
    file = tmp_path / "a" / "file"
    assert capsys.readouterr().err.splitlines() == [
        f"failpoint: {number} {call} {file}"
        for number, call in enumerate(("create", "write", "fsync", "rename"), start=2)
    ]


def test_a_failed_close_gives_the_descriptor_back(tmp_path: Path) -> None:
    failing = _failing("close:1=EIO")
    handle = failing.create(tmp_path / "a")
    with pytest.raises(OSError, match="error"):
        failing.close(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def _status_of_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_kill_comes_before_the_call(tmp_path: Path) -> None:
    failing = _failing("1=kill")
    status = _status_of_child(lambda: failing.mkdir(tmp_path / "a"))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (tmp_path / "a").exists()


def test_a_torn_write_leaves_half_of_its_bytes(tmp_path: Path) -> None:
    failing = _failing("write:2=torn")
    handle = failing.create(tmp_path / "a")

    def work() -> None:
        failing.write(handle, [memoryview(b"whole,")])
        failing.write(handle, [memoryview(b"abc"), memoryview(b"defgh"), memoryview(b"ij")])

    status = _status_of_child(work)
    failing.close(handle)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"whole,abcde"


def test_a_store_uses_the_injected_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resumekit.storage.store.LocalFileSystem", failing("mkdir:1=EROFS"))
    with pytest.raises(DirectoryError, match="EROFS"):
        Store(tmp_path / "run").acquire()
    assert list(tmp_path.iterdir()) == []
