"""The judge of the shapes, one for all files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judge import ForkedLaunches, Judge


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    launches = ForkedLaunches()
    yield Judge(tmp_path_factory.mktemp("shapes"), launches)
    launches.close()
