"""One table of minimum versions, and one clear error for a framework that is missing or too old."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resumekit.errors import InexactError, MissingDependencyError
from resumekit.requirements import (
    MINIMUM_VERSIONS,
    TESTED_VERSIONS,
    PrivateName,
    check_tested,
    faults,
    installed_version,
    require,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[2]


def _install(folder: Path, framework: str, version: str) -> None:
    """A distribution of that name and version, as an installer leaves it on disk."""
    information = folder / f"{framework}-{version}.dist-info"
    information.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {framework}\nVersion: {version}\n"
    (information / "METADATA").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("framework", sorted(MINIMUM_VERSIONS))
@pytest.mark.parametrize("suffix", ["", ".0", ".1", ".dev0", "rc1", ".7.post1+local"])
def test_the_minimum_and_what_is_newer_is_accepted(
    framework: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, framework, MINIMUM_VERSIONS[framework] + suffix)
    monkeypatch.syspath_prepend(tmp_path)
    require(framework)


@pytest.mark.parametrize("version", ["1.11.9", "1.9", "0.99", "1.1.12", "unknown"])
def test_a_framework_that_is_too_old_is_named_with_both_versions_and_the_way_to_install_it(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "accelerate", version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError) as caught:
        require("accelerate")
    assert str(caught.value) == (
        f"accelerate: version {version}, expected 1.12 or newer. "
        'Install it with: pip install "accelerate>=1.12". [RK-103]'
    )


def test_a_missing_framework_is_one_import_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed_version("accelerate") is None
    with pytest.raises(ImportError, match=r"accelerate: not installed, expected 1\.12 or newer"):
        require("accelerate")


def test_an_adapter_without_its_framework_fails_at_import_with_that_error() -> None:
    # A process whose metadata of accelerate cannot be found, wherever it is installed.
    program = (
        "import importlib.metadata as m\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name == 'accelerate':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.version = version\n"
        "import resumekit.adapters.accelerate\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last_line = done.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError: accelerate: not installed" in last_line
    assert 'pip install "accelerate>=1.12"' in last_line


def test_the_extras_ask_for_the_versions_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for framework, minimum in MINIMUM_VERSIONS.items():
        asked = dict(re.split(">=", requirement) for requirement in extras[framework])
        assert asked[framework] == minimum
        assert all(MINIMUM_VERSIONS[name] == least for name, least in asked.items())


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [re.split("==|;", line)[:2] for line in lines if "==" in line]
    newest: dict[str, str] = {}
    for name, pinned in pins:  # the line for the newest Python comes first
        newest.setdefault(name, pinned.strip())
    assert {name: newest[name] for name in TESTED_VERSIONS} == TESTED_VERSIONS


# ---------------------------------------------------------------- private names


class Loop:
    def __init__(self) -> None:
        self._count = 3
        self.inner: Any = None

    def _advance(self, batch: int, *, last: bool = False) -> None: ...

    @property
    def _fixed(self) -> int:
        return 1

    @property
    def _stubborn(self) -> object:
        return object()

    @_stubborn.setter
    def _stubborn(self, value: object) -> None: ...


SOURCE = "a 1.0 loop.py Loop"
WRONG = {
    "missing": (PrivateName("_missing", SOURCE), "Loop._missing is missing (a 1.0 loop.py Loop)"),
    "missing below": (PrivateName("inner._x", SOURCE), "Loop.inner._x is missing"),
    "other parameters": (PrivateName("_advance", SOURCE, ("step",)), "_advance takes batch, last"),
    "not to be set": (PrivateName("_fixed", SOURCE, is_written=True), "_fixed cannot be set"),
    "not read back": (PrivateName("_stubborn", SOURCE, is_written=True), "_stubborn cannot be set"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_probe_finds_a_private_name_that_is_not_as_in_the_source(wrong: str) -> None:
    name, found = WRONG[wrong]
    (fault,) = faults(Loop(), [name])
    assert fault.startswith(found)


def test_the_probe_accepts_names_that_are_as_in_the_source_and_changes_nothing() -> None:
    loop = Loop()
    before = dict(vars(loop))
    names = (
        PrivateName("_count", SOURCE, is_written=True),
        PrivateName("_advance", SOURCE, ("batch",)),
        PrivateName("_not_in_all_versions", SOURCE, is_written=True, is_optional=True),
    )
    assert not list(faults(loop, names))
    assert vars(loop) == before


def test_a_private_attribute_is_read_back_when_it_is_written() -> None:
    loop, count = Loop(), PrivateName("_count", SOURCE, is_written=True)
    count.write(loop, 5)
    assert count.of(loop) == 5
    with pytest.raises(InexactError, match=r"Loop\._stubborn: another value than was set"):
        PrivateName("_stubborn", SOURCE, is_written=True).write(loop, 5)


@pytest.mark.parametrize(
    ("version", "found", "strict", "expected"),
    [
        ("1.15.0", (), True, []),
        ("1.15", (), True, []),
        ("1.16.0", (), True, ["accelerate 1.16.0: newer than the tested version"]),
        ("1.15.0", ("A.b is missing",), False, ["a resume may not be exact: A.b is missing"]),
        ("1.16.0", ("A.b is missing",), False, ["a resume may not be exact: A.b is missing"]),
    ],
)
def test_a_newer_version_or_changed_names_are_one_warning(
    version: str,
    found: tuple[str, ...],
    strict: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _install(tmp_path, "accelerate", version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging.getLogger("resumekit"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("resumekit"), "propagate", True)
    caplog.set_level(logging.INFO, "resumekit")
    check_tested("accelerate", found=found, strict=strict, warns=False)
    assert not caplog.messages
    check_tested("accelerate", found=found, strict=strict, warns=True)
    assert len(caplog.messages) == len(expected)
    assert all(map(str.startswith, caplog.messages, expected))


def test_strict_refuses_changed_names_on_every_rank() -> None:
    with pytest.raises(InexactError, match=r"A\.b is missing, expected the names of accelerate==1"):
        check_tested("accelerate", found=["A.b is missing"], strict=True, warns=False)
