"""The fragments of the pages, as printed, inside programs that are stopped and continued.

Each frame of ``frames`` is a program; a line that ends with ``# fragment 2`` is replaced by the
second fragment of a page, or by a line of it (``# fragment 2.1``). Most record their losses: a run
that is stopped and started again must record those of an uninterrupted one.
"""

from __future__ import annotations

import os
import re
import runpy
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from documents import PAGES, ROOT, START_PAGES, Document
from place_servers import Server
from preloads import DEEPSPEED, LIGHTNING, TORCH, TRAINER

from resumekit.record.trace import INJECT_VARIABLE
from resumekit.testing.task import Task, target_of

FRAMES = Path(__file__).with_name("frames")
TIMEOUT_SECONDS = 300.0
SIGTERM, SIGKILL, SIGUSR1 = 143, -9, 138
ON_A_CPU = ('init_device_mesh("cuda"', 'init_device_mesh("cpu"')

FRAMEWORK_IS_TORCH = (
    ("world_sizes = (1, 2)", "world_sizes = (1,)"),
    ('("framework", "resumekit.adapters.framework")', '("resumekit.adapters.torch",)'),
)


@dataclass(frozen=True)
class Frame:
    """A program around fragments of a page.

    Args:
        page: its path.
        name: of the file in ``frames``.
        stopped: the exit status of the first of two launches; None where there is one alone.
        ranks: the number of ranks of each of the two.
        same: whether both launches together must record what an uninterrupted one does.
        preload: what the warm server imports.
        needs: packages without which it is skipped.
        replaced: texts of the page that this machine needs otherwise.
    """

    page: str
    name: str
    stopped: int | None = SIGTERM
    ranks: tuple[int, int] = (1, 1)
    same: bool = True
    preload: tuple[str, ...] = TORCH
    needs: tuple[str, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{Path(self.page).stem}-{self.name}"

    @property
    def document(self) -> Document:
        return Document(ROOT / self.page)


DATA, DISTRIBUTED = "docs/explanation/data.md", "docs/how-to/distributed.md"
PLACES, CONTRACT = "docs/how-to/places.md", "docs/explanation/contract.md"
FRAMES_OF_PAGES = (
    Frame("README.md", "two_lines"),
    Frame("README.md", "trainer_line", preload=TRAINER),
    Frame("README.md", "lightning_argument", preload=LIGHTNING),
    Frame("CONTRIBUTING.md", "conformance", None, replaced=FRAMEWORK_IS_TORCH),
    Frame("docs/index.md", "two_lines_open"),
    Frame("docs/index.md", "trainer_line", preload=TRAINER),
    Frame("docs/index.md", "lightning_argument", preload=LIGHTNING),
    Frame("docs/start/pytorch.md", "epochs"),
    Frame("docs/start/pytorch.md", "named_objects"),
    Frame(CONTRACT, "report_of_resume"),
    Frame(CONTRACT, "custom_component"),
    Frame(DATA, "keyed"),
    Frame(DATA, "by_its_state", needs=("torchdata",)),
    Frame(DATA, "other_world", ranks=(2, 1), same=False),
    Frame(DATA, "resplit", ranks=(2, 1), same=False),
    Frame(DATA, "several_loaders"),
    Frame(DATA, "accumulation"),
    Frame("docs/explanation/live-state.md", "variables"),
    Frame("docs/how-to/compare.md", "set_in_the_loop", same=False),
    Frame("docs/how-to/dcp.md", "dcp", None, (2, 2)),
    Frame(DISTRIBUTED, "tensor_parallel", ranks=(4, 4), replaced=(ON_A_CPU, ("(2, 4)", "(2, 2)"))),
    Frame(DISTRIBUTED, "pipeline", ranks=(4, 4), replaced=(ON_A_CPU,)),
    Frame(DISTRIBUTED, "custom_trainer", ranks=(4, 4)),
    Frame("docs/how-to/gpus.md", "deterministic"),
    Frame("docs/how-to/import.md", "imported", SIGKILL, preload=TRAINER),
    Frame("docs/how-to/notebooks.md", "session", 0),
    Frame(PLACES, "mirrored", needs=("s3fs",)),
    Frame(PLACES, "two_places", needs=("s3fs",), replaced=(("/disk2", "disk2"),)),
    Frame(PLACES, "in_memory", SIGKILL),
    Frame("docs/how-to/preemption.md", "preempted"),
    Frame("docs/how-to/preemption.md", "leave_on", SIGUSR1),
    Frame("docs/how-to/prove.md", "traced", None),
    Frame("docs/how-to/saving.md", "best", None),
    Frame("docs/how-to/saving.md", "in_the_background"),
    Frame("docs/reference/deepspeed.md", "two_engines", preload=DEEPSPEED),
    Frame("docs/reference/format.md", "step_files", None),
    Frame("docs/reference/lightning.md", "fabric", preload=LIGHTNING),
    Frame("docs/reference/transformers.md", "pretrained", None, preload=TRAINER),
    Frame("docs/reference/transformers.md", "adapter", None, preload=TRAINER, needs=("peft",)),
)
QUICK = ("README-two_lines", "saving-best", "live-state-variables", "dcp-dcp")
HOLE = re.compile(r"^( *).*# fragment (\d+)(?:\.(\d+))?\n", re.MULTILINE)


def program_of(frame: Frame) -> str:
    """The frame with the fragments in their places."""
    fragments = frame.document.fragments()

    def fill(hole: re.Match[str]) -> str:
        text = fragments[int(hole[2]) - 1]
        if hole[3]:
            text = text.splitlines(keepends=True)[int(hole[3]) - 1].lstrip()
        for before, after in frame.replaced:
            text = text.replace(before, after)
        return textwrap.indent(text, hole[1])

    return HOLE.sub(fill, (FRAMES / f"{frame.name}.py").read_text(encoding="utf-8"))


def execute(directory: str) -> None:
    """Runs the program of a directory, as ``python train.py`` does there."""
    os.chdir(directory)
    runpy.run_path("train.py", run_name="__main__")


@dataclass
class Place:
    """A directory in which the program of a frame is launched.

    Args:
        directory: new.
        frame: of the program.
        warm: the servers of all tests.
        variables: for the processes.
    """

    directory: Path
    frame: Frame
    warm: Any
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir()
        (self.directory / "train.py").write_text(program_of(self.frame), encoding="utf-8")

    def launch(self, number: int, status: int = 0, *, num_ranks: int = 1) -> None:
        """Fails unless each rank ends with an exit status."""
        variables = {"FRAME_LAUNCH": str(number), **self.variables}
        logs = [self.directory / f"log-{number}-{rank}.txt" for rank in range(num_ranks)]
        tasks = [
            Task(target_of(execute), str(self.directory), {}, variables, str(log)) for log in logs
        ]
        server = self.warm.server(self.frame.preload)
        ended = server.run(tasks, TIMEOUT_SECONDS, expected=(status,))
        printed = "".join(log.read_text(encoding="utf-8")[-4000:] for log in logs)
        assert [ended.get(rank) for rank in range(num_ranks)] == [status] * num_ranks, printed

    def recorded(self, number: int, rank: int = 0) -> list[str]:
        """What a rank of a launch has recorded."""
        return (self.directory / f"records-{number}-{rank}.txt").read_text().splitlines()


def difference(whole: Place, stopped: Place) -> str:
    """Where two launches recorded something else than an uninterrupted one; empty where nowhere."""
    for rank in range(whole.frame.ranks[0]):
        expected = whole.recorded(0, rank)
        first, second = stopped.recorded(1, rank), stopped.recorded(2, rank)
        if not 0 < len(first) < len(expected) > len(second) > 0:
            return f"rank {rank}: {len(first)} and {len(second)} of {len(expected)}"
        if len(first) + len(second) < len(expected):
            return f"rank {rank}: left out"
        if first != expected[: len(first)] or second != expected[-len(second) :]:
            return f"rank {rank}: other values"
    return ""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], dict[str, str]]]:
    """Starts a server; the variables under which s3://bucket is there."""
    servers: list[Server] = []

    def begin() -> dict[str, str]:
        servers.append(Server("s3", tmp_path / f"s3-{len(servers)}"))
        return servers[-1].variables

    yield begin
    for server in servers:
        server.kill()


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("frame", FRAMES_OF_PAGES, ids=str)
def test_the_fragments_of_a_page_do_what_it_says(
    frame: Frame, tmp_path: Path, warm: Any, serve: Callable[[], dict[str, str]]
) -> None:
    for package in frame.needs:
        pytest.importorskip(package)
    num_ranks, num_ranks_then = frame.ranks
    variables = serve() if "s3fs" in frame.needs else {}
    whole = Place(tmp_path / "whole", frame, warm, variables)
    whole.launch(0, num_ranks=num_ranks)
    if frame.stopped is None:
        return
    variables = serve() if "s3fs" in frame.needs else {}
    place = Place(tmp_path / "stopped", frame, warm, variables)
    place.launch(1, frame.stopped, num_ranks=num_ranks)
    place.launch(2, num_ranks=num_ranks_then)
    if frame.same:
        assert not difference(whole, place)


