"""Every storable value is restored equal and of the same type."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

Same = Callable[[Any, Any], bool]

Point = namedtuple("Point", ["x", "y"])


class Span(NamedTuple):
    begin: int
    end: Any = None


class Phase(Enum):
    WARMUP = "warmup"
    PAIR = (1, 2)


class Level(IntEnum):
    HIGH = 3


class Mode(str, Enum):
    TRAIN = "train"


TORCH_CONSTANTS = [
    *(torch.float32, torch.bool, torch.complex32, torch.qint8, torch.strided, torch.sparse_coo),
    *(torch.channels_last, torch.preserve_format, torch.device("cpu"), torch.device("cuda:1")),
    *(torch.device("meta"), torch.Size([]), torch.Size([2, 0, 3])),
]

VALUES = {
    "none": None,
    "bools": [True, False],
    "small ints": [0, -1, 2**31, 2**63 - 1, -(2**63)],
    "huge ints": [2**63, -(2**63) - 1, 7**5000, -(7**5000)],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22],
    "floats beyond numbers": [math.inf, -math.inf, math.nan],
    "complex": [1 + 2j, complex(-0.0, math.inf), complex(math.nan, -0.0)],
    "strings": ["", "naïve 😀", '\0\n"\\', "$tensor", "\ud800", "\ud83d\ude00", "x" * 10_000],
    "bytes": [b"", b"\0\xff", bytes(range(256)) * 100],
    "bytearray": [bytearray(), bytearray(b"\0\xff"), bytearray(range(256)) * 100],
    "list": [[], [[]], [1, "a"]],
    "long lists of numbers": [
        list(range(2000)),
        [0.1, math.nan, -0.0] * 1000,
        [2**63] * 2000,
        [True] * 2000,
        [0] * 2000 + [0.5],
    ],
    "tuple": [(), (1,), ((), [()])],
    "set": [set(), {1, "a", (2, b"b"), None}],
    "dict": [{}, {"a": {"b": {}}}, {"b": 1, "a": 2}],
    "dict with a dollar": {"$tensor": "x", "$": 1},
    "dict with keys of every type": {
        "a": 0,
        1: 1,
        2.5: 2,
        None: 3,
        (1, ("b",)): 4,
        b"c": 5,
        1j: 6,
        2**70: 7,
        Point(1, 2): 8,
        np.int8(9): 9,
        "\ud800": 10,
        -1: 11,
        -2: 12,
    },
    "dict with a nan key": [math.nan, {math.nan: 1}],
    "OrderedDict": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "defaultdict": [
        *(defaultdict(int, {1: 2}), defaultdict(list, {1: []}), defaultdict(dict)),
        *(defaultdict(set), defaultdict(None, {1: 2})),
    ],
    "Counter": Counter({"a": 2, 5: -1}),
    "deque": [deque(), deque([1, [2]]), deque([1, 2], maxlen=2), deque(maxlen=0)],
    "namedtuple": [Point(1, Point(2, "b")), Span(1)],
    "numpy scalars": [
        np.float32(1.5),
        np.float64(-0.0),
        np.int64(3),
        np.uint8(255),
        np.bool_(True),
        np.complex64(1j),
        np.float16("nan"),
        np.datetime64("2024-01-01T00:00", ("m", 25)),
        np.timedelta64("NaT"),
        np.str_("a\0"),
        np.bytes_(b"\0"),
        np.str_(""),
        np.longdouble(1) / 3,
        np.void(b"ab"),
        np.array((1, 2.5), [("a", "i2"), ("b", "f8")])[()],
    ],
    "numpy arrays": [
        np.arange(6).reshape(2, 3),
        np.array(1.5),
        np.zeros((0, 3)),
        np.array(["ab", "c"]),
        np.arange(4, dtype=">i4"),
        np.array([True]),
        np.array([b"x"]),
        np.arange(10)[::-3],
        np.array(["NaT", "2020"], "M8[Y]"),
        np.array([1, np.nan], "f2"),
        np.empty((2, 0), "U0"),
        np.zeros(2, [("a", "<i4", (2, 2)), ("b", [("x", ">f8"), ("y", "U2")])]),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        np.arange(2, dtype=np.longdouble),
        np.zeros((1,) * 20),
    ],
    "torch constants": [TORCH_CONSTANTS, dict.fromkeys(TORCH_CONSTANTS, 1), set(TORCH_CONSTANTS)],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_of_every_type_is_restored_equal_and_of_the_same_type(
    value: Any, checkpoints: Any, same: Same
) -> None:
    assert same(checkpoints.round_trip(value), value)


def test_the_comparison_used_here_sees_small_differences(same: Same) -> None:
    pairs: list[tuple[Any, Any]] = [
        (1, True), (1, 1.0), (0.0, -0.0), ([1], (1,)), ({1: 2}, {"1": 2}), ({}, OrderedDict()),
        (deque(maxlen=1), deque(maxlen=2)), (defaultdict(int), defaultdict(list)),
        (np.float32(1), np.float64(1)), (np.zeros(2), np.zeros((2, 1))), (complex(0, -0.0), 0j),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (Point(1, 2), (1, 2)), (Point(1, 2), Span(1, 2)),
        (torch.float16, torch.bfloat16), (torch.float16, "float16"), (torch.Size([1]), (1,)),
        (torch.device("cuda:0"), torch.device("cuda:1")), (torch.device("cpu"), "cpu"),
        ({1}, {True}), ("a", np.str_("a")),
        (b"a", bytearray(b"a")), (math.nan, 0.0), ([1], [1, 2]), ({1: 1}, {}),
    ]  # fmt: skip
    assert not [pair for pair in pairs if same(*pair) or same(*reversed(pair))]


def test_every_constant_of_torch_is_restored_as_itself(checkpoints: Any) -> None:
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    constants = [each for each in vars(torch).values() if isinstance(each, kinds)]
    found = checkpoints.round_trip(constants)
    assert all(each is constant for each, constant in zip(found, constants, strict=True))


def test_an_enum_is_restored_as_its_value(checkpoints: Any, same: Same) -> None:
    found = checkpoints.round_trip({Phase.WARMUP: [Phase.PAIR, Level.HIGH], "mode": Mode.TRAIN})
    assert same(found, {"warmup": [(1, 2), 3], "mode": "train"})


def test_a_namedtuple_equals_the_one_that_was_saved(checkpoints: Any) -> None:
    value = [Point(1, 2), Point(3, 4), Span(5)]
    found = checkpoints.round_trip(value)
    assert found == value
    assert found[0].y == 2
    assert type(found[0]) is type(found[1])
    assert repr(found) == repr(value)


def test_a_defaultdict_continues_to_make_defaults(checkpoints: Any) -> None:
    found = checkpoints.round_trip(defaultdict(list))
    found["new"].append(1)
    assert found == {"new": [1]}


def test_a_loaded_array_can_be_written_to_and_keeps_its_order_in_memory(checkpoints: Any) -> None:
    found = checkpoints.round_trip([np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T])
    found[0][0, 0] = 9
    assert found[0].flags.c_contiguous
    assert found[1].flags.f_contiguous
    assert not found[1].flags.c_contiguous


def test_an_array_that_occurs_twice_is_one_array_again(checkpoints: Any) -> None:
    array = np.zeros(3)
    found = checkpoints.round_trip({"a": array, "b": [array], "c": array.copy()})
    found["a"][0] = 1
    assert found["b"][0] is found["a"]
    assert found["c"][0] == 0


def test_the_files_of_equal_states_are_equal(checkpoints: Any) -> None:
    states = [{"set": set(order)} for order in ([0, 8], [8, 0])]
    assert str(states[0]) != str(states[1]), "two orders in memory"
    digests = [[file.digest for file in checkpoints.save(s).manifest.files] for s in states]
    assert digests[0] == digests[1]


def test_state_is_nested_as_deep_as_any_real_one(checkpoints: Any, same: Same) -> None:
    value: Any = np.zeros(1, [("a", [("b", [("c", "f4", (2,))])])])
    for _ in range(19):
        value = (value,)
    assert same(checkpoints.round_trip(value), value)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    stn.array_dtypes(max_size=2).flatmap(stn.from_dtype),
    stn.scalar_dtypes().flatmap(stn.from_dtype),
    st.sampled_from(TORCH_CONSTANTS),
    st.lists(st.integers(0, 2**62), max_size=4).map(torch.Size),
)
KEYS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
        st.binary(max_size=3), st.complex_numbers(), st.sampled_from(TORCH_CONSTANTS),
    ),
    lambda keys: st.lists(keys, max_size=3).map(tuple) | st.builds(Point, keys, keys),
    max_leaves=4,
)  # fmt: skip
ARRAYS = stn.arrays(
    stn.scalar_dtypes() | stn.array_dtypes(max_size=3), stn.array_shapes(min_dims=0, min_side=0)
)


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, values, max_size=4)
    return st.one_of(
        st.lists(values, max_size=4),
        st.lists(values, max_size=4).map(tuple),
        st.lists(values, max_size=4).map(deque),
        st.binary(max_size=5).map(bytearray),
        st.sets(KEYS, max_size=4),
        dicts,
        st.dictionaries(st.text(max_size=3), values, max_size=4),
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
        st.builds(Point, values, values),
    )


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(value=st.recursive(SCALARS | ARRAYS, _containers, max_leaves=12))
def test_any_nested_value_is_restored_equal_and_of_the_same_type(
    value: Any, checkpoints: Any, same: Same
) -> None:
    assert same(checkpoints.round_trip(value), value)
