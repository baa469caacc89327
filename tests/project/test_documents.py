"""The documents hold: examples run as printed, and links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from documents import PAGES, ROOT, Document

from resumekit.cli.commands import app
from resumekit.run.options import OptionKeywords, Options


def _run_script(script: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# What the two lines of the README are put around.
LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train_on(batch):
    loss = (model(batch[0]) - batch[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

"""


def test_the_readme_shows_its_example_by_line_thirty() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "```python" in lines[:30]
    assert any("ckpt.batches(loader" in line for line in lines[:30])


def test_the_example_of_the_readme_runs_and_a_second_start_finds_it_finished(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    example = Document(ROOT / "README.md").blocks("python")[0]
    script.write_text(LOOP + example, encoding="utf-8")
    assert "starting in" in _run_script(script)
    steps = sorted(path.name for path in (tmp_path / "runs" / "a").glob("step-*"))
    assert steps[-1] == "step-00000096"
    assert "nothing to do" in _run_script(script)


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_python_in_the_documents_is_python(document: Path) -> None:
    for block in Document(document).blocks("python"):
        compile(block, str(document), "exec")


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert "://" in target or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_a_command_that_installs_a_checkout_names_the_constraints(document: Path) -> None:
    for block in Document(document).blocks("bash"):
        for line in block.splitlines():
            if "pip install" in line and " -e " in line:
                assert "-c constraints.txt" in line, line


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
UsageError: Any = typer.BadParameter.__base__  # click's, or that of typer's own copy of click


def _parse(command: str) -> None:
    """Raises UsageError unless the command takes these options and arguments."""
    _, name, *words = shlex.split(command)
    if name not in COMMANDS:
        raise UsageError(f"no command {name}")
    COMMANDS[name].make_context(name, words)


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_commands_in_blocks_have_options_and_arguments_that_exist(document: Path) -> None:
    for command in Document(document).commands():
        _parse(command)


@pytest.mark.parametrize("words", ["list a --bogus", "list a b", "diff a", "fork a b --step", "go"])
def test_a_command_that_is_wrong_is_refused(words: str) -> None:
    with pytest.raises(UsageError):
        _parse(f"resumekit {words}")


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_commands_in_the_text_have_options_that_exist(document: Path) -> None:
    for found in re.findall(r"`resumekit ([a-z][^`]*)`", Document(document).text):
        name, *words = found.partition(" -- ")[0].split()
        options = {option for each in COMMANDS[name].params for option in each.opts}
        named = {word for word in words if word.startswith("--")}
        assert named <= options, found


def test_the_table_of_options_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^|]*)` \| (.+) \|$", text, re.MULTILINE)
    default = Options()
    expected = {item.name: getattr(default, item.name) for item in fields(Options)}
    shown = {name: value for name, value, _ in rows}
    assert list(shown) == list(expected)
    for name, value in expected.items():
        assert shown[name] == repr(value).replace("'", '"'), name
    assert all(len(meaning) > 20 for _, _, meaning in rows)


def test_the_keywords_of_the_options_are_its_fields() -> None:
    assert get_type_hints(OptionKeywords) == get_type_hints(Options)
    assert list(OptionKeywords.__annotations__) == [item.name for item in fields(Options)]