def test_without_the_optimizer_a_program_continues_otherwise(tmp_path: Path, warm: Any) -> None:
    (frame,) = (each for each in FRAMES_OF_PAGES if each.name == "two_lines")
    whole = Place(tmp_path / "whole", frame, warm)
    whole.launch(0)
    place = Place(tmp_path / "stopped", frame, warm)
    place.launch(1, SIGTERM)
    place.variables[INJECT_VARIABLE] = "optimizer"
    place.launch(2)
    assert difference(whole, place) == "rank 0: other values"


# ---------------------------------------------------------------- none is forgotten

# Files that tests import, and whose code a page shows as a fragment.
SHOWN = (ROOT / "integration" / "torch" / "torchtitan_manager.py",)


def forgotten(document: Document) -> list[str]:
    """The blocks and lines of Python on a page that no test executes."""
    path = document.path.relative_to(ROOT)
    tests = (ROOT / "integration" / "how_to").glob("test_*.py")
    run_whole = [ROOT / "docs" / "start" / f"{name}.md" for name in START_PAGES]
    for test in tests:
        names = re.findall(r"\bPage\(\"([\w-]+)\"\)", test.read_text(encoding="utf-8"))
        run_whole += [ROOT / "docs" / "how-to" / f"{name}.md" for name in names]
    lost = [] if document.path in run_whole else [f"{path}: {x}" for x in document.programs()]
    frames = [frame for frame in FRAMES_OF_PAGES if frame.page == path.as_posix()]
    holes = {hole for frame in frames for hole in holes_of(frame)}
    for number, text in enumerate(document.fragments(), start=1):
        if any(each.read_text(encoding="utf-8").endswith(text) for each in SHOWN):
            continue
        for line, code in enumerate(text.splitlines(), start=1):
            if not {(number, None), (number, line)} & holes and not code.lstrip().startswith("..."):
                lost.append(f"{path}: line {line} of fragment {number}")
    return lost


