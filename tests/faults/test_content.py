"""Content that is wrong under right digests: a typed error before anything live changes, or none.

Every encoded value of small complete checkpoints is changed in every way of a table, the digests
are computed again, and the program is resumed. What comes of it is judged by digests of the live
objects and by the batches, not by what the library says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crashlab.content import REPLACEMENTS, edit, mutations, reseal
from crashlab.judging import NEWEST, OLDER, Judge
from crashlab.programs import LOADERS, Program, make_run
from resumekit.errors import NoUsableCheckpointError, ResumekitError, UnsupportedValueError
from resumekit.run.resuming import finder
from resumekit.serialization.reading import read_payload
from resumekit.state import Checked
from resumekit.storage.directories import StepName, seal
from resumekit.storage.store import Store

RecordProperty = Callable[[str, object], None]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a program; tests change copies."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_run(kind, tmp_path_factory.mktemp(kind) / "run")
        return made[kind]

    return of


# Parts of all mutations of a kind: each takes minutes, and can be run alone.
NUM_PARTS = 11


def judge_of(kind: str, pristine: Path, scratch: Path) -> Judge:
    return Judge(partial(Program, kind, seed=9), pristine, scratch)


@pytest.mark.quick("tape-70-997", "wrapped-70-997")
@pytest.mark.parametrize(
    ("first", "apart"),
    [(70, 997)] + [pytest.param(n, NUM_PARTS, marks=pytest.mark.full) for n in range(NUM_PARTS)],
)
@pytest.mark.parametrize("kind", LOADERS)
def test_every_mutation_is_a_typed_error_before_anything_changes_or_loads(
    kind: str,
    first: int,
    apart: int,
    pristine: Callable[[str], Path],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    chosen = [*mutations(pristine(kind) / NEWEST)][first::apart]
    counts, wrong = judge_of(kind, pristine(kind), tmp_path).judged(chosen)
    name = f"{kind}, every {apart}th from {first}"
    record_property(f"mutations of content, {name}", f"{len(chosen)}: {dict(counts)}")
    assert not wrong
    # A wrapped loader of no known framework draws another order in the epoch after a resume.
    older = counts["passed over"] + counts["another run from the older checkpoint"]
    assert older > len(chosen) // 4


FACTS: dict[str, Any] = {
    "data": {},
    "progress": {},
    "progress as a number": 5,
    "progress.finished": -1,
    "progress.progress.step": 2,
    "progress.progress.batch": {"$float": "7ff8000000000000"},
    "data.train.batch": 1,
    "data.train.epoch": 0,
    "data.train": None,
    "rng.python": {},
    "best_metric.latest": [1],
    "variables.slots": [[]],
}


@pytest.mark.parametrize("name", FACTS)
def test_the_older_checkpoint_is_tried_and_one_line_names_component_and_field(
    name: str, pristine: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tuple(name.partition(" ")[0].split("."))
    copy = tmp_path / "run"
    shutil.copytree(pristine("tape"), copy)
    edit(copy / NEWEST, path, lambda parent, key: parent.update({key: FACTS[name]}))
    program = Program("tape", copy, seed=9)
    capsys.readouterr()
    with program.checkpointer:
        report = program.checkpointer.resume()
    (rejection,) = report.rejected
    assert (report.step, rejection.name) == (1, NEWEST)
    assert rejection.reason.startswith(path[0])
    assert path[-1] in rejection.reason
    lines = [line for line in capsys.readouterr().err.splitlines() if "passed over" in line]
    assert len(lines) == 1
    assert (copy / NEWEST).exists()  # its digests are right: no proof of damage
    assert not (copy / "quarantine").exists()


@pytest.mark.parametrize("name", FACTS)
def test_without_an_older_one_nothing_live_changes(
    name: str, pristine: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(pristine("tape"), copy)
    for older in copy.glob(f"{OLDER}*"):
        shutil.rmtree(older)
    path = tuple(name.partition(" ")[0].split("."))
    edit(copy / NEWEST, path, lambda parent, key: parent.update({key: FACTS[name]}))
    program = Program("tape", copy, seed=9)
    before = program.digest()
    with program.checkpointer, pytest.raises(NoUsableCheckpointError, match=path[0]):
        program.checkpointer.resume()
    assert program.digest() == before


def test_without_the_check_the_same_mutations_are_found_broken(
    pristine: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "check_contents", lambda *_: None)
    monkeypatch.setattr(Checked, "check_content", lambda *_: None)
    chosen = [
        each
        for each in mutations(pristine("tape") / NEWEST)
        if each.path[0] in ("progress", "data") and len(each.path) < 3
    ]
    _, wrong = judge_of("tape", pristine("tape"), tmp_path).judged(chosen[::4])
    assert len(wrong) > 3


# ---------------------------------------------------------------- any change, at any depth

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=9),
        st.sampled_from(list(REPLACEMENTS.values())),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$tuple", "$tensor", "$int", "$dict", "a"]), inner, max_size=2
        )
    ),
    max_leaves=5,
)


def _locations(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in [*items]:
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _locations(value)


def _any_change(data: st.DataObject, step: Path, file: str) -> None:
    """Changes one value at any depth of a JSON file, and seals it again."""
    content = json.loads((step / file).read_bytes())
    content.pop("digest", None)
    parent, key = data.draw(st.sampled_from([*_locations(content)]))
    if isinstance(parent, dict) and data.draw(st.booleans()):
        parent[data.draw(st.text(max_size=9))] = parent.pop(key)
    else:
        parent[key] = data.draw(VALUES)
    if file == "manifest.json":
        (step / file).write_bytes(seal(content))
    else:
        reseal(step, file, json.dumps(content).encode())


def _read(directory: Path, program: Program) -> None:
    """Reads every state of a checkpoint, and checks its content as a resume does."""
    reader = Store(directory).open_step(StepName.from_text(NEWEST))
    states: dict[str, Any] = {}
    for entry in reader.manifest.files:
        if entry.path.endswith(".json"):
            states |= read_payload(reader, str(Path(entry.path).parent), entry.writer)
    finder.check_contents(reader.manifest, states.items(), program.checkpointer._run.components)


def _explore(num: int, file: str, pristine: Path, tmp_path: Path) -> int:
    """Reads a checkpoint with so many changes of a file; gives how many there were."""
    copy = tmp_path / "run"
    shutil.copytree(pristine, copy)
    program = Program("tape", copy)
    kept = {path: path.read_bytes() for path in (copy / NEWEST).rglob("*.json")}
    num_read = 0

    @settings(
        max_examples=num, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def explore(data: st.DataObject) -> None:
        nonlocal num_read
        for path, content in kept.items():
            path.write_bytes(content)
        try:
            _any_change(data, copy / NEWEST, file)
        except (UnsupportedValueError, ValueError):
            return  # JSON has no such value
        num_read += 1
        with suppress(ResumekitError):
            _read(copy, program)

    explore()
    return num_read


FILES = ("manifest.json", "state/rank-00000.json", "optimizer/rank-00000.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "num", [pytest.param(33_334, marks=pytest.mark.full), 300], ids=["full", "some"]
)
def test_any_change_of_a_manifest_or_an_index_is_a_typed_error_or_loads(
    num: int,
    file: str,
    pristine: Callable[[str], Path],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    record_property(f"hypothesis inputs, {file}", _explore(num, file, pristine("tape"), tmp_path))


def _header(data: bytes, change: bytes, at: int) -> bytes:
    at %= max(1, min(len(data), 4096))
    return data[:at] + change + data[at + len(change) :]


@pytest.mark.parametrize(
    "num", [pytest.param(20_000, marks=pytest.mark.full), 100], ids=["full", "some"]
)
def test_any_change_of_a_data_file_is_a_typed_error_or_loads(
    num: int,
    pristine: Callable[[str], Path],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(pristine("tape"), copy)
    program, file = Program("tape", copy), "state/rank-00000.safetensors"
    intact = (copy / NEWEST / file).read_bytes()
    num_read = 0

    @settings(max_examples=num, deadline=None, database=None)
    @given(st.binary(min_size=1, max_size=40), st.integers(0, 4095))
    def explore(change: bytes, at: int) -> None:
        nonlocal num_read
        num_read += 1
        reseal(copy / NEWEST, file, _header(intact, change, at), blocks_of="state/rank-00000.json")
        with suppress(ResumekitError):
            _read(copy, program)

    explore()
    record_property(f"hypothesis inputs, {file}", num_read)
