"""The Start pages hold: each script is run as printed, killed, and started again.

The page's own lines are what it must print. The weights at the end are those of a run that nobody
killed, as the stock reader of safetensors reads them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from documents import ROOT, START_PAGES, StartPage
from safetensors.torch import load_file
from start_pages import kill, start

PORT = ("--master_port", "29517")  # the default one may be in use
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command_of(page: StartPage) -> list[str]:
    """That starts the script again, in this environment."""
    words = page.restart.split()
    module = {"python": [], "deepspeed": ["-m", "deepspeed.launcher.runner"]}[words[0]]
    return [sys.executable, *module, *(PORT if module else ()), *words[1:]]


def finish(command: list[str], folder: Path) -> str:
    process = start(command, folder, ENVIRONMENT)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    return printed


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "runs" / "a").glob("step-*"))
    return {
        f"{file.name}/{name}": tensor
        for file in sorted((newest / "model").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def without_numbers(line: str) -> str:
    line = re.sub(r"/\S*/runs/a", "runs/a", line)
    return re.sub(
        r"\d+ repeated steps?", "N repeated steps", re.sub(r"trained \d+", "trained", line)
    )


@pytest.mark.quick("pytorch")
@pytest.mark.parametrize("name", START_PAGES)
def test_the_script_of_a_page_is_killed_and_continues_as_the_page_says(
    name: str, tmp_path: Path
) -> None:
    page = StartPage(name)
    script = page.script
    folders = [tmp_path / name for name in ("killed", "whole", "control")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(script, encoding="utf-8")
    killed, whole, control = folders
    command = command_of(page)

    printed = kill(start(command, killed, ENVIRONMENT), killed)
    printed += finish(command, killed)
    finish(command, whole)
    found = [without_numbers(line) for line in re.split("[\r\n]", printed)]
    (promised,) = page.blocks("text")
    for line in map(without_numbers, promised.splitlines()):
        assert any(line in each for each in found), (line, printed)

    expected = weights(whole)
    assert expected.keys() == weights(killed).keys()
    assert all(map(torch.equal, expected.values(), weights(killed).values()))

    other = re.sub(r"(seed\w*)\(0\)", r"\1(1)", script)
    assert other != script
    (control / "train.py").write_text(other, encoding="utf-8")
    finish(command, control)
    assert not all(map(torch.equal, expected.values(), weights(control).values()))


@pytest.mark.parametrize("name", START_PAGES)
def test_the_changed_lines_of_a_page_are_those_of_its_script(name: str) -> None:
    page = StartPage(name)
    script = page.script
    (change,) = page.blocks("diff")
    squeezed = re.sub(r",?\s*save_every=\d+|[\s,]", "", script)
    for line in change.splitlines():
        words = re.sub(r"[\s,]", "", line[1:])
        if line.startswith("+"):
            assert words in squeezed, line
        elif line.startswith("-"):
            assert f"{words}\n" not in squeezed
            assert line[1:].strip() not in [each.strip() for each in script.splitlines()], line
