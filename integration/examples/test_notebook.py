"""The notebook under nbmake: a session that ends is continued from the top, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from stock_cases import EXAMPLES

NUM_STEPS = 60  # of two epochs
RESULT = 'torch.save({"losses": losses, "weights": model.state_dict()}, "result.pt")'
COUNTED = "losses.append(loss.item())\n"
KILLED = f"{COUNTED}        if len(losses) == 45:\n            os.kill(os.getpid(), 9)\n"


STOPPED = (
    f"{COUNTED}        if len(losses) == 45 and not Path('stopped').exists():\n"
    "            Path('stopped').touch()\n"
    "            signal.raise_signal(signal.SIGINT)\n"
)


def notebook(parameters: dict[str, Any], changes: dict[str, str], from_cell: int) -> Any:
    """The notebook with other parameters and one more cell, which saves what came out.

    From a cell on, all are run again after the training, which may end with an error.
    """
    found = nbformat.read(EXAMPLES / "colab.ipynb", as_version=4)
    (chosen,) = [each for each in found.cells if "parameters" in each.metadata.get("tags", ())]
    chosen.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    for before, after in changes.items():
        (cell,) = [each for each in found.cells if before in each.source]
        cell.source = cell.source.replace(before, after)
    if from_cell:
        (last,) = [i for i, each in enumerate(found.cells) if COUNTED in each.source]
        cells = [each for each in found.cells[from_cell:] if each.cell_type == "code"]
        again = [nbformat.v4.new_code_cell(each.source) for each in cells]
        found.cells[last].metadata["tags"] = ["raises-exception"]
        found.cells[last + 1 :] = again
    found.cells.append(nbformat.v4.new_code_cell(RESULT, id="result"))
    return found


def run(
    directory: Path,
    *,
    fails: bool = False,
    changes: dict[str, str] | None = None,
    from_cell: int = 0,
    **parameters: Any,
) -> str:
    """What a session prints: all cells in a new kernel, in this directory."""
    directory.mkdir(exist_ok=True)
    path = directory / "session.ipynb"
    parameters = {"EPOCHS": 2, "DRIVE": "absent", **parameters}
    nbformat.write(notebook(parameters, changes or {}, from_cell), path)
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(path)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    outputs = [
        output
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", [])
    ]
    return "".join(output.get("text", "") for output in outputs)


def same(one: Path, other: Path) -> bool:
    """Whether every loss and every weight is the same, bit for bit."""
    ours, theirs = (torch.load(path / "result.pt", weights_only=True) for path in (one, other))
    assert len(ours["losses"]) == len(theirs["losses"]) == NUM_STEPS
    names = ours["weights"].keys() | theirs["weights"].keys()
    weights = [(ours["weights"][name], theirs["weights"][name]) for name in names]
    return ours["losses"] == theirs["losses"] and all(torch.equal(*pair) for pair in weights)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert f"step {NUM_STEPS}: " in run(directory)
    return directory


def test_a_session_whose_time_is_over_continues_exactly(
    tmp_path: Path, uninterrupted: Path
) -> None:
    said = run(tmp_path, SESSION_SECONDS=0)
    assert "starting in" in said
    assert "step 1: " in said
    assert "run this notebook again" in said
    said = run(tmp_path)
    assert "resuming at step 1 " in said
    assert said.endswith("finished\n")
    assert same(tmp_path, uninterrupted)


@pytest.mark.full
def test_a_session_that_is_killed_continues_exactly_and_a_finished_run_stays(
    tmp_path: Path, uninterrupted: Path
) -> None:
    changes = {COUNTED: KILLED, "import sys\n": "import os\nimport sys\n"}
    run(tmp_path, fails=True, changes=changes, SAVE_EVERY=10)
    assert "resuming at step 40 " in run(tmp_path)
    assert same(tmp_path, uninterrupted)
    said = run(tmp_path)
    assert "nothing to do" in said
    assert said.endswith("finished\n")
    assert same(tmp_path, uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize("from_cell", [4, 6], ids=["model", "training"])
def test_a_stopped_cell_continues_exactly_in_the_same_kernel(
    tmp_path: Path, uninterrupted: Path, from_cell: int
) -> None:
    changes = {COUNTED: STOPPED, "import sys\n": "import signal\nimport sys\n"}
    said = run(tmp_path, changes=changes, from_cell=from_cell)
    assert "SIGINT: saved at step 45" in said
    assert "resuming at step 45 " in said
    assert same(tmp_path, uninterrupted)


@pytest.mark.full
def test_a_session_whose_disk_is_lost_continues_from_the_drive(
    tmp_path: Path, uninterrupted: Path
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    run(tmp_path / "first", SESSION_SECONDS=0, DRIVE=str(drive))
    assert "resuming at step 1 " in run(tmp_path / "second", DRIVE=str(drive))
    assert same(tmp_path / "second", uninterrupted)


@pytest.mark.full
def test_without_the_random_state_of_the_first_session_it_differs(
    tmp_path: Path, uninterrupted: Path
) -> None:
    run(tmp_path, SESSION_SECONDS=0)
    run(tmp_path, changes={"mirror=mirror,": 'mirror=mirror, exclude={"rng"},'})
    assert not same(tmp_path, uninterrupted)
