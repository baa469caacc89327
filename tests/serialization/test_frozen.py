"""Frozen shards: in files of their own, read together with the others, linked while unchanged."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from resumekit.run.saving.payloads import FrozenLinks
from resumekit.serialization import writing
from resumekit.serialization.leaves import digest_on_devices
from resumekit.serialization.planning import Proposal, encode_local
from resumekit.serialization.reading import StoredSource, read_payload, read_sharded
from resumekit.serialization.writing import FrozenFiles, Payload
from resumekit.storage.directories import StepName
from resumekit.storage.files import BLOCK_BYTES
from resumekit.storage.retention import RetentionPolicy

WHOLE = torch.arange(42.0).view(7, 6)


def payloads_of(ranks: Any, frozen: set[str]) -> list[Any]:
    states = []
    for rank in range(2):
        with ranks.rank(rank, 2):
            rows, columns = ranks.shard(WHOLE, (2,), 0), ranks.shard(WHOLE, (2,), 1)
        states.append({"rows": rows, "columns": columns, "plain": torch.arange(5)})
    local = [encode_local("model", each) for each in states]
    proposals = [Proposal.of(each, rank) for rank, each in enumerate(local)]
    assignments = ranks.assigned(local, proposals)
    found: list[Any] = []
    for rank in range(2):
        payload = Payload.of_shards("state", rank, local[rank], assignments[rank], frozen=frozen)
        found += [payload] if payload.frozen is None else [payload, payload.frozen]
    return found


@pytest.mark.parametrize(
    "frozen", [{"rows"}, {"columns", "plain"}, {"rows", "columns", "plain"}, {"other"}]
)
def test_frozen_shards_are_read_with_the_others(
    frozen: set[str], checkpoints: Any, ranks: Any, same: Any
) -> None:
    payloads = payloads_of(ranks, frozen)
    step = checkpoints.commit(
        lambda staging: [entry for each in payloads for entry in each.write(staging)]
    )
    num_frozen = sum(".frozen.safetensors" in entry.path for entry in step.manifest.files)
    assert num_frozen == (0 if frozen == {"other"} else 2 if frozen != {"plain"} else 1)
    found, _ = read_sharded(StoredSource(step, "state", "model", ("index.json",)), lambda saved: [])
    expected = {"rows": WHOLE, "columns": WHOLE, "plain": torch.arange(5)}
    assert same({name: found[name] for name in expected}, expected)


def test_a_payload_without_frozen_tensors_has_the_same_bytes(checkpoints: Any) -> None:
    contents = []
    for frozen in ((), {"not a name"}):
        payload = Payload.of_states("state", 0, {"model": {"w": torch.ones(3)}}, frozen=frozen)
        assert payload.frozen is None
        step = checkpoints.commit(payload.write)
        contents.append([Path(step.path, file.path).read_bytes() for file in step.manifest.files])
    assert contents[0] == contents[1]


def state() -> dict[str, Any]:
    weight = torch.arange(3000.0)
    return {"model": {"w": weight, "tied": weight, "b": torch.ones(3), "part": weight[5:9]}}


def frozen_of(payload: Payload) -> FrozenFiles:
    assert payload.frozen is not None
    return payload.frozen


@pytest.mark.parametrize("is_copied", [True, False])
def test_an_equal_file_is_linked_and_needs_no_memory(
    is_copied: bool, checkpoints: Any, same: Any
) -> None:
    first = Payload.of_states("state", 0, state(), frozen={"w"})
    step = checkpoints.commit(
        lambda staging: [*first.write(staging), *frozen_of(first).write(staging)]
    )
    (entry,) = (each for each in step.manifest.files if each.path == frozen_of(first).path)
    payload = Payload.of_states("state", 0, state(), frozen={"w"})
    frozen = frozen_of(payload)
    announced = frozen.num_bytes
    frozen.compare(step.name, entry, {}, num_threads=2)
    assert frozen.num_bytes == announced - entry.size
    assert frozen.image_bytes == 0

    def write(staging: Any) -> list[Any]:
        frozen.link(staging)
        assert frozen.image_bytes == 0
        if is_copied:
            frozen.copy_into(memoryview(b""))
        return [*payload.write(staging), *frozen.write(staging)]

    linked = checkpoints.commit(write)
    paths = [Path(each.path, frozen.path) for each in (step, linked)]
    assert paths[0].samefile(paths[1])
    found = read_payload(linked, "state", 0)
    assert same(found, state())
    found["model"]["w"][7] = 5
    assert found["model"]["tied"][7] == 5
    assert found["model"]["part"][2] == 5
    linked.verify()


def test_a_file_that_cannot_be_linked_is_copied_and_written(checkpoints: Any, same: Any) -> None:
    first = Payload.of_states("state", 0, state(), frozen={"w"})
    step = checkpoints.commit(
        lambda staging: [*first.write(staging), *frozen_of(first).write(staging)]
    )
    (entry,) = (each for each in step.manifest.files if each.path == frozen_of(first).path)
    payload = Payload.of_states("state", 0, state(), frozen={"w"})
    frozen = frozen_of(payload)
    announced = frozen.num_bytes
    frozen.compare(step.name, entry, {}, num_threads=2)
    Path(step.path, frozen.path).unlink()

    def write(staging: Any) -> list[Any]:
        frozen.link(staging)
        assert frozen.num_bytes == announced
        assert frozen.image_bytes > 0
        frozen.copy_into(memoryview(bytearray(frozen.image_bytes)))
        return [*payload.write(staging), *frozen.write(staging)]

    assert same(read_payload(checkpoints.commit(write), "state", 0), state())


def test_a_file_that_differs_in_one_bit_is_not_linked(checkpoints: Any) -> None:
    first = Payload.of_states("state", 0, state(), frozen={"w"})
    step = checkpoints.commit(
        lambda staging: [*first.write(staging), *frozen_of(first).write(staging)]
    )
    (entry,) = (each for each in step.manifest.files if each.path == frozen_of(first).path)
    value = state()
    value["model"]["w"].view(torch.int32)[2999] ^= 1
    frozen = frozen_of(Payload.of_states("state", 0, value, frozen={"w"}))
    announced = frozen.num_bytes
    frozen.compare(step.name, entry, {}, num_threads=2)
    frozen.finish_comparing()
    assert frozen.num_bytes == announced


@pytest.mark.parametrize("num_threads", [1, 3])
def test_files_of_many_blocks_are_equal_to_the_written_ones(
    num_threads: int, checkpoints: Any
) -> None:
    def large(changed: int | None = None) -> FrozenFiles:
        weight = torch.arange(5_000_000, dtype=torch.int32)
        if changed is not None:
            weight[changed] ^= 1
        part, columns = torch.arange(7).to(torch.int16), weight[:3000].view(50, 60).T
        states = {"model": {"w": weight, "b": part, "transposed": columns.clone()}}
        return frozen_of(Payload.of_states("state", 0, states, frozen={"w", "b", "transposed"}))

    step = checkpoints.commit(lambda staging: large().write(staging))
    (entry,) = (each for each in step.manifest.files if each.path.endswith(".safetensors"))
    assert entry.size > 4 * BLOCK_BYTES
    for changed in (None, 0, 2_500_000, 4_999_999):
        frozen = large(changed)
        frozen.compare(step.name, entry, {}, num_threads=num_threads)
        frozen.finish_comparing()
        assert (frozen.image_bytes == 0) == (changed is None)


def test_tensors_that_must_be_copied_are_compared_too(checkpoints: Any) -> None:
    def conjugated() -> FrozenFiles:
        states = {"model": {"w": torch.arange(3000).to(torch.complex64).conj()}}
        return frozen_of(Payload.of_states("state", 0, states, frozen={"w"}))

    step = checkpoints.commit(lambda staging: conjugated().write(staging))
    (entry,) = (each for each in step.manifest.files if each.path.endswith(".safetensors"))
    frozen = conjugated()
    frozen.compare(step.name, entry, {}, num_threads=2)
    frozen.finish_comparing()
    assert frozen.image_bytes == 0


def test_a_comparison_is_ended_with_the_save(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = checkpoints.commit(frozen_of(Payload.of_states("state", 0, state(), frozen={"w"})).write)
    (entry,) = (each for each in step.manifest.files if each.path.endswith(".safetensors"))
    links = FrozenLinks(RetentionPolicy())
    for number in (1, 2):
        links.committed(StepName(number), [entry])
    begun = threading.Event()

    def digest(parts: Any) -> bytes:
        begun.set()
        time.sleep(0.1)
        return bytes(16)

    monkeypatch.setattr(writing, "digest_of_block", digest)
    frozen = frozen_of(Payload.of_states("state", 0, state(), frozen={"w"}))
    num_before = threading.active_count()

    def fail() -> None:
        with links.compared(3, [frozen], num_threads=2):
            assert begun.wait(20)
            raise OSError("while it is compared")

    with pytest.raises(OSError, match="while it is compared"):
        fail()
    assert threading.active_count() == num_before


def test_nothing_is_linked_after_a_save_that_has_failed(checkpoints: Any) -> None:
    step = checkpoints.commit(frozen_of(Payload.of_states("state", 0, state(), frozen={"w"})).write)
    (entry,) = (each for each in step.manifest.files if each.path.endswith(".safetensors"))
    links = FrozenLinks(RetentionPolicy())
    for number in (1, 2):
        links.committed(StepName(number), [entry])
    needed = []
    for number in (3, 4):
        frozen = frozen_of(Payload.of_states("state", 0, state(), frozen={"w"}))
        with links.compared(number, [frozen], num_threads=1):
            frozen.finish_comparing()
            needed.append(frozen.image_bytes > 0)
    assert needed == [False, True]


# ---------------------------------------------------------------- digests that devices compute


@pytest.mark.parametrize("num_bytes", [1, 7, 64, (16 << 20) + 9, (40 << 20)])
def test_a_digest_of_a_device_changes_with_each_bit_and_changes_nothing(num_bytes: int) -> None:
    values = torch.zeros(num_bytes, dtype=torch.uint8)
    seen = {digest_on_devices([values])}
    places = {0, 7, 8, (16 << 20) - 1, 16 << 20, num_bytes - 1} & set(range(num_bytes))
    for place in places:
        for bit in (0, 5, 7):
            values[place] = 1 << bit
            seen.add(digest_on_devices([values]))
            values[place] = 0
    assert len(seen) == 1 + 3 * len(places)
    assert digest_on_devices([values]) in seen
    assert not values.any()


def test_a_digest_of_a_device_depends_on_the_order_of_tensors_and_elements() -> None:
    first, second = torch.arange(24.0).view(4, 6), torch.arange(24.0, 48.0).view(6, 4)
    exchanged = first.clone()
    exchanged[0, :2], exchanged[0, 2:4] = first[0, 2:4], first[0, :2]  # two whole words
    found = {
        digest_on_devices(tensors)
        for tensors in (
            [first, second],
            [second, first],
            [first.t(), second],
            [exchanged, second],
            [first],
            [first, first],
            [first + 0j],
            [(first + 1j).conj()],
            [first + 1j],
            [first.to(torch.float8_e4m3fn)],
        )
    }
    assert len(found) == 10
    assert None not in found
    strided = torch.zeros(4, 12)[:, ::2].copy_(first)
    assert digest_on_devices([strided, second]) == digest_on_devices([first, second])


def test_a_device_without_the_operations_gives_no_digest() -> None:
    assert digest_on_devices([torch.zeros(5, device="meta")]) is None
