"""What every test here starts from, and which cells the quick set takes of each matrix."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest
from quick_set import COLLECTED, is_left_out, is_sampled
from script_judge import ScriptJudge

from resumekit.testing import DEFAULT_PRELOAD, Kit

# Negative controls for which several ranks matter: what each rank has of its own. The others hold
# the same on every rank, and are left out on one rank only.
OF_EACH_RANK = ("model", "optimizer", "rng", "data")

# Warm servers that are kept: files that follow one another often import the same.
NUM_KEPT = 2

T = TypeVar("T", Kit, ScriptJudge)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every cell of the conformance matrix instead of a pairwise sample",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The processes that tests start find the training functions as the tests do.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(config.rootpath / folder) for folder in config.getini("pythonpath")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([*given, *folders])))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `full` what the quick set leaves out."""
    COLLECTED.clear()
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        file, _, test = item.nodeid.removeprefix("integration/").partition(".py::")
        COLLECTED.setdefault(file, []).append(test)
        if is_left_out(file, test):
            item.add_marker("full")
        elif isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            params: dict[str, Any] = item.callspec.params
            component = params.get("component", OF_EACH_RANK[0])
            if params.get("world_size", 1) > 1 and component not in OF_EACH_RANK:
                item.add_marker("full")
            elif is_sampled(test) or getattr(item.cls, "matrices", {}).keys() & params.keys():
                matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in matrices.values():
        kept = _one_of_each([_values(cell.callspec.params) for cell in cells])
        for index, cell in enumerate(cells):
            if index not in kept:
                cell.add_marker("full")


def _values(params: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The parameters of a cell; those of a matrix come as one mapping."""
    found: set[tuple[str, str]] = set()
    for name, value in params.items():
        inner = value.items() if isinstance(value, Mapping) else [(name, value)]
        found.update((key, repr(one)) for key, one in inner)
    return found


def _one_of_each(rows: Sequence[set[tuple[str, str]]]) -> set[int]:
    """Greedily the rows in which every value occurs that occurs in any."""
    missing = set().union(*rows)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(rows[index] & missing))
        chosen.add(best)
        missing -= rows[best]
    return chosen


class _Warm:
    """The most recent kits or judges of this process, by what they import."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def get(self, kind: type[T], **settings: Any) -> T:
        """One of these settings; the oldest of the others is closed."""
        key = (kind, *sorted(settings.items()))
        if key not in self._kept:
            while len(self._kept) >= NUM_KEPT:
                self._kept.popitem(last=False)[1].__exit__(None, None, None)
            self._kept[key] = kind(self._factory.mktemp(kind.__name__), **settings)
        self._kept.move_to_end(key)
        found: T = self._kept[key]
        return found

    def close(self) -> None:
        for each in self._kept.values():
            each.__exit__(None, None, None)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Warm]:
    warm = _Warm(tmp_path_factory)
    yield warm
    warm.close()


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest, warm: _Warm) -> Kit:
    """The kit of a file, warm for all its tests.

    The file says as ``PRELOAD`` what is imported once for them (see ``preloads``), and as
    ``PEERS_SECONDS`` how long the other ranks go on after one of them died.
    """
    settings: dict[str, Any] = {"preload": getattr(request.module, "PRELOAD", DEFAULT_PRELOAD)}
    if hasattr(request.module, "PEERS_SECONDS"):
        settings["peers_seconds"] = request.module.PEERS_SECONDS
    return warm.get(Kit, **settings)


@pytest.fixture(scope="module")
def judge(request: pytest.FixtureRequest, warm: _Warm) -> ScriptJudge:
    """The judge of the scripts of a file; ``PRELOAD`` as for the kit."""
    return warm.get(ScriptJudge, preload=getattr(request.module, "PRELOAD", DEFAULT_PRELOAD))


@pytest.fixture(autouse=True)
def _an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without our settings; what a framework sets in a test, such as RANK, ends with that test."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("RESUMEKIT_")]:
        monkeypatch.delenv(name)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