def holes_of(frame: Frame) -> list[tuple[int, int | None]]:
    """The fragments that a frame executes, and the lines of others."""
    found = HOLE.findall((FRAMES / f"{frame.name}.py").read_text(encoding="utf-8"))
    return [(int(number), int(line) if line else None) for _, number, line in found]


def test_no_block_of_python_is_forgotten() -> None:
    lost = [each for path in PAGES for each in forgotten(Document(path))]
    assert not lost, "\n".join([*lost, "see integration/documents/test_fragments.py"])


@pytest.mark.parametrize(
    ("page", "first_line", "expected"),
    [
        ("docs/how-to/saving.md", "ckpt.wait()", "line 1 of fragment 4"),
        ("docs/how-to/gpus.md", "# forgotten.py", "forgotten.py"),
    ],
)
def test_a_new_block_is_found(page: str, first_line: str, expected: str) -> None:
    document = Document(ROOT / page)
    document.text += f"\n```python\n{first_line}\n```\n"
    assert forgotten(document) == [f"{page}: {expected}"]


def test_every_frame_belongs_to_a_page_whose_texts_it_has() -> None:
    assert {f"{frame.name}.py" for frame in FRAMES_OF_PAGES} == {
        x.name for x in FRAMES.glob("*.py")
    }
    for frame in FRAMES_OF_PAGES:
        fragments = frame.document.fragments()
        text = "".join(fragments[number - 1] for number, _ in holes_of(frame))
        assert all(before in text for before, _ in frame.replaced), frame
