"""A payload that was copied holds the state of that moment, whatever happens to the live objects.

Each test has a control: without the copy, the same changes are found in the checkpoint.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from resumekit.serialization import leaves
from resumekit.serialization.leaves import ELEMENT_TYPES, dense_strides, retyped
from resumekit.serialization.planning import Proposal, encode_local
from resumekit.serialization.reading import StoredSource, read_payload, read_sharded
from resumekit.serialization.sharding import FlatPart
from resumekit.serialization.writing import Payload

# torch warns once in a process that complex32 is experimental.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

DTYPES = [item.torch_dtype for item in ELEMENT_TYPES.values() if item.torch_dtype is not None]
LARGE = 1 << 18  # elements; more than are copied at once


class Pair(NamedTuple):
    first: Any
    second: Any


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    content = torch.arange(num_bytes) % (2 if dtype is torch.bool else 251)
    return retyped(content.to(torch.uint8), dtype, 0, shape, dense_strides(shape))


def tensors() -> dict[str, Any]:
    base = torch.arange(24.0)
    weight = torch.nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    return {
        **{str(dtype): tensor_of(dtype, 4, 6) for dtype in DTYPES},
        **{f"{dtype}, transposed": tensor_of(dtype, 3, 5).t() for dtype in DTYPES},
        **{f"{dtype}, a number": tensor_of(dtype) for dtype in DTYPES},
        "empty": torch.empty(0, 3),
        "large": torch.arange(LARGE),
        "large, transposed": torch.arange(LARGE).view(2, -1).t(),
        "large, of 16 bytes": tensor_of(torch.complex128, LARGE),
        "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "holes": torch.arange(48).view(6, 8)[::2, 1::3],
        "expanded": torch.arange(3.0).expand(5, 3),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "parameter": weight,
        "tied": weight.detach(),
        "computed": weight * 2,
        "base": base,
        "part": base[4:8],
        "overlapping": [base.clone()[2:9]] * 2,
        "other type": base.view(torch.int32)[3:5],
    }


def arrays() -> dict[str, Any]:
    return {
        "array": np.arange(12.0).reshape(3, 4),
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "view": np.arange(60).reshape(3, 4, 5).transpose(1, 2, 0)[::2],
        "large": np.arange(LARGE),
        "structured": np.zeros(3, [("text", "U5"), ("number", "i8")]),
        "no dimension": np.array(3.5),
        "times": np.array(["2024-01-01", "NaT"], "datetime64[s]"),
        "scalar": np.float32(1.5),
        "random": np.random.RandomState(3).get_state(legacy=False),
    }


def containers() -> dict[str, Any]:
    return {
        "list": [1, [2, [3.5, None]], "a"],
        "long list": list(range(2000)),
        "bytes": bytes(range(256)) * 20,
        "bytearray": bytearray(range(256)) * 20,
        "dict": {"a": {"b": [1]}, 3: {"c": (4, [5])}},
        "ordered": OrderedDict(b=[1], a={}),
        "default": defaultdict(list, {"a": [1, 2]}),
        "counter": Counter("abca"),
        "deque": deque([1, [2], {"a": 3}], maxlen=5),
        "set": {1, "a", (2, 3)},
        "pair": Pair([1], {"a": deque([2])}),
        "param_groups": [{"lr": 0.1, "betas": (0.9, [0.99]), "params": [0, 1]}],
    }


def state() -> dict[str, Any]:
    return {"model": tensors(), "arrays": arrays(), "extras": containers()}


def change(value: Any) -> None:
    """Changes every tensor, array and container of a state in place."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        whole = retyped(value.detach(), torch.uint8, 0, (storage.nbytes(),), (1,))
        whole.fill_(1) if value.dtype is torch.bool else whole.add_(1)
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        whole = value.reshape(-1, order="A").view(np.uint8)
        whole += 1
    elif isinstance(value, dict):
        for item in value.values():
            change(item)
        value.clear()
        value["changed"] = 1
    elif isinstance(value, bytearray):
        value[:] = b"changed"
    elif isinstance(value, list | deque | set | tuple):
        for item in value:
            change(item)
        if not isinstance(value, tuple):
            value.clear()
    elif isinstance(value, FlatPart):
        change(value.local)


def copied(payloads: list[Any], *, num_threads: int = 1) -> memoryview:
    """The memory into which the payloads were copied, full of other bytes before."""
    memory = memoryview(bytearray(b"\xa5" * sum(each.image_bytes for each in payloads)))
    begin = 0
    for each in payloads:
        assert each.image_bytes % 4096 == 0
        each.copy_into(memory[begin : begin + each.image_bytes], num_threads=num_threads)
        begin += each.image_bytes
    return memory


@pytest.mark.parametrize("part", ["model", "arrays", "extras"])
def test_changes_after_the_copy_are_not_in_the_checkpoint(
    part: str, checkpoints: Any, same: Any
) -> None:
    live, expected = {part: state()[part]}, {part: state()[part]}
    payload = Payload.of_states("state", 0, live)
    copied([payload])
    change(live)
    found = read_payload(checkpoints.commit(payload.write), "state", 0)
    for name, value in expected[part].items():
        plain = value.detach() if name == "parameter" else value  # it is restored as a plain tensor
        assert same(found[part][name], plain), name


