"""The memory of asynchronous saves: allocated once, grown with the state, judged by the limits."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from resumekit.run.saving.snapshot import Snapshot, available_memory
from resumekit.serialization.writing import Payload

GIB = 1 << 30


def payloads(num_elements: int) -> list[Any]:
    return [
        Payload.of_states("model", 0, {"model": {"w": torch.arange(num_elements)}}),
        Payload.of_states("optimizer", 0, {"optimizer": {"m": torch.ones(num_elements)}}),
        Payload.of_states("state", 0, {"progress": {"step": 3}}),
        Payload("model", 0, small_files={"config.json": b"{}"}),
    ]


def test_the_memory_is_allocated_by_the_first_copy_and_reused() -> None:
    snapshot = Snapshot()
    assert snapshot.num_bytes == 0
    first = payloads(1000)
    needed = snapshot.needed_bytes(first)
    assert needed == (4096 + 8192) + (4096 + 4096)
    snapshot.take(first)
    size = snapshot.num_bytes
    assert needed <= size <= 1.1 * needed
    snapshot.take(payloads(900))
    assert snapshot.num_bytes == size
    snapshot.take(payloads(100_000))
    assert snapshot.num_bytes > size
    snapshot.release()
    assert snapshot.num_bytes == 0


def test_every_data_file_begins_at_a_page() -> None:
    snapshot = Snapshot()
    taken = payloads(1000)
    addresses = []
    for each in taken[:2]:
        copy = each.copy_into

        def noted(memory: memoryview, *, num_threads: int, copy: Any = copy) -> None:
            addresses.append(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
            copy(memory, num_threads=num_threads)

        each.copy_into = noted
    snapshot.take(taken)
    assert [address % 4096 for address in addresses] == [0, 0]
    assert addresses[1] - addresses[0] == taken[0].image_bytes


def test_growing_never_holds_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot()
    snapshot.take(payloads(1000))
    sizes = []
    allocate = Snapshot._allocate

    def noted(self: Snapshot, num_bytes: int) -> None:
        sizes.append(self.num_bytes)
        allocate(self, num_bytes)

    monkeypatch.setattr(Snapshot, "_allocate", noted)
    snapshot.take(payloads(100_000))
    assert sizes == [0]


def test_state_without_tensors_takes_no_memory() -> None:
    snapshot = Snapshot()
    snapshot.take(payloads(0)[2:])
    assert snapshot.num_bytes == 0


def test_a_forked_child_has_no_snapshot() -> None:
    snapshot = Snapshot()
    snapshot.take(payloads(1000))
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(snapshot.num_bytes != 0)
    assert os.waitpid(child, 0)[1] == 0
    assert snapshot.num_bytes > 0
    snapshot.take(payloads(1000))


# Limits of memory


def machine(root: Path, available: int, cgroup: str = "") -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       99999999 kB\nMemAvailable:   {available >> 10} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)


def group(directory: Path, limit: object, usage: int, *, cache: int = 0, version: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon {usage - cache}\n{names[2]} {cache}\n")


def test_without_a_control_group_the_machine_counts(tmp_path: Path) -> None:
    machine(tmp_path, 5 * GIB)
    assert available_memory(tmp_path) == 5 * GIB


def test_where_nothing_is_known_nothing_fits(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert not Snapshot(tmp_path).fits(1)
    assert Snapshot(tmp_path).fits(0)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_namespaced", [True, False])
def test_the_limit_of_the_control_group_counts(
    version: int, is_namespaced: bool, tmp_path: Path
) -> None:
    path = "/" if is_namespaced else "/system.slice/job"
    line = f"4:cpu,memory:{path}\n" if version == 1 else f"0::{path}\n"
    machine(tmp_path, 50 * GIB, f"12:cpuset:/elsewhere\n{line}")
    mount = tmp_path / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    group(mount / path.lstrip("/"), 8 * GIB, 6 * GIB, cache=GIB, version=version)
    assert available_memory(tmp_path) == 3 * GIB


def test_a_path_from_outside_the_container_leads_to_the_mount(tmp_path: Path) -> None:
    machine(tmp_path, 50 * GIB, "0::/kubepods/pod1/container2\n")
    group(tmp_path / "sys/fs/cgroup", 8 * GIB, 6 * GIB)
    assert available_memory(tmp_path) == 2 * GIB


def test_the_smallest_limit_above_the_process_counts(tmp_path: Path) -> None:
    machine(tmp_path, 50 * GIB, "0::/job/step\n")
    group(tmp_path / "sys/fs/cgroup/job/step", "max", GIB)
    group(tmp_path / "sys/fs/cgroup/job", 4 * GIB, 3 * GIB)
    assert available_memory(tmp_path) == GIB
    group(tmp_path / "sys/fs/cgroup/job", 2 * GIB, 3 * GIB)
    assert available_memory(tmp_path) == 0


def test_the_unlimited_group_of_version_1_is_no_limit(tmp_path: Path) -> None:
    machine(tmp_path, 50 * GIB, "4:memory:/\n")
    group(tmp_path / "sys/fs/cgroup/memory", 9223372036854771712, GIB, version=1)
    assert available_memory(tmp_path) == 50 * GIB


def test_all_ranks_of_a_node_must_fit_together(tmp_path: Path) -> None:
    machine(tmp_path, 10 * GIB)
    snapshot = Snapshot(tmp_path)
    assert snapshot.fits(4 * GIB, 4 * GIB)
    assert not snapshot.fits(4 * GIB, 5 * GIB)
    assert not snapshot.fits(10 * GIB)


def test_what_the_snapshot_has_already_is_not_needed_again(tmp_path: Path) -> None:
    machine(tmp_path, 0)
    snapshot = Snapshot(tmp_path)
    snapshot.take(payloads(1000))
    assert snapshot.growth(snapshot.num_bytes) == 0
    assert snapshot.fits(snapshot.num_bytes)
    assert not snapshot.fits(snapshot.num_bytes + 1)
    assert not snapshot.fits(snapshot.num_bytes, others=1)


def test_this_machine_is_known() -> None:
    found = available_memory()
    assert found is None or 0 < found < 1 << 50
