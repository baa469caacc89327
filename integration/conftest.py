"""What every test here starts from: its processes, its environment and the quick set."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from deepspeed_extension import compile_once
from preload_schedule import PreloadScheduling
from quick_set import mark_matrices
from script_judge import ScriptJudge
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from resumekit.testing import DEFAULT_PRELOAD, Kit
from resumekit.testing.launchers import ForkServer

# Warm servers that are kept; files that import the same follow one another.
NUM_KEPT = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every cell of the conformance matrix instead of a pairwise sample",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Of processes that tests start: with several threads, a few in a hundred compute other bits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The processes that tests start find the training functions as the tests do.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(config.rootpath / folder) for folder in config.getini("pythonpath")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([*given, *folders])))


@pytest.hookimpl(optionalhook=True)  # with `-p no:xdist` nobody calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Whole files, by what they import, wherever they were to stay whole."""
    return PreloadScheduling(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `full` what a matrix leaves out; sorts the files by what they import."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    mark_matrices(functions)
    imports: dict[object, int] = {}
    items.sort(key=lambda item: imports.setdefault(_preload_of(item), len(imports)))


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test start anything
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles DeepSpeed's extension, so that no launch is killed while it does."""
    is_used = "deepspeed" in item.nodeid or "deepspeed" in _preload_of(item)
    if is_used and find_spec("deepspeed"):
        compile_once()


def _preload_of(item: pytest.Item) -> tuple[str, ...]:
    """What the warm server of a test imports; a file names it, or a suite."""
    named = getattr(getattr(item, "cls", None), "preload", ())
    return tuple(named) or preload_of(getattr(item, "module", None))


def preload_of(module: ModuleType | None) -> tuple[str, ...]:
    """What the warm server of a file imports."""
    return getattr(module, "PRELOAD", DEFAULT_PRELOAD)


class Warm:
    """The most recent kits of this process, by what they import."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._kept: OrderedDict[tuple[Any, ...], Kit] = OrderedDict()

    def kit(self, preload: Sequence[str], **settings: Any) -> Kit:
        """The kit that imports these modules; the oldest of the others is closed."""
        key = (tuple(preload), *sorted(settings.items()))
        if key not in self._kept:
            while len(self._kept) >= NUM_KEPT:
                self._kept.popitem(last=False)[1].close()
            directory = self._factory.mktemp("kit")
            self._kept[key] = Kit(directory, preload=preload, **settings)
        self._kept.move_to_end(key)
        return self._kept[key]

    def server(self, preload: Sequence[str]) -> ForkServer:
        """The server of the kit that imports these modules."""
        return self.kit(preload)._server

    def close(self) -> None:
        for each in self._kept.values():
            each.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    warm = Warm(tmp_path_factory)
    yield warm
    warm.close()


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest, warm: Warm) -> Kit:
    """The kit of a file, warm for all its tests.

    The file says as ``PRELOAD`` what is imported once for them (see ``preloads``), and as
    ``PEERS_SECONDS`` how long the other ranks go on after one of them died.
    """
    settings = {}
    if hasattr(request.module, "PEERS_SECONDS"):
        settings["peers_seconds"] = request.module.PEERS_SECONDS
    return warm.kit(preload_of(request.module), **settings)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, warm: Warm) -> ForkServer:
    """The warm server of a file; ``PRELOAD`` as for the kit."""
    return warm.server(preload_of(request.module))


@pytest.fixture(scope="module")
def judge(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> ScriptJudge:
    """The judge of the scripts of a file."""
    return ScriptJudge(tmp_path_factory.mktemp("judge"), server)


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
