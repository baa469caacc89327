"""What every test here starts from, and the choice between a sample and the whole matrix."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="run every cell of the conformance matrix instead of a pairwise sample",
    )


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RESUMEKIT_")]:
        monkeypatch.delenv(name)
