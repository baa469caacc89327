"""What every test here starts from, and the choice between a sample and the whole matrix."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every cell of the conformance matrix instead of a pairwise sample",
    )


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
