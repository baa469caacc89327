"""What every test here starts from: an environment without any of resumekit's own variables."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RESUMEKIT_")]:
        monkeypatch.delenv(name)
