"""What every test here starts from, and the choice between a sample and the whole matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from script_judge import ScriptJudge

from resumekit.testing import DEFAULT_PRELOAD, Kit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every cell of the conformance matrix instead of a pairwise sample",
    )


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """The kit of a file, warm for all its tests.

    The file says as ``PRELOAD`` what is imported once for them (see ``preloads``), and as
    ``PEERS_SECONDS`` how long the other ranks go on after one of them died.
    """
    settings: dict[str, Any] = {"preload": getattr(request.module, "PRELOAD", DEFAULT_PRELOAD)}
    if hasattr(request.module, "PEERS_SECONDS"):
        settings["peers_seconds"] = request.module.PEERS_SECONDS
    with Kit(tmp_path_factory.mktemp("kit"), **settings) as kit:
        yield kit


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


@pytest.fixture(scope="module")
def judge(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptJudge]:
    """The judge of the scripts of a file; ``PRELOAD`` as for the kit."""
    preload = getattr(request.module, "PRELOAD", DEFAULT_PRELOAD)
    with ScriptJudge(tmp_path_factory.mktemp("scripts"), preload=preload) as judge:
        yield judge
