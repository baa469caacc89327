"""Random functions continue from their live variables, on each Python of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_bytecode.py")
OTHER_VERSIONS = [
    version
    for version in ("3.10", "3.11", "3.12", "3.13")
    if version != f"{sys.version_info[0]}.{sys.version_info[1]}"
]


def find_python(version: str) -> str | None:
    """An interpreter of that version that starts, also one that pyenv has not selected."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *map(str, installed)):
        if path is None:
            continue
        command = [path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
        if subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return path
    return None


def run_script(python: str) -> None:
    command = [python, "-W", "error", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert " 0 failures" in done.stdout


def test_random_functions_continue_from_their_live_variables() -> None:
    run_script(sys.executable)


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_random_functions_continue_on_another_version_of_python(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    run_script(python)
