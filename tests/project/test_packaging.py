"""The package list, the link, the pins and the README's commands agree with each other."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[2]

REQUIREMENT = re.compile(r"^[A-Za-z0-9._-]+")
INSTALL_AND_TEST = 'pip install -c constraints.txt -e ".[dev,all]" && nox'


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _name(requirement: str) -> str:
    match = REQUIREMENT.match(requirement)
    assert match, requirement
    return match.group().lower()


def _fenced_commands(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_every_package_on_disk_is_named_and_every_named_one_is_there(
    pyproject: dict[str, Any],
) -> None:
    folders = {
        *(path.parent.relative_to(ROOT) for path in (ROOT / "resumekit").rglob("__init__.py")),
        *(
            "resumekit" / p.parent.relative_to(ROOT)
            for p in (ROOT / "adapters").rglob("__init__.py")
        ),
    }
    named = pyproject["tool"]["setuptools"]["packages"]
    assert set(named) == {folder.as_posix().replace("/", ".") for folder in folders}
    assert len(named) == len(set(named))


def test_no_folder_with_code_lacks_its_init_file() -> None:
    for folder, _, files in os.walk(ROOT / "resumekit"):
        if any(name.endswith(".py") for name in files):
            assert "__init__.py" in files, folder


def test_the_wheel_maps_the_adapters_and_never_installs_them_at_the_top_level(
    pyproject: dict[str, Any],
) -> None:
    setuptools = pyproject["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"resumekit.adapters": "adapters"}
    assert "adapters" not in setuptools["packages"]


def test_the_adapters_are_reached_through_a_relative_link() -> None:
    link = ROOT / "resumekit" / "adapters"
    assert link.is_symlink()
    assert link.readlink() == Path("../adapters")


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "resumekit" / "py.typed").is_file()


def test_every_dependency_and_tool_is_pinned_to_the_version_it_is_tested_with(
    pyproject: dict[str, Any],
) -> None:
    project = pyproject["project"]
    extras = project["optional-dependencies"].values()
    wanted = {_name(r) for group in (project["dependencies"], *extras) for r in group}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert wanted - {"resumekit"} <= {_name(pin) for pin in pins}


def test_the_versions_agree() -> None:
    import resumekit

    assert importlib.metadata.version("resumekit") == resumekit.__version__
    assert f"## [{resumekit.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert INSTALL_AND_TEST in _fenced_commands("README.md")
    install, _, test = INSTALL_AND_TEST.partition(" && ")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert install in script
    assert f'env -i HOME="$HOME" PATH="$PATH" {test}' in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
