"""The page on the format is enough to write a reader: this one uses nothing of resumekit.

What it reads are checkpoints that the library has written.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.serialization.decoding import Decoder

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "format.md"
SHARDED = ROOT / "integration" / "golden" / "checkpoints" / "sharded" / "step-00000008"
BLOCK_BYTES = 4 << 20

# ---------------------------------------------------------------- the reader


def file_digest(data: bytes) -> str:
    blocks = (data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES))
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, blocks)))


def manifest_of(step: Path) -> dict[str, Any]:
    """The manifest, after its own digest and those of all files."""
    data = (step / "manifest.json").read_bytes()
    body, _, rest = data.rpartition(b'  "digest": "xxh3-128:')
    assert rest[:32].decode() == xxhash.xxh3_128_hexdigest(body)
    manifest: dict[str, Any] = json.loads(data)
    for each in manifest["files"]:
        content = (step / each["path"]).read_bytes()
        assert (len(content), file_digest(content)) == (each["size"], each["digest"])
    return manifest


def tensors_of(path: Path, index: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a data file, by name."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    assert start % 4096 == 0
    found = {}
    for name, each in index["tensors"].items():
        content = bytearray(data[start + each["begin"] : start + each["end"]])
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
        flat = flat.view(getattr(torch, each["dtype"]))
        strides = each.get("strides")
        shape = each["shape"]
        found[name] = flat.as_strided(shape, strides) if strides else flat.reshape(shape)
    return found | {tied: found[name] for tied, name in index["ties"].items()}


def value_of(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A tagged JSON value."""

    def items(body: list[Any]) -> list[Any]:
        return [value_of(each, tensors) for each in body]

    def pairs(body: list[Any]) -> dict[Any, Any]:
        flat = items(body)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def named(name: str) -> bytes:
        return bytes(tensors[name].numpy())

    def view(body: Any) -> torch.Tensor:
        if isinstance(body, str):
            return tensors[body]
        base = tensors[body["of"]].flatten().view(torch.uint8)
        flat = base[body["offset"] :].view(getattr(torch, body["dtype"]))
        return flat.as_strided(body["shape"], body["strides"])

    if isinstance(tree, list):
        return items(tree)
    if not isinstance(tree, dict):
        return tree
    (tag, body), *others = [*tree.items(), (None, None)]
    if not str(tag).startswith("$"):
        return {key: value_of(each, tensors) for key, each in tree.items()}
    assert len(others) == 1
    factories = {None: None, "int": int, "list": list}
    readers: dict[str, Any] = {
        "$int": lambda: int(body, 16),
        "$float": lambda: struct.unpack(">d", bytes.fromhex(body))[0],
        "$complex": lambda: complex(*items(body)),
        "$str": lambda: bytes.fromhex(body).decode("utf-8", "surrogatepass"),
        "$bytes": lambda: bytes.fromhex(body),
        "$blob": lambda: named(body),
        "$bytearray": lambda: bytearray(named(body)),
        "$numbers": lambda: np.frombuffer(named(body[1]), body[0]).tolist(),
        "$tuple": lambda: tuple(items(body)),
        "$set": lambda: set(items(body)),
        "$dict": lambda: pairs(body),
        "$ordered_dict": lambda: OrderedDict(pairs(body)),
        "$counter": lambda: Counter(pairs(body)),
        "$default_dict": lambda: defaultdict(factories[body[0]], pairs(body[1:])),
        "$deque": lambda: deque(items(body[1:]), body[0]),
        "$namedtuple": lambda: namedtuple(body[0], body[1])(*items(body[2:])),
        "$scalar": lambda: np.frombuffer(bytes.fromhex(body[1]), body[0])[0],
        "$numpy_str": lambda: np.str_(body),
        "$numpy_bytes": lambda: np.bytes_(bytes.fromhex(body)),
        "$array": lambda: np.frombuffer(named(body[3]), body[0]).reshape(body[1], order=body[2]),
        "$torch": lambda: getattr(torch, body),
        "$device": lambda: torch.device(body),
        "$size": lambda: torch.Size(body),
        "$tensor": lambda: view(body),
    }
    return readers[tag]()


def state_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The states in the payload of a writer rank."""
    path = folder / f"rank-{rank:05}.json"
    index = json.loads(path.read_text())
    assert index["format"] == "resumekit payload"
    tensors = tensors_of(path.with_suffix(".safetensors"), index)
    return {key: value_of(each, tensors) for key, each in index["states"].items()}


def column(runs: list[list[int]]) -> list[int]:
    return [first + step * i for first, step, count in runs for i in range(count)]


def sharded_of(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a sharded component."""
    index = json.loads((folder / "index.json").read_text())
    assert index["format"] == "resumekit sharded payload"
    found = {}
    for name, each in index["tensors"].items():
        layout = index["layouts"][each["layout"]]
        whole = torch.zeros(each["shape"], dtype=getattr(torch, each["dtype"]))
        offsets = zip(*map(column, layout["offsets"]), strict=True)
        sizes = zip(*map(column, layout["sizes"]), strict=True)
        shards = [*zip(column(layout["writers"]), offsets, sizes, strict=True)]
        for number, (rank, begin, size) in enumerate(shards):
            earlier = sum(each[0] == rank for each in shards[:number])
            path = folder / f"rank-{rank:05}.json"
            tensors = tensors_of(path.with_suffix(".safetensors"), json.loads(path.read_text()))
            box = tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))
            whole[box] = tensors[f"{name}#{earlier + 1}" if earlier else name].reshape(size)
        found[name] = whole
    return found


