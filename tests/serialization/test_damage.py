"""Damage is found before anything is given out; hostile files give typed errors and run nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resumekit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    UnsupportedValueError,
)
from resumekit.serialization.decoding import decode
from resumekit.serialization.index import Index, TensorRecord, header
from resumekit.serialization.leaves import ELEMENT_TYPES, TORCH_CONSTANTS
from resumekit.serialization.reading import read_payload
from resumekit.storage.files import BLOCK_BYTES, BlockDigester

STEM = "state/rank-00000"


def states() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {
        "model": {"w": torch.arange(BLOCK_BYTES // 2 + 3), "v": base, "part": base[2:5]},
        "extras": {
            "array": np.arange(4.0), "blob": b"x" * 2000, 3: (1, 2.5), "names": {"a", "b"},
            "empty": torch.zeros(0, 2), "t": torch.ones(2, 3).t(), "scalar": np.float32(1),
        },
    }  # fmt: skip


def files(step: Any) -> tuple[bytes, bytes]:
    """The index and the data file."""
    root = Path(step.path)
    return (root / f"{STEM}.json").read_bytes(), (root / f"{STEM}.safetensors").read_bytes()


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_flipped_byte_anywhere_is_found(suffix: str, checkpoints: Any) -> None:
    step = checkpoints.save(states())
    path = Path(step.path, f"{STEM}.{suffix}")
    size = path.stat().st_size
    offsets = [round(i * (size - 1) / 29) for i in range(30)]
    assert len(set(offsets)) == 30
    with path.open("r+b", buffering=0) as file:
        for offset in offsets:
            byte = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), offset)
            with pytest.raises(CorruptCheckpointError, match=f"rank-00000.{suffix}"):
                read_payload(step, "state", 0)
            os.pwrite(file.fileno(), byte, offset)
    assert set(read_payload(step, "state", 0)) == {"model", "extras"}


def test_two_exchanged_blocks_are_found(checkpoints: Any) -> None:
    step = checkpoints.save({"model": {"w": torch.arange(BLOCK_BYTES)}})
    index, data = files(step)
    first, second = data[:BLOCK_BYTES], data[BLOCK_BYTES : 2 * BLOCK_BYTES]
    swapped = second + first + data[2 * BLOCK_BYTES :]
    with pytest.raises(CorruptCheckpointError):
        read_payload(checkpoints.forge(index, swapped), "state", 0)


def test_a_data_file_of_another_save_is_found(checkpoints: Any) -> None:
    index, _ = files(checkpoints.save({"model": {"w": torch.ones(3)}}))
    _, data = files(checkpoints.save({"model": {"w": torch.zeros(3)}}))
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors"):
        read_payload(checkpoints.forge(index, data), "state", 0)


def test_a_missing_rank_file_or_state_is_named(checkpoints: Any) -> None:
    step = checkpoints.save(states())
    with pytest.raises(CorruptCheckpointError, match=r"state/rank-00001\.json"):
        read_payload(step, "state", 1)
    with pytest.raises(CorruptCheckpointError, match="has no state of 'optimizer'"):
        read_payload(step, "state", 0, keys=["optimizer"])
    index, _ = files(step)
    with pytest.raises(CorruptCheckpointError, match=r"state/rank-00000\.safetensors"):
        read_payload(checkpoints.forge(index), "state", 0)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def test_a_pickle_in_place_of_either_file_is_never_run(checkpoints: Any, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(marker))
    archive = tmp_path / "bomb.pt"
    torch.save(_Bomb(marker), archive)
    index, data = files(checkpoints.save({"model": {"w": torch.ones(3)}}))
    for hostile in (bomb, archive.read_bytes()):
        for pair in ((hostile, data), (index, hostile)):
            with pytest.raises(CorruptCheckpointError):
                read_payload(checkpoints.forge(*pair), "state", 0)
    assert not marker.exists()
    pickle.loads(bomb)  # noqa: S301
    assert marker.exists(), "the bomb would have worked"


# Hostile indexes: their digests are right, their content is not.


def forged(checkpoints: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """A checkpoint whose index was changed before it was digested."""
    index, data = files(checkpoints.save(states()))
    fields = json.loads(index)
    change(fields)
    return checkpoints.forge(json.dumps(fields).encode(), data)


def _tensor(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields["tensors"]["model.v"].update(changes)


def _rename(fields: dict[str, Any]) -> None:
    fields["tensors"] = {name + "x": row for name, row in fields["tensors"].items()}


def _swap(fields: dict[str, Any]) -> None:
    fields["tensors"] = dict(reversed(fields["tensors"].items()))


INDEXES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other format": lambda f: f.update(format="pickle"),
    "version 0": lambda f: f.update(format_version=0),
    "version as text": lambda f: f.update(format_version="1"),
    "version true": lambda f: f.update(format_version=True),
    "no states": lambda f: f.pop("states"),
    "one field more": lambda f: f.update(more=1),
    "states are a list": lambda f: f.update(states=[]),
    "tensors are a list": lambda f: f.update(tensors=[]),
    "a tensor is a list": lambda f: f["tensors"].update({"model.v": []}),
    "a tensor less": lambda f: f["tensors"].popitem(),
    "a tensor more": lambda f: f["tensors"].update(x=dict(f["tensors"]["model.v"])),
    "tensors in another order": _swap,
    "other names": _rename,
    "unknown dtype": _tensor(dtype="float31"),
    "dtype that torch has as something else": _tensor(dtype="nn"),
    "quantised dtype": _tensor(dtype="qint8"),
    "dtype of the same size": _tensor(dtype="int32"),
    "dtype is a list": _tensor(dtype=[]),
    "other shape": _tensor(shape=[6, 2]),
    "too small a shape": _tensor(shape=[11]),
    "shape bomb": _tensor(shape=[1 << 45], end=(1 << 47)),
    "shape that overflows": _tensor(shape=[1 << 40, 1 << 40]),
    "shape that overflows with a zero": _tensor(shape=[0, 1 << 40, 1 << 40]),
    "negative shape": _tensor(shape=[-3, -4]),
    "shape of floats": _tensor(shape=[12.0]),
    "shape of bools": _tensor(shape=[12, True]),
    "too many dimensions": _tensor(shape=[12] + [1] * 70),
    "shape is a string": _tensor(shape="12"),
    "another begin": _tensor(begin=0),
    "another end": _tensor(end=1),
    "a float offset": _tensor(begin=1.0),
    "a huge offset": _tensor(begin=10**300),
    "overlapping strides": _tensor(strides=[0]),
    "too many strides": _tensor(strides=[1, 1]),
    "huge strides": _tensor(strides=[1 << 50]),
    "unknown field of a tensor": _tensor(more=1),
    "no end": lambda f: f["tensors"]["model.v"].pop("end"),
    "ties are a list": lambda f: f.update(ties=[]),
    "a tie to a number": lambda f: f.update(ties={"a": 1}),
    "a tie more": lambda f: f.update(ties={"a": "model.v"}),
    "no block digests": lambda f: f.update(block_digests=[]),
    "a block digest more": lambda f: f["block_digests"].append("0" * 32),
    "a block digest that is none": lambda f: f["block_digests"].__setitem__(0, "x" * 32),
    "a block digest that is a number": lambda f: f["block_digests"].__setitem__(0, 1),
    "another block digest": lambda f: f["block_digests"].__setitem__(0, "0" * 32),
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_an_index_that_makes_no_sense_is_found(
    change: Callable[[dict[str, Any]], Any], checkpoints: Any
) -> None:
    step = forged(checkpoints, change)
    with pytest.raises(CorruptCheckpointError):
        read_payload(step, "state", 0)


def _record(name: str, begin: int, num_elements: int = 4) -> TensorRecord:
    return TensorRecord(name, ELEMENT_TYPES["float32"], (num_elements,), begin, 4 * num_elements)


@pytest.mark.parametrize(
    ("records", "num_bytes"),
    [
        ([_record("a", 0), _record("b", 8)], 24),
        ([_record("a", 0), _record("b", 0)], 16),
        ([_record("a", 0), _record("b", 20)], 36),
        ([_record("a", 4)], 20),
        ([_record("b", 16), _record("a", 0)], 32),
        ([_record("a", 0)], 15),
        ([_record("a", 0)], 17),
        ([_record("a", 0, 1 << 40)], 16),
        ([_record(f"a{i}", 0, 1 << 20) for i in range(1000)], 4 << 20),
    ],
    ids=[
        "overlap", "same offset", "gap", "gap before", "order", "short", "long", "bomb",
        "many times the file",
    ],
)  # fmt: skip
def test_an_index_and_a_header_that_agree_on_nonsense_are_found(
    records: list[TensorRecord], num_bytes: int, checkpoints: Any
) -> None:
    data = header(records, {}) + bytes(num_bytes)
    digester = BlockDigester()
    digester.update(memoryview(data))
    blocks = tuple(block.hex() for block in digester.blocks)
    index = Index({"model": {}}, tuple(records), {}, blocks)
    with pytest.raises(CorruptCheckpointError):
        read_payload(checkpoints.forge(index.to_bytes(), data), "state", 0)


def test_an_index_of_a_newer_format_is_not_called_damaged(checkpoints: Any) -> None:
    step = forged(checkpoints, lambda fields: fields.update(format_version=4, more=1))
    with pytest.raises(FormatVersionError, match="newer resumekit"):
        read_payload(step, "state", 0)


def test_a_dtype_that_this_torch_is_too_old_for_is_not_called_damaged(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float8_e8m0fnu
    steps = [checkpoints.save({"model": value}) for value in (torch.zeros(2, dtype=dtype), dtype)]
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    monkeypatch.delitem(TORCH_CONSTANTS, "float8_e8m0fnu")
    for step in steps:
        with pytest.raises(FormatVersionError, match=r"float8_e8m0fnu, which torch .* does not "):
            read_payload(step, "state", 0)


TEXTS = {
    "empty": b"",
    "not JSON": b"\x80\x04K\x01.",
    "not UTF-8": b'{"format": "\xff"}',
    "a list": b"[]",
    "a duplicate key": b'{"format": 1, "format": 2}',
    "NaN": b'{"format": NaN}',
    "infinity": b'{"format": 1e999}',
    "an endless number": b"1" * 100_000,
    "deep": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_index_that_is_not_strict_json_is_found(text: bytes, checkpoints: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(CorruptCheckpointError):
        read_payload(checkpoints.forge(text), "state", 0)
    assert time.monotonic() - begin < 60


TREES: dict[str, Any] = {
    "unknown tag": {"$object": "os.system"},
    "two tags": {"$int": "1", "$str": ""},
    "a tag beside a key": {"a": 1, "$int": "1"},
    "int": [{"$int": 1}, {"$int": "x"}, {"$int": None}],
    "float": [{"$float": "00"}, {"$float": 1.0}, {"$float": "zz" * 8}],
    "complex": [{"$complex": [1.0]}, {"$complex": [1, 2]}, {"$complex": {}}],
    "str": [{"$str": "ff"}, {"$str": 1}],
    "bytes": [{"$bytes": "0"}, {"$bytes": "0g"}, {"$bytes": 5}],
    "blob": [{"$blob": "none"}, {"$blob": "float"}, {"$blob": ["bytes"]}, {"$blob": 1}],
    "bytearray": [
        {"$bytearray": "none"}, {"$bytearray": "float"}, {"$bytearray": 1},
        {"$bytearray": {"$bytes": "00"}}, {"$set": [{"$bytearray": "bytes"}]},
        [{"$bytearray": "bytes"}] * 2,
    ],
    "tuple": [{"$tuple": 1}, {"$tuple": {}}],
    "set": [
        {"$set": [[]]}, {"$set": [1, 1]}, {"$set": [1, True]}, {"$set": [{"$tensor": "float"}]},
    ],
    "numbers": [
        {"$numbers": ["<i8", "none"]}, {"$numbers": ["<i4", "bytes"]}, {"$numbers": 1},
        {"$numbers": ["|O", "object"]}, {"$numbers": ["<i8", "bytes"]},
        [{"$numbers": ["<i8", "object"]}] * 2,
    ],
    "dict": [
        {"$dict": [1]}, {"$dict": [[], 1]}, {"$dict": [1, 2, 1.0, 3]}, {"$dict": {}},
        {"$dict": [{"$array": ["|u1", [4], "C", "bytes"]}, 1]},
        {"$ordered_dict": [1]}, {"$counter": [[], 1]},
    ],
    "default_dict": [
        {"$default_dict": []}, {"$default_dict": ["os.system"]}, {"$default_dict": [["int"]]},
        {"$default_dict": ["eval"]}, {"$default_dict": [None, 1]}, {"$default_dict": [0]},
    ],
    "deque": [
        {"$deque": []}, {"$deque": [-1]}, {"$deque": [1, 2, 3]}, {"$deque": [2**63]},
        {"$deque": [True, 1]}, {"$deque": ["1"]},
    ],
    "namedtuple": [
        {"$namedtuple": []}, {"$namedtuple": ["A", ["x"]]}, {"$namedtuple": ["A", ["x"], 1, 2]},
        {"$namedtuple": ["A", "xy", 1, 2]}, {"$namedtuple": ["A b", []]},
        {"$namedtuple": ["class", []]}, {"$namedtuple": ["A", ["_x"], 1]},
        {"$namedtuple": ["A", ["__class__"], 1]}, {"$namedtuple": ["A", ["x", "x"], 1, 2]},
        {"$namedtuple": ["A", ["x=__import__('os')"], 1]}, {"$namedtuple": [1, []]},
        {"$namedtuple": ["A", [f"f{i}" for i in range(5000)], *range(5000)]},
    ],
    "scalar": [
        {"$scalar": ["|O", "00" * 8]}, {"$scalar": ["<f4", "00"]}, {"$scalar": ["<f4"]},
        {"$scalar": ["O", "00" * 8]}, {"$scalar": [[["a", "|O"]], "00" * 8]},
        {"$scalar": ["<f4", 1]}, {"$scalar": [{"a": 1}, "00"]}, {"$scalar": ["<q8", "00" * 8]},
        {"$numpy_str": 1}, {"$numpy_bytes": "x"},
    ],
    "array": [
        {"$array": ["|u1", [5], "C", "bytes"]}, {"$array": ["|u1", [4], "A", "bytes"]},
        {"$array": ["|u1", [4], "C", "none"]}, {"$array": ["|u1", [2**62, 2**62], "C", "bytes"]},
        {"$array": ["|O", [1], "C", "object"]}, {"$array": ["|u1", [-4], "C", "bytes"]},
        {"$array": ["|u1", [4], "C", "float"]}, {"$array": ["<f4,<f4", [1], "C", "bytes"]},
        {"$array": [[["a", "<f4", [2**30, 2**30]]], [1], "C", "bytes"]}, {"$array": 1},
        {"$array": [[["a"] * 4], [1], "C", "bytes"]},
        {"$array": ["|V2147483647", [1], "C", "bytes"]},
        {"$array": ["|u1", [1] * 65 + [4], "C", "bytes"]}, {"$array": ["|u1", [4], ["C"], "bytes"]},
    ],
    "torch": [
        {"$torch": name} for name in ("load", "os", "dtype", "Tensor", "float", "torch.float32", "")
    ] + [{"$torch": 1}, {"$torch": ["float32"]}, {"$torch": None}, {"$torch": {}}],
    "device": [
        {"$device": name} for name in ("gpu", "", "CPU", "cuda:-1", "cuda:999", "cpu\0", "cuda:01")
    ] + [{"$device": 0}, {"$device": ["cpu"]}, {"$device": None}],
    "size": [{"$size": 1}, {"$size": [1.0]}, {"$size": [True]}, {"$size": ["1"]}, {"$size": [[1]]}],
    "tensor": [{"$tensor": "none"}, {"$tensor": 1}, {"$tensor": ["float"]}, {"$tensor": {}}],
}  # fmt: skip

VIEW = {"of": "float", "dtype": "float32", "shape": [2], "strides": [1], "offset": 0}
VIEWS: dict[str, dict[str, Any]] = {
    "of nothing": {"of": "none"},
    "of a reordered tensor": {"of": "reordered"},
    "beyond the end": {"shape": [5]},
    "beyond the end by its offset": {"offset": 12},
    "beyond the end by its strides": {"strides": [4]},
    "before the beginning": {"offset": -4},
    "backwards": {"strides": [-1]},
    "between elements": {"offset": 2},
    "strides of another shape": {"strides": [1, 1]},
    "huge": {"shape": [2**60], "strides": [2**60]},
    "huge and empty": {"shape": [0, 2**40, 2**40], "strides": [1, 1, 1]},
    "unknown dtype": {"dtype": "object"},
    "larger dtype": {"dtype": "complex128", "shape": [2]},
    "offset as text": {"offset": "0"},
    "one field more": {"device": "cuda"},
}


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "float": torch.zeros(4),
        "bytes": torch.zeros(4, dtype=torch.uint8),
        "object": torch.zeros(8, dtype=torch.uint8),
        "reordered": torch.zeros(2, 3).t(),
    }


CASES = [
    *((f"{name} {i}", case) for name, cases in TREES.items() for i, case in enumerate(
        cases if isinstance(cases, list) else [cases]
    )),
    *((f"view {name}", {"$tensor": {**VIEW, **change}}) for name, change in VIEWS.items()),
]  # fmt: skip


@pytest.mark.parametrize("tree", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_a_tree_that_the_codec_does_not_make_is_found(tree: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^the file: not a tree of the codec: "):
        decode([tree], _tensors(), where="the file")


def test_the_trees_above_are_wrong_in_one_point_only() -> None:
    right = [
        {"$blob": "bytes"}, {"$array": ["|u1", [4], "C", "bytes"]}, {"$tensor": VIEW},
        {"$namedtuple": ["A", ["x"], 1]}, {"$deque": [2, 1]}, {"$scalar": ["<f4", "00000000"]},
        {"$torch": "float32"}, {"$device": "cuda:0"}, {"$size": [1]}, {"$bytearray": "bytes"},
    ]  # fmt: skip
    assert len(decode(right, _tensors())) == 10


def test_keys_made_to_collide_are_refused_before_they_cost_time() -> None:
    keys = [{"$int": hex(i * (2**61 - 1))} for i in range(1, 100_000)]
    trees = [
        {"$set": keys},
        {"$dict": [part for key in keys for part in (key, 0)]},
        {"$set": [{"$tuple": [key]} for key in keys]},
    ]
    for tree in trees:
        begin = time.monotonic()
        with pytest.raises(CorruptCheckpointError, match="same hash"):
            decode(tree, {})
        assert time.monotonic() - begin < 60


def test_a_flood_of_namedtuple_types_is_refused() -> None:
    tree = [{"$namedtuple": [f"A{i}", []]} for i in range(2000)]
    with pytest.raises(CorruptCheckpointError, match="namedtuple"):
        decode(tree, {})


def test_one_blob_named_many_times_is_there_once() -> None:
    tensors = {"bytes": torch.zeros(1 << 20, dtype=torch.uint8)}
    found = decode([{"$blob": "bytes"}] * 10_000, tensors)
    assert len({id(blob) for blob in found}) == 1


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "$tensor", "model.v", "float32", "int8", "C", "<f8", "|O", "00", "$dict"]),
    st.builds(list), st.builds(dict), st.just({"$tensor": "model.v"}), st.just([[[1]]]),
)  # fmt: skip


@settings(
    max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(seed=st.integers(0, 2**32), junk=st.lists(JUNK, min_size=1, max_size=4))
def test_an_index_changed_at_random_gives_typed_errors_only(
    seed: int, junk: list[Any], valid_files: tuple[bytes, bytes], checkpoints: Any
) -> None:
    index, data = valid_files
    fields = json.loads(index)
    dice = random.Random(seed)
    for replacement in junk:
        _replace_somewhere(fields, copy.deepcopy(replacement), dice)
    step = checkpoints.forge(json.dumps(fields).encode(), data)
    with contextlib.suppress(CheckpointError):
        read_payload(step, "state", 0)


@pytest.fixture
def valid_files(checkpoints: Any) -> tuple[bytes, bytes]:
    small = states()
    small["model"]["w"] = torch.arange(10)
    return files(checkpoints.save(small))


def _replace_somewhere(node: Any, replacement: Any, dice: random.Random) -> None:
    """Puts the replacement instead of one value, deep or not, or under a key."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = dice.choice(keys)
        below = node[key]
        if not isinstance(below, dict | list) or not below or dice.random() < 0.2:
            if isinstance(node, dict) and dice.random() < 0.2:
                node[str(replacement)] = node.pop(key)
            else:
                node[key] = replacement
            return
        node = below


def test_what_is_refused_at_a_load_is_refused_at_the_save_already(checkpoints: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        checkpoints.save({"extras": {i * (2**61 - 1): 0 for i in range(101)}})
    assert checkpoints.round_trip({i * (2**61 - 1): 0 for i in range(100)})
