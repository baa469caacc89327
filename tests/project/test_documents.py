"""The documents hold: examples run as printed, and links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from resumekit.run.options import OptionKeywords, Options

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


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
    example = _blocks(ROOT / "README.md", "python")[0]
    script.write_text(LOOP + example, encoding="utf-8")
    assert "starting in" in _run_script(script)
    steps = sorted(path.name for path in (tmp_path / "runs" / "a").glob("step-*"))
    assert steps[-1] == "step-00000096"
    assert "nothing to do" in _run_script(script)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_the_documents_is_python(document: Path) -> None:
    for block in _blocks(document, "python"):
        compile(block, str(document), "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text(encoding="utf-8")):
        assert "://" in target or (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_command_that_installs_a_checkout_names_the_constraints(document: Path) -> None:
    for block in _blocks(document, "bash"):
        for line in block.splitlines():
            if "pip install" in line and " -e " in line:
                assert "-c constraints.txt" in line, line


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
