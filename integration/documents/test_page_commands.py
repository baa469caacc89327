"""The commands of resumekit on the pages, as printed, on small runs; and what the pages say of it.

The page on migration has a test of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from documents import PAGES, ROOT, START_PAGES, Document, StartPage
from place_servers import Server

from resumekit.html_report import find_browser

TRAININGS = Path(__file__).with_name("trainings")
# Pages whose commands another test executes.
OTHER_TESTS = {
    "migrate": "integration/how_to",
    "fine-tuning": "integration/how_to/test_fine_tuning.py",
    "optuna": "integration/how_to/test_optuna.py",
}
NOT_HERE = {"resumekit demo --device cuda": "needs a GPU"}
# Exit statuses: two runs differ; loop.py has a generator that nothing can read.
STATUSES = {"diff": 1, "doctor": 1}
# Of a directory; others are named like theirs.
PACKAGES = dict.fromkeys(("loop", "short", "average", "pytorch"), "torch")
PACKAGES |= dict.fromkeys(("trainer", "attached"), "transformers")
SCRIPTS = dict.fromkeys(("trainer", "attached"), "trainer.py")
# What has been run in a directory before.
MADE_BY = {
    "loop": ("python train.py", "python train.py runs/b --lr 1e-3"),
    "average": ("python train.py --ema",),
    "trainer": ("python train.py",),
    "attached": ("resumekit run --dir runs/a --save-every 100 -- python train.py",),
}
# What a command must print.
PRINTED = {
    "diff": "differ",
    "demo": "EXACT",
    "doctor": "a checkpoint: ",
    "history": "finished",
    "inspect": "step-00000540",
    "list": "step-00000540",
    "prove": "EXACT",
    "replay": "identical",
    "verify": "step-00000540",
}


def commands() -> list[tuple[str, str]]:
    """A directory of ``Trees`` and a command that is executed in it, each once."""
    found: dict[tuple[str, str], None] = {}
    for path in PAGES:
        if path.stem not in OTHER_TESTS:
            for command in Document(path).commands():
                found[tree_of(path, command), command] = None
    return list(found)


def tree_of(path: Path, command: str) -> str:
    """The directory that a command needs."""
    if path.parent.name == "start" and "prove --kills" in command:
        return "trainer" if "--with-resumekit" in command else path.stem
    if re.search(r" import |--with-resumekit| run ", command):
        return "trainer"
    if " prove " in command:
        return "short"
    if "--to pretrained" in command:
        return "attached"
    return "average" if "--weights ema" in command else "loop"


class Trees:
    """Directories with a train.py and what it has written, each made once.

    Args:
        directory: new.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def copy(self, name: str, to: Path) -> Path:
        """A copy of one."""
        source = self._directory / name
        if not source.exists():
            self._make(name, source)
        shutil.copytree(source, to, symlinks=True)
        return to

    def _make(self, name: str, directory: Path) -> None:
        directory.mkdir()
        script = (TRAININGS / SCRIPTS.get(name, "loop.py")).read_text(encoding="utf-8")
        if name in START_PAGES:
            script = StartPage(name).script
        elif name == "short":
            script = script.replace("540", "60")
        (directory / "train.py").write_text(script, encoding="utf-8")
        for command in MADE_BY.get(name, ()):
            run(command, directory)


def run(
    command: str, directory: Path, status: int = 0, variables: Mapping[str, str] | None = None
) -> str:
    """What a command prints; fails if it ends otherwise."""
    known = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={**os.environ, **known, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("trees"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables under which s3://bucket is a server of this machine."""
    server = Server("s3", tmp_path / "s3")
    yield server.variables
    server.kill()


@pytest.mark.full
@pytest.mark.parametrize(("tree", "command"), commands())
def test_a_command_does_what_its_page_says(
    tree: str, command: str, trees: Trees, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if command in NOT_HERE:
        pytest.skip(NOT_HERE[command])
    pytest.importorskip(PACKAGES.get(tree, tree))
    if "--png" in command:
        find_browser()
    place = trees.copy(tree, tmp_path / "place")
    variables: dict[str, str] = {}
    if "s3://" in command:
        pytest.importorskip("s3fs")
        variables = request.getfixturevalue("served")
        if " mirror " not in command:
            run("resumekit mirror runs/a s3://bucket/runs/a", place, variables=variables)
    _, name, *words = command.split()
    if name in ("fork", "fetch"):
        shutil.rmtree(place / words[1])
    if "with-resumekit" in command or name == "run":
        shutil.rmtree(place / "output")
    printed = run(
        command.replace("per-node=8", "per-node=2"), place, STATUSES.get(name, 0), variables
    )
    expected = "caught" if "--inject" in words else PRINTED.get(name, "")
    assert expected in printed, printed[-3000:]
    if name in ("export", "fork", "fetch", "import"):
        assert (place / words[1]).exists()
    if name in ("fork", "fetch", "import", "run"):
        assert list((place / "runs").glob("[ab]/step-*"))
    if name == "report":
        assert (place / ("report.html" if "-o" in words else "a.html")).exists()
    if "--html" in words:
        assert (place / words[words.index("--html") + 1]).exists()


def without_numbers(text: str) -> list[str]:
    """The lines, in which numbers, units and the sizes of blanks do not matter."""
    found = re.sub(r"\d[\d.]*( ([KMGT]?B|m?s|min|h)\b)?", "N", text)
    return [" ".join(line.split()) for line in found.splitlines()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "command", "some"),
    [
        ("docs/reference/commands.md", "resumekit doctor -- python train.py", ""),
        ("docs/reference/commands.md", "resumekit history runs/a", r"attempt|goodput"),
        ("docs/how-to/replay.md", "resumekit replay runs/a --from 500 --steps 40", ""),
    ],
)
def test_a_page_shows_what_a_command_prints(
    page: str, command: str, some: str, trees: Trees, tmp_path: Path
) -> None:
    """All lines that the page shows, or those that begin so, with other numbers."""
    document = Document(ROOT / page)
    (command,) = {each for each in document.commands() if each.startswith(command)}
    block = r"(?:resumekit [^\n]*\n)*```\n\n```text\n"  # or its output follows a prompt
    shown = re.search(
        rf"(?:\$ {re.escape(command)}\n|^{re.escape(command)}\n{block})(.*?)^```$",
        document.text,
        re.DOTALL | re.MULTILINE,
    )
    assert shown
    place = trees.copy("loop", tmp_path / "place")
    printed = without_numbers(run(command, place, STATUSES.get(command.split()[1], 0)))
    lines = [line for line in without_numbers(shown[1]) if re.match(some, line)]
    assert len(lines) >= 2
    assert [line for line in lines if line not in printed] == [], printed
