"""The size that an index is announced with is never below the size that it has."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.index import Index, IndexSize
from resumekit.serialization.writing import Payload


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(10 if depth < 5 else 6)
    if kind < 6:
        shape = [draw.randrange(5) for _ in range(draw.randrange(3))]
        dtype = draw.choice([torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fnuz])
        tensor = torch.zeros(shape, dtype=dtype)
        choices = (None, draw.getrandbits(80), draw.gauss(0, 1), random_name(draw), tensor)
        return draw.choice([*choices, draw.randbytes(60), tensor[None].transpose(0, -1)])
    items = [random_value(draw, depth + 1) for _ in range(draw.randrange(8))]
    if kind < 8:
        return tuple(items) if kind == 7 else items
    return {random_name(draw) if kind == 8 else number: item for number, item in enumerate(items)}


def random_name(draw: random.Random) -> str:
    return "".join(draw.choices('ab$"\\,[]{}\0\n\ud800é層😀', k=draw.randrange(30)))


def sizes(value: Any, num_blocks: int) -> tuple[IndexSize, bytes]:
    payload = Payload.of_states("state", 0, {"value": value, "other": [value]})
    index, header_bytes = payload._index, len(payload._header)
    bound = index.size_at_most(header_bytes=header_bytes, num_blocks=num_blocks)
    return bound, replace(index, block_digests=("0" * 32,) * num_blocks).to_bytes()


@pytest.mark.parametrize("seed", range(150))
def test_an_index_is_not_larger_than_announced(seed: int) -> None:
    draw = random.Random(seed)
    value, num_blocks = [random_value(draw) for _ in range(8)], draw.randrange(300)
    bound, data = sizes(value, num_blocks)
    strings = re.findall(rb'"(?:\\.|[^"\\])*"', data)
    structure = re.sub(rb'"(?:\\.|[^"\\])*"', b"", data)
    assert bound.num_bytes >= len(data)
    assert bound.num_values >= max(len(strings), len(re.findall(rb"[][{},]", structure)))
    assert Index.from_bytes(data, where="index").states


@pytest.mark.parametrize("depth", [1, 18, 36])
def test_deep_values_are_not_larger_than_announced(depth: int) -> None:
    value: Any = list(range(1000))
    for _ in range(depth):
        value = [value, "x" * 60]
    bound, data = sizes(value, 0)
    assert len(data) <= bound.num_bytes <= 20 * len(data)


def test_many_tensors_are_announced_closely() -> None:
    value = {
        f"transformer.h.{index}.attn.weight": torch.zeros(2, 3, 4, 5).permute(3, 1, 0, 2)
        for index in range(500)
    }
    bound, data = sizes(value, 10)
    assert len(data) <= bound.num_bytes <= 4 * len(data)


def test_names_and_ties_in_any_script_are_not_larger_than_announced() -> None:
    weight = torch.zeros(3)
    bound, data = sizes({"層" * number: weight for number in range(1, 50)}, 0)
    assert len(data) <= bound.num_bytes


def test_what_a_reader_refuses_is_refused_before_it_is_written() -> None:
    with pytest.raises(UnsupportedValueError, match="too much that is not in arrays or tensors"):
        Payload.of_states("state", 0, {"value": "x" * (65 << 20)})
    Payload.of_states("state", 0, {"value": "x" * (1 << 20)})
