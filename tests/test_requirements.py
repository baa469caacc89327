"""One table of minimum versions, and one clear error for a framework that is missing or too old."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from resumekit.errors import MissingDependencyError
from resumekit.requirements import MINIMUM_VERSIONS, installed_version, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[1]


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


@pytest.mark.parametrize("version", ["1.14.9", "1.9", "0.99", "1.1.15", "unknown"])
def test_a_framework_that_is_too_old_is_named_with_both_versions_and_the_way_to_install_it(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "accelerate", version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError) as caught:
        require("accelerate")
    assert str(caught.value) == (
        f"accelerate: version {version}, expected 1.15 or newer. "
        'Install it with: pip install "resumekit[accelerate]".'
    )


def test_a_missing_framework_is_one_import_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed_version("accelerate") is None
    with pytest.raises(ImportError, match=r"accelerate: not installed, expected 1\.15 or newer"):
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
    assert 'pip install "resumekit[accelerate]"' in last_line


def test_the_extras_ask_for_the_versions_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for framework, minimum in MINIMUM_VERSIONS.items():
        asked = dict(re.split(">=", requirement) for requirement in extras[framework])
        assert asked[framework] == minimum
        assert all(MINIMUM_VERSIONS[name] == least for name, least in asked.items())