def test_without_the_copy_every_change_is_in_the_checkpoint(checkpoints: Any, same: Any) -> None:
    live, expected = state(), state()
    payload = Payload.of_states("state", 0, live)
    change(live)
    found = read_payload(checkpoints.commit(payload.write), "state", 0)
    unchanged = {
        name
        for part in ("model", "arrays")
        for name, value in expected[part].items()
        if same(found[part][name], value)
    }
    # What has no memory of its own; Python's containers are copied when the payload is made.
    assert unchanged == {"empty", "scalar"}
    assert same(found["extras"], expected["extras"])


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_copy_is_written_as_the_same_bytes(
    num_threads: int, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaves, "_BYTES_PER_THREAD", 1 << 20)
    contents = []
    for is_copied in (False, True):
        payload = Payload.of_states("state", 0, state())
        if is_copied:
            copied([payload], num_threads=num_threads)
        step = checkpoints.commit(payload.write)
        contents.append([Path(step.path, file.path).read_bytes() for file in step.manifest.files])
    assert contents[0] == contents[1]


def test_nothing_live_is_referenced_after_the_copy() -> None:
    class Array(np.ndarray[Any, Any]):
        """Can be referenced weakly."""

    live = {"tensor": torch.ones(5), "tied": torch.ones(3), "array": np.ones(5), "list": [[1], {}]}
    watched = [weakref.ref(live["tensor"]), weakref.ref(live["array"])]
    payload = Payload.of_states("state", 0, {"model": live})
    copied([payload])
    del live
    gc.collect()
    assert [each() for each in watched] == [None, None]
    control = torch.ones(5)
    uncopied = Payload.of_states("state", 0, {"model": {"w": control}})
    watch = weakref.ref(control)
    del control
    gc.collect()
    assert watch() is not None
    del uncopied


def test_the_memory_is_free_once_it_is_written(checkpoints: Any) -> None:
    content = bytearray(1 << 20)
    payload = Payload.of_states("state", 0, {"model": {"w": torch.ones(5)}})
    payload.copy_into(memoryview(content))
    gc.collect()
    with pytest.raises(BufferError):
        content.append(0)
    checkpoints.commit(payload.write)
    gc.collect()
    content.append(0)


def test_a_payload_without_tensors_needs_no_memory(checkpoints: Any, same: Any) -> None:
    value = {"progress": {"step": [5]}}
    payload = Payload.of_states("state", 0, value)
    assert payload.image_bytes == 0
    payload.copy_into(memoryview(bytearray()))
    value["progress"]["step"].append(6)
    found = read_payload(checkpoints.commit(payload.write), "state", 0)
    assert same(found, {"progress": {"step": [5]}})


def test_small_files_are_copied_when_the_payload_is_made(checkpoints: Any) -> None:
    content: Any = bytearray(b"{}")
    payload = Payload("state", 0, small_files={"config.json": content})
    assert payload.image_bytes == 0
    content[:] = b"[]"
    step = checkpoints.commit(payload.write)
    assert Path(step.path, "state", "config.json").read_bytes() == b"{}"


# Sharded state


def shard_states(ranks: Any, rank: int) -> dict[str, Any]:
    whole = torch.arange(42.0).view(7, 6)
    with ranks.rank(rank, 2):
        rows = ranks.shard(whole, (2,), 0)
        columns = ranks.shard(whole, (2,), 1)
    begin, end = ((0, 17), (17, 42))[rank]
    return {
        "rows": rows,
        "columns": columns,
        "plain": torch.arange(5),
        "flat": FlatPart(whole.shape, begin, whole.reshape(-1)[begin:end].clone()),
        "array": np.arange(4.0),
        "steps": [1, [2]],
    }


@pytest.mark.parametrize("is_copied", [True, False])
def test_shards_and_flat_parts_are_copied(
    is_copied: bool, checkpoints: Any, ranks: Any, same: Any
) -> None:
    states = [shard_states(ranks, rank) for rank in range(2)]
    local = [encode_local("model", each) for each in states]
    proposals = [Proposal.of(each, rank) for rank, each in enumerate(local)]
    assignments = ranks.assigned(local, proposals)
    payloads = [
        Payload.of_shards("state", rank, local[rank], assignments[rank]) for rank in range(2)
    ]
    del local
    if is_copied:
        copied(payloads)
    for each in states:
        for name, value in each.items():
            change(value if name not in ("rows", "columns") else value.to_local())
    step = checkpoints.commit(
        lambda staging: [entry for each in payloads for entry in each.write(staging)]
    )
    source = StoredSource(step, "state", "model", ("index.json",))
    found, _ = read_sharded(source, lambda saved: [])
    whole = torch.arange(42.0).view(7, 6)
    expected = {"rows": whole, "columns": whole, "plain": torch.arange(5), "flat": whole}
    for name, value in expected.items():
        assert same(found[name], value) == is_copied, name
    assert same(found["array"], np.arange(4.0)) == is_copied
    assert same(found["steps"], [1, [2]])
