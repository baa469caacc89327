"""Two thousand checkpoints in one run directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from failpoints import FailpointFileSystem

from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

pytestmark = pytest.mark.full
OpenStore = Callable[..., Store]
Save = Callable[..., StepName]
NUMBER = 2_000


@pytest.fixture
def directory(store: Store, save: Save, run_directory: Path) -> Path:
    for step in range(1, NUMBER + 1):
        save(store, step)
    store.release()
    return run_directory


def test_a_launch_reads_no_more_of_them_than_one_and_deletes_the_others(
    directory: Path, open_store: OpenStore, save: Save
) -> None:
    counting = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=counting)
    store.acquire()
    assert len(store.step_names()) == NUMBER
    store.open_step(store.step_names()[0]).verify()
    assert counting.counts["open"] < 10
    policy = RetentionPolicy(keep_latest=2)
    save(store, NUMBER + 1, policy=policy)
    assert store.step_names() == [StepName(NUMBER + 1), StepName(NUMBER)]
    num_opened = counting.counts["open"]
    assert num_opened < 1.1 * NUMBER  # each manifest once: nothing else proves what may be deleted
    save(store, NUMBER + 2, policy=policy)
    assert counting.counts["open"] < num_opened + 10


def test_damage_of_all_but_the_oldest_is_passed_over(
    directory: Path, open_store: OpenStore
) -> None:
    for path in directory.glob("step-*/state/rank-00000.json"):
        if path.parts[-3] != "step-00000001":
            path.write_bytes(b"")
    store = open_store()
    store.acquire()
    shutil.rmtree(directory / "step-00002000")
    done = subprocess.run(
        [sys.executable, "-m", "resumekit.cli", "list", "--json", str(directory)],
        capture_output=True,
        text=True,
    )
    rows = json.loads(done.stdout)
    assert len(rows) == NUMBER - 1
    assert done.returncode == 1
