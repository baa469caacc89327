"""What cannot be stored is refused before anything is written, with its path."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.encoding import MAX_DEPTH, encode
from resumekit.serialization.writing import Payload

Point = namedtuple("Point", ["x", "y"])
Renamed = namedtuple("Renamed", ["a", "def"], rename=True)


class Colour(Enum):
    RED = "red"


class Plain:
    pass


class MyInt(int):
    pass


class MyDict(dict):
    pass


class MyTensor(torch.Tensor):
    pass


class DTensor(torch.Tensor):
    pass


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def _freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: lambda: 0, "function"),
    "class": (lambda: Plain, "builtins.type"),
    "object": (Plain, "test_refusals.Plain"),
    "lock": (threading.Lock, "lock"),
    "iterator": (lambda: iter([1]), "list_iterator"),
    "subclass of int": (lambda: MyInt(1), "MyInt"),
    "subclass of dict": (MyDict, "MyDict"),
    "UserDict": (UserDict, "UserDict"),
    "subclass of deque": (lambda: type("Sub", (deque,), {})(), "Sub"),
    "torch.finfo": (lambda: torch.finfo(torch.float32), "torch.finfo"),
    "torch.Generator": (torch.Generator, "Generator"),
    "defaultdict with a lambda": (lambda: defaultdict(lambda: 0), "default_factory"),
    "namedtuple with renamed fields": (lambda: Renamed(1, 2), "namedtuple Renamed"),
    "numpy objects": (lambda: np.array([None]), "dtype object: it holds Python objects"),
    "numpy objects inside": (lambda: np.zeros(1, [("a", "O")]), "Python objects"),
    "numpy matrix": (lambda: np.asarray([[1]]).view(np.matrix), "numpy.matrix"),
    "cycle": (_cycle, "nested too deeply, or part of itself"),
    "tensor as a key": (lambda: {torch.ones(1): 1}, "a tensor as a key"),
    "tensor in a key": (lambda: {(torch.ones(1),): 1}, "a tensor as a key"),
    "tensor in a set": (lambda: {torch.ones(1)}, "a tensor as a key"),
    "enum beside its value": (lambda: {Colour.RED: 1, "red": 2}, "enum as a key"),
    "enum in a tuple": (lambda: {(Colour.RED,), ("red",)}, "enum as a key"),
    "keys with one hash": (lambda: {i * (2**61 - 1): i for i in range(200)}, "same hash"),
    "quantised": (_quantised, "a quantised tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "nested": (_nested, "nested"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "tensor subclass": (lambda: torch.ones(3).as_subclass(MyTensor), "MyTensor"),
    "sharded": (lambda: torch.ones(3).as_subclass(DTensor), "a sharded tensor"),
    "freed": (_freed, "memory has been freed"),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize:UserWarning", "ignore:Sparse CSR", "ignore:The PyTorch API of nested"
)


@pytest.mark.parametrize(("make", "found"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused_with_its_path(
    make: Callable[[], Any], found: str
) -> None:
    value = {"a": [0, Point(1, OrderedDict({2: (make(),)}))]}
    with pytest.raises(UnsupportedValueError) as refusal:
        encode(value, where="extras")
    assert refusal.value.where.startswith("extras['a'][1].y[2][0]")
    assert found in refusal.value.found


def test_an_open_file_is_refused(tmp_path: Path) -> None:
    path = re.escape("extras['log']")
    with (
        (tmp_path / "log").open("w") as file,
        pytest.raises(UnsupportedValueError, match=f"^{path}: .*TextIOWrapper"),
    ):
        Payload.of_states("state", 0, {"extras": {"log": file}})
    with pytest.raises(UnsupportedValueError, match="PosixPath"):
        Payload.of_states("state", 0, {"extras": tmp_path})


def test_a_key_is_refused_with_its_path() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^rng\['a'\]\[frozenset\(\)\]: .*frozenset"):
        encode({"a": {frozenset(): 1}}, where="rng")


def test_nesting_is_refused_at_a_save_before_it_could_not_be_loaded(checkpoints: Any) -> None:
    def nested(wrap: Callable[[Any], Any], num_levels: int) -> Any:
        value: Any = 1
        for _ in range(num_levels):
            value = wrap(value)
        return value

    wraps: list[Callable[[Any], Any]] = [
        lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}, lambda v: Point(v, 1),
        lambda v: defaultdict(int, {(1, 2): v}), lambda v: deque([v]),
    ]  # fmt: skip
    for wrap in wraps:
        num_levels = 1
        while num_levels <= MAX_DEPTH:
            value = nested(wrap, num_levels)
            try:
                encode(value, where="a")
            except UnsupportedValueError:
                break
            num_levels += 1
        assert num_levels >= MAX_DEPTH // 3
        deepest = nested(wrap, num_levels - 1)
        assert checkpoints.round_trip(deepest) == deepest


def test_more_than_a_load_would_take_is_refused_at_the_save() -> None:
    with pytest.raises(UnsupportedValueError, match=r"extras: .* bytes of JSON, expected at most"):
        Payload.of_states("state", 0, {"extras": "a" * (64 << 20)})