# ---------------------------------------------------------------- what it reads

Point = namedtuple("Point", ["x", "y"])
BASE = torch.arange(12.0)
VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "text"], "b": {}},
    "integer": -(16**18),
    "floats": [math.inf, -math.inf, 0.1],
    "complex": 1 - 2j,
    "surrogate": "\ud800",
    "bytes": [b"\x00\xff", b"long" * 5000],
    "bytearray": bytearray(b"abc"),
    "numbers": [[*range(3000)], [i / 7 for i in range(3000)]],
    "tuple": (1, (2, [3])),
    "set": {1, "a"},
    "dict": {1: "a", (2, 3): "b"},
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("aab"),
    "default": defaultdict(int, a=1),
    "deque": deque([1, 2], maxlen=3),
    "point": Point(1, 2),
    "scalar": [np.float32(1.5), np.int16(-3)],
    "numpy": [np.str_("a"), np.bytes_(b"b")],
    "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))],
    "torch": [torch.bfloat16, torch.strided, torch.device("cpu"), torch.Size([2, 3])],
    "tensors": [torch.randn(2, 3).bfloat16(), torch.ones(3, 2).t(), torch.empty(0)],
    "views": [BASE, BASE[2:4], BASE.view(3, 4)[:, 1]],
}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, with their types; a namedtuple is of a new type."""
    if isinstance(one, torch.Tensor):
        is_like = one.dtype == other.dtype and one.shape == other.shape
        return is_like and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if type(one).__name__ != type(other).__name__:
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("format") / "run"
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "extras": dict(VALUES)}
    with Checkpointer(directory, save_every=2, **given) as ckpt:
        for _ in ckpt.batches(range(3), epochs=1):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            if ckpt.progress.step == 1:
                torch.save([model.state_dict(), optimizer.state_dict()], directory / "now.pt")
            ckpt.step()
    return directory / "step-00000002"


def test_every_digest_is_as_the_page_says(step: Path) -> None:
    manifest = manifest_of(step)
    assert manifest["format"] == "resumekit checkpoint"
    assert len(manifest["files"]) == 6
    path = step / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    assert file_digest(bytes(content)) not in {each["digest"] for each in manifest["files"]}


@pytest.mark.parametrize("name", VALUES)
def test_every_value_is_read(step: Path, name: str) -> None:
    found = state_of(step / "state")["extras"]["values"][name]
    assert same(VALUES[name], found), found


def test_model_and_optimizer_are_read(step: Path) -> None:
    weights, moments = torch.load(step.parent / "now.pt")
    assert same(dict(weights), state_of(step / "model")["model"])
    state = state_of(step / "optimizer")["optimizer"]["state"]
    names = [*weights]
    for number, expected in moments["state"].items():
        assert all(same(expected[each], state[names[number]][each]) for each in expected)


def test_shards_make_whole_tensors() -> None:
    manifest_of(SHARDED)
    tensors = sharded_of(SHARDED / "model")
    assert {name: [*each.shape] for name, each in tensors.items()} == {
        "0.weight": [3, 8],
        "1.weight": [2, 3],
    }
    assert all(each.count_nonzero() == each.numel() for each in tensors.values())


def tags_of_page() -> Iterator[str]:
    table = PAGE.read_text(encoding="utf-8").partition("| tag | value |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        yield from re.findall(r"`(\$\w+)`", row.split("|")[1])


def test_the_page_has_each_tag_with_an_example_that_can_be_read() -> None:
    assert sorted(tags_of_page()) == sorted(Decoder._BY_TAG)
    text = PAGE.read_text(encoding="utf-8").partition("| tag | value |")[2].partition("\n\n")[0]
    examples = [json.loads(each) for each in re.findall(r"`(\{.*\})`", text)]
    tensors = {"state.a": torch.arange(6.0).double().view(torch.uint8), "a": torch.arange(6.0)}
    for each in examples:
        value_of(each, tensors)
    assert len(examples) > 15


def test_the_shards_of_the_page_tile_their_tensor() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    layout = json.loads(block)
    rows, columns = map(column, layout["offsets"])
    assert [*zip(rows, columns, strict=True)] == [*product(range(1000), [0])]
    assert column(layout["writers"]) == [*range(1000)]
