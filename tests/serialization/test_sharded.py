"""State that several ranks hold together: planned, written, read in other parts, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from resumekit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    RankDisagreementError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.serialization import planning
from resumekit.serialization.index import Index
from resumekit.serialization.planning import Proposal, assign, encode_local
from resumekit.serialization.reading import StoredSource, read_sharded
from resumekit.serialization.sharding import Layout, box_of, is_sharded, local_part
from resumekit.serialization.writing import Payload
from resumekit.storage.manifest import StepReader

State = dict[str, Any]
Make = Callable[[], State]

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "rows of 2": ((2,), (0,)),
    "rows of 3": ((3,), (0,)),
    "rows of 4": ((4,), (0,)),
    "columns of 4": ((4,), (1,)),
    "rows and columns": ((2, 2), (0, 1)),
    "copies of rows": ((2, 2), (None, 0)),
    "copies": ((3,), (None,)),
}


def num_ranks_of(layout: str) -> int:
    return int(torch.Size(LAYOUTS[layout][0]).numel())


def pairs(live: State) -> Callable[[Any], list[tuple[Any, Any]]]:
    return lambda saved: [(saved[k], v) for k, v in live.items() if is_sharded(v)]


def save(
    checkpoints: Any, ranks: Any, num_ranks: int, make: Make, first_rank_only: tuple[str, ...] = ()
) -> StepReader:
    """The checkpoint that the ranks write together."""
    local, proposals = [], []
    for rank in range(num_ranks):
        with ranks.rank(rank, num_ranks):
            local.append(encode_local("model", make(), first_rank_only=first_rank_only))
            proposals.append(Proposal.of(local[-1], rank))
    assignments = ranks.assigned(local, proposals)

    def write(staging: Any) -> list[Any]:
        return [
            entry
            for rank in range(num_ranks)
            for entry in Payload.of_shards("state", rank, local[rank], assignments[rank]).write(
                staging
            )
        ]

    step: StepReader = checkpoints.commit(write)
    return step


def load(step: StepReader, live: State, *, is_sharded: bool = True) -> State:
    """What this rank reads for a live state."""
    source = StoredSource(step, "state", "model", ("index.json",) if is_sharded else ())
    state: State = read_sharded(source, pairs(live))[0]
    return state


def expected_part(whole: torch.Tensor, live: Any) -> torch.Tensor:
    box = box_of(live, "")
    assert box is not None
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("former", LAYOUTS)
def test_every_layout_reads_its_parts_of_every_other(
    checkpoints: Any, ranks: Any, former: str, layout: str
) -> None:
    mesh, dimensions = LAYOUTS[former]
    step = save(
        checkpoints,
        ranks,
        num_ranks_of(former),
        lambda: {"weight": ranks.shard(WHOLE, mesh, *dimensions), "step": torch.tensor(3.0)},
    )
    mesh, dimensions = LAYOUTS[layout]
    for rank in range(num_ranks_of(layout)):
        with ranks.rank(rank, num_ranks_of(layout)):
            live = {"weight": ranks.shard(torch.zeros(7, 6), mesh, *dimensions)}
            found = load(step, live)
            assert found["weight"].placements == live["weight"].placements
            assert found["weight"].shape == (7, 6)
            part = local_part(found["weight"])
            assert torch.equal(part, expected_part(WHOLE, live["weight"]))
            assert torch.equal(found["step"], torch.tensor(3.0))


def test_whole_and_sharded_states_are_read_from_one_another(checkpoints: Any, ranks: Any) -> None:
    sharded = save(checkpoints, ranks, 4, lambda: {"w": ranks.shard(WHOLE, (4,), 0), "n": [1, 2]})
    found = load(sharded, {})
    assert torch.equal(found["w"], WHOLE)
    assert found["n"] == [1, 2]

    transposed = torch.empty(6, 7).T.copy_(WHOLE)
    whole = checkpoints.commit(
        Payload.of_states("state", 0, {"model": {"w": transposed, "n": [3]}}).write
    )
    with ranks.rank(1, 2):
        live = {"w": ranks.shard(torch.zeros(7, 6), (2,), 1)}
        found = load(whole, live, is_sharded=False)
        assert torch.equal(local_part(found["w"]), WHOLE[:, 3:])
    assert load(whole, {}, is_sharded=False)["w"].stride() == transposed.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_type_is_restored_bit_for_bit(
    checkpoints: Any, ranks: Any, dtype: torch.dtype
) -> None:
    whole = torch.randn(5, 3).to(dtype)
    empty = torch.empty(0, 3, dtype=dtype)
    step = save(
        checkpoints,
        ranks,
        3,
        lambda: {"w": ranks.shard(whole, (3,), 0), "empty": ranks.shard(empty, (3,), 0)},
    )
    found = load(step, {})
    assert found["w"].dtype == dtype
    assert torch.equal(found["w"], whole)
    assert found["empty"].shape == (0, 3)


def test_what_all_ranks_hold_is_written_once_and_divided_among_them(
    checkpoints: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_PORTION_BYTES", 160_000)
    state = {f"layer.{i}": torch.full((20_000,), float(i)) for i in range(8)}
    step = save(checkpoints, ranks, 4, lambda: dict(state))
    sizes = [e.size for e in step.manifest.files if e.path.endswith(".safetensors")]
    assert sizes == [4096 + 2 * 80_000] * 4
    assert torch.equal(load(step, {})["layer.5"], state["layer.5"])


def test_small_tensors_that_all_ranks_hold_stand_together(checkpoints: Any, ranks: Any) -> None:
    def make() -> State:
        state: State = {}
        for i in range(20):
            state[f"{i}.moment"] = ranks.shard(WHOLE + i, (4,), 0)
            state[f"{i}.step"] = torch.tensor(float(i))
        return state

    step = save(checkpoints, ranks, 4, make)
    with step.file("state/index.json") as file:
        index = json.loads(file.read())
    steps = {index["tensors"][f"{i}.step"]["layout"] for i in range(20)}
    only_the_first = {"writers": [[0, 0, 1]], "offsets": [], "sizes": []}
    assert [index["layouts"][each] for each in steps] == [only_the_first]
    with step.file("state/rank-00000.json") as file:
        names = list(json.loads(file.read())["tensors"])
    assert all(name.endswith("step") for name in names[:20])


def test_what_differs_between_the_ranks_comes_from_the_first(checkpoints: Any, ranks: Any) -> None:
    def make() -> State:
        rank = float(torch.distributed.get_rank())
        return {"mean": torch.full((8,), rank), "var": torch.full((8,), rank)}

    found = load(save(checkpoints, ranks, 2, make, first_rank_only=("mean", "var")), {})
    assert (found["mean"].sum(), found["var"].sum()) == (0, 0)


def test_tied_parts_are_stored_once_and_restored_as_one(checkpoints: Any, ranks: Any) -> None:
    def make() -> State:
        weight = ranks.shard(WHOLE, (4,), 0)
        return {"a": weight, "b": weight.detach()}

    step = save(checkpoints, ranks, 4, make)
    with step.file("state/index.json") as file:
        index = json.loads(file.read())
    assert index["ties"] == {"b": "a"}
    assert list(index["tensors"]) == ["a"]
    found = load(step, {})
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_values_that_are_no_tensors_are_restored_unchanged(checkpoints: Any, ranks: Any) -> None:
    plain = {"a": (1, None), "bytes": bytes(range(256)) * 20, "many": list(range(5000)), 3: {1.5}}
    found = load(save(checkpoints, ranks, 2, lambda: {"w": WHOLE, "plain": plain}), {})
    assert found["plain"] == plain


def test_only_the_blocks_that_hold_wanted_bytes_are_read(
    checkpoints: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(24 << 20, dtype=torch.uint8).reshape(-1, 1024)
    step = save(checkpoints, ranks, 2, lambda: {"w": ranks.shard(whole, (2,), 0)})
    read: list[int] = []
    file_system = checkpoints._store._file_system
    original = type(file_system).read_into

    def counted(self: Any, handle: Any, offset: int, buffer: memoryview) -> int:
        num_bytes: int = original(self, handle, offset, buffer)
        read.append(num_bytes)
        return num_bytes

    monkeypatch.setattr(type(file_system), "read_into", counted)
    with ranks.rank(1, 2):
        load(step, {"w": ranks.shard(torch.zeros_like(whole), (2,), 0)})
    assert whole.numel() / 2 <= sum(read) < whole.numel() / 2 + (1 << 20)
    read.clear()
    with ranks.rank(2, 4):
        found = load(step, {"w": ranks.shard(torch.zeros_like(whole), (4,), 0)})
    assert torch.equal(local_part(found["w"]), whole[len(whole) // 2 : len(whole) * 3 // 4])
    assert sum(read) < whole.numel() / 4 + (5 << 20)


def test_long_rows_are_read_in_ranges(checkpoints: Any, ranks: Any) -> None:
    whole = torch.arange(10 << 20, dtype=torch.int32).reshape(4, -1)
    step = save(checkpoints, ranks, 1, lambda: {"w": ranks.shard(whole, (1,), 0)})
    with ranks.rank(1, 2):
        found = load(step, {"w": ranks.shard(torch.zeros_like(whole), (2,), 1)})
    assert torch.equal(local_part(found["w"]), whole[:, whole.shape[1] // 2 :])


def test_a_flipped_byte_is_found_by_the_rank_that_reads_it(checkpoints: Any, ranks: Any) -> None:
    step = save(checkpoints, ranks, 2, lambda: {"w": ranks.shard(WHOLE, (2,), 0)})
    path = step.path / "state/rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with ranks.rank(0, 2):
        load(step, {"w": ranks.shard(WHOLE, (2,), 0)})
    with ranks.rank(1, 2), pytest.raises(CorruptCheckpointError, match=r"rank-00001\.safetensors"):
        load(step, {"w": ranks.shard(WHOLE, (2,), 0)})


def test_the_check_refuses_before_a_tensor_is_read(checkpoints: Any, ranks: Any) -> None:
    step = save(checkpoints, ranks, 2, lambda: {"w": ranks.shard(WHOLE, (2,), 0)})
    (step.path / "state/rank-00000.safetensors").unlink()
    seen: list[Any] = []

    def check(state: Any) -> None:
        seen.append((state["w"].shape, state["w"].dtype, state["w"].device.type))
        raise StateMismatchError("model", found="another shape")

    with pytest.raises(StateMismatchError):
        read_sharded(StoredSource(step, "state", "model", ("index.json",)), lambda _: (), check)
    assert seen == [((7, 6), torch.float32, "meta")]


def test_sums_that_are_not_summed_up_are_refused(ranks: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    with ranks.rank(0, 2):
        partial = DTensor.from_local(WHOLE, init_device_mesh("cpu", (2,)), [Partial()])
        local = encode_local("model", {"w": partial})
        with pytest.raises(UnsupportedValueError, match=r"model: w.*summand"):
            Proposal.of(local, 0)


def test_a_tensor_class_that_nobody_knows_is_refused(ranks: Any) -> None:
    class Quantised(torch.Tensor):
        pass

    with ranks.rank(0, 2):
        strange = ranks.shard(WHOLE, (2,), 0)
        strange._local_tensor = strange._local_tensor.as_subclass(Quantised)
        with pytest.raises(UnsupportedValueError, match=r"w.*Quantised"):
            encode_local("model", {"w": strange})


def test_parts_that_are_missing_or_overlap_are_refused_at_the_save(ranks: Any) -> None:
    local, proposals = [], []
    for rank in (0, 1):
        with ranks.rank(rank, 2):
            local.append(encode_local("model", {"w": ranks.shard(WHOLE, (2,), 0)}))
            proposals.append(Proposal.of(local[-1], rank))
    with pytest.raises(UnsupportedValueError, match=r"model: w.*miss 18"):
        assign(local[0], proposals[:1])
    with ranks.rank(0, 3):
        others = Proposal.of(encode_local("model", {"w": ranks.shard(WHOLE, (3,), 0)}), 0)
    with pytest.raises(UnsupportedValueError, match="model: w"):
        assign(local[0], [others, proposals[1]])


def test_ranks_with_other_tensors_are_refused(ranks: Any) -> None:
    def proposal(state: Mapping[str, Any], rank: int) -> Proposal:
        return Proposal.of(encode_local("model", state), rank)

    first = encode_local("model", {"w": WHOLE})
    for other in ({"v": WHOLE}, {"w": WHOLE.double()}, {"w": WHOLE[1:].clone()}, {}):
        with pytest.raises(RankDisagreementError, match="rank 1 has tensors"):
            assign(first, [Proposal.of(first, 0), proposal(other, 1)])


def replaced(step: StepReader, path: str, content: bytes) -> Callable[[Any], list[Any]]:
    """Writes the files of a checkpoint with another content of one of them."""

    def write(staging: Any) -> list[Any]:
        entries = []
        for entry in step.manifest.files:
            found = content if entry.path == path else (step.path / entry.path).read_bytes()
            with staging.create(entry.path, writer=entry.writer) as file:
                file.write([memoryview(found)])
                entries.append(file.finish())
        return entries

    return write


def _long_layout(count: int) -> Any:
    return {name: [[[0, 0, count]]] * 2 for name in ("offsets", "sizes")} | {
        "writers": [[0, 0, count]]
    }


def _prolong(layout: Any, count: int) -> None:
    layout.update(_long_layout(count))


def damaged(index: Any, name: str) -> None:
    row, layout = index["tensors"]["w"], index["layouts"][0]
    changes: dict[str, Callable[[], Any]] = {
        "a gap": lambda: layout["sizes"].__setitem__(0, [[3, 0, 2]]),
        "an overlap": lambda: layout["offsets"].__setitem__(0, [[3, 0, 2]]),
        "a negative offset": lambda: layout["offsets"].__setitem__(0, [[-1, 5, 2]]),
        "a negative last offset": lambda: layout["offsets"].__setitem__(0, [[4, -8, 2]]),
        "a writer that is none": lambda: layout.__setitem__("writers", [["0", 1, 2]]),
        "another writer": lambda: layout.__setitem__("writers", [[1, -1, 2]]),
        "a writer without a file": lambda: layout.__setitem__("writers", [[3, -3, 2]]),
        "a part too many": lambda: layout.__setitem__("writers", [[0, 1, 3]]),
        "a part of no run": lambda: layout.__setitem__("writers", [[0, 1, 2], [2, 1, 0]]),
        "a run that counts back": lambda: layout.__setitem__("writers", [[0, 1, 3], [0, 1, -1]]),
        "runs of two numbers": lambda: layout.__setitem__("writers", [[0, 1]]),
        "runs that are no list": lambda: layout.__setitem__("writers", {"first": 0}),
        "a run of floats": lambda: layout.__setitem__("writers", [[0, 1.0, 2]]),
        "a dimension less": lambda: layout["offsets"].pop(),
        "two dimensions less": lambda: (layout["offsets"].pop(), layout["sizes"].pop()),
        "a field of a layout more": lambda: layout.__setitem__("more", 1),
        "a layout that is a list": lambda: index["layouts"].__setitem__(0, []),
        "parts without end": lambda: _prolong(layout, 1 << 40),
        "many parts": lambda: index["layouts"].extend([_long_layout(1 << 22)] * 100),
        "a step without end": lambda: layout.__setitem__("writers", [[0, 1 << 70, 1], [1, 0, 1]]),
        "another shape": lambda: row.__setitem__("shape", [70, 6]),
        "another type": lambda: row.__setitem__("dtype", "float64"),
        "an unknown type": lambda: row.__setitem__("dtype", "float33"),
        "a layout that is none": lambda: row.__setitem__("layout", 7),
        "a field more": lambda: row.__setitem__("more", 1),
        "too many dimensions": lambda: row.__setitem__("shape", [1] * 70),
        "another format": lambda: index.__setitem__("format", "resumekit payload"),
        "a newer format": lambda: index.__setitem__("format_version", 4),
        "no states": lambda: index.pop("states"),
        "a state of another key": lambda: index.__setitem__("states", {"ema": {}}),
        "a tensor that is not there": lambda: index["tensors"].pop("w"),
    }
    changes[name]()


@pytest.mark.parametrize(
    "damage",
    [
        "a gap",
        "an overlap",
        "a negative offset",
        "a negative last offset",
        "a writer that is none",
        "another writer",
        "a writer without a file",
        "a part too many",
        "a part of no run",
        "a run that counts back",
        "runs of two numbers",
        "runs that are no list",
        "a run of floats",
        "a dimension less",
        "two dimensions less",
        "a field of a layout more",
        "a layout that is a list",
        "parts without end",
        "many parts",
        "a step without end",
        "another shape",
        "another type",
        "an unknown type",
        "a layout that is none",
        "a field more",
        "too many dimensions",
        "another format",
        "a newer format",
        "no states",
        "a state of another key",
        "a tensor that is not there",
    ],
)
def test_an_index_that_makes_no_sense_is_refused(checkpoints: Any, ranks: Any, damage: str) -> None:
    step = save(checkpoints, ranks, 2, lambda: {"w": ranks.shard(WHOLE, (2,), 0)})
    path = step.path / "state/index.json"
    index = json.loads(path.read_text())
    damaged(index, damage)
    write = replaced(step, "state/index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match=r"index\.json|safetensors|rank-00003"):
        load(checkpoints.commit(write), {})


def as_version_1(index: Any) -> Any:
    """The index as resumekit wrote it before layouts had columns."""
    layouts = [Layout.from_json(row, max_values=1000, max_parts=1000) for row in index["layouts"]]
    listed = [
        [[each.writer, list(each.box.offsets), list(each.box.sizes)] for each in layout]
        for layout in layouts
    ]
    return {**index, "format_version": 1, "layouts": listed}


@pytest.mark.parametrize("damage", [False, True])
def test_an_index_of_version_1_is_read(checkpoints: Any, ranks: Any, damage: bool) -> None:
    mesh, dimensions = LAYOUTS["rows and columns"]
    step = save(checkpoints, ranks, 4, lambda: {"w": ranks.shard(WHOLE, mesh, *dimensions)})
    index = as_version_1(json.loads((step.path / "state/index.json").read_text()))
    if damage:
        index["layouts"][0][3][2] = [3, 2]
    older = checkpoints.commit(replaced(step, "state/index.json", json.dumps(index).encode()))
    with ranks.rank(1, 3):
        live = {"w": ranks.shard(torch.zeros(7, 6), (3,), 0)}
        if damage:
            with pytest.raises(CorruptCheckpointError, match=r"index\.json.*miss 3"):
                load(older, live)
        else:
            assert torch.equal(local_part(load(older, live)["w"]), WHOLE[3:6])


def test_a_flipped_byte_in_the_index_is_found(checkpoints: Any, ranks: Any) -> None:
    step = save(checkpoints, ranks, 2, lambda: {"w": ranks.shard(WHOLE, (2,), 0)})
    path = step.path / "state/index.json"
    path.write_bytes(
        path.read_bytes().replace(b'"writer', b'"wrIter').replace(b"[7, 6]", b"[6, 7]")
    )
    with pytest.raises(CorruptCheckpointError, match="digest"):
        load(step, {})


def test_layers_that_are_sharded_alike_share_one_list_of_parts(ranks: Any) -> None:
    local, proposals = [], []
    for rank in range(4):
        with ranks.rank(rank, 4):
            state = {f"layer.{i}": ranks.shard(WHOLE + i, (4,), 0) for i in range(50)}
            local.append(encode_local("model", state))
            proposals.append(Proposal.of(local[-1], rank))
    tensors = assign(local[0], proposals).tensors
    data = Index({"model": {}}, tensors=tensors, is_common=True).to_bytes()
    assert len(json.loads(data)["layouts"]) == 1
    assert Index.from_bytes(data, where="index", is_common=True).tensors == tensors
