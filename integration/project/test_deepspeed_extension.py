"""A lock that a killed process left does not make all later DeepSpeed processes wait."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from deepspeed_extension import remove_stale

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_lock_of_a_process_that_is_gone_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    assert remove_stale(lock)
    assert not lock.exists()
    assert not remove_stale(lock)


def test_the_lock_of_a_process_that_compiles_stays(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with open(lock, "x", encoding="utf-8"):
        assert not remove_stale(lock)
    assert lock.exists()
