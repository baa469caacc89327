from __future__ import annotations

import json
import math
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from resumekit.errors import CorruptCheckpointError, UnsupportedValueError
from resumekit.storage.directories import parse_json, seal, unseal

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text().filter(lambda key: key != "digest"), PLAIN, max_size=6))
def test_plain_values_are_read_back(fields: dict[str, Any]) -> None:
    assert unseal(seal(fields), where="x") == fields


def test_the_file_is_for_people() -> None:
    text = seal({"step": 5, "files": [{"path": "a"}, {"path": "b"}]}).decode()
    assert text.startswith(
        '{\n  "step": 5,\n  "files": [\n    {"path": "a"},\n    {"path": "b"}\n  ],\n'
        '  "digest": "xxh3-128:'
    )
    assert json.loads(text)["files"] == [{"path": "a"}, {"path": "b"}]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, b"x", {1: 2}, {None: 1}, {1, 2}, ..., 1j, 10**1001],
    ids=repr,
)
def test_a_value_that_json_would_change_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(UnsupportedValueError, match=r"details\['a'\]\[1\]"):
        seal({"details": {"a": [0, value]}})


def test_a_value_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedValueError, match="nested too deeply"):
        seal({"details": endless})


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}', '{"x": {"a": 1, "a": 1}}', "NaN", "[Infinity]", "[-Infinity]", "1e999",
        "[1,]", "{'a': 1}", "", " ", "[", "]", '"', "\\", '"\\', '"\\"', "[1] 2", "\ufeff{}", "nul",
        "[" * 65 + "]" * 65, "[" * 1_000_000, '{"a":' * 1_000_000, "1" * 1001,
        '"\n"', "01", "+1", ".5", "0x10",
    ],
    ids=lambda text: repr(text[:16]),
)  # fmt: skip
def test_what_is_not_strict_json_is_refused(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="x: "):
        parse_json(text.encode(), where="x")


@pytest.mark.parametrize("data", [b"\xff\xfe[\x00]\x00", b'"\xff"', '"a"'.encode("utf-16")])
def test_what_is_not_utf_8_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        parse_json(data, where="x")


def test_brackets_and_quotes_inside_strings_are_no_structure() -> None:
    value = {"a\\": '[{"' * 100, '"': "\\" * 7 + '"' + "[" * 99, "b": ["\\", '\\"[', "]"]}
    assert parse_json(json.dumps(value).encode(), where="x") == value
    assert parse_json(b"[" * 64 + b"]" * 64, where="x") is not None


@contextmanager
def _recursion_limit(limit: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def test_depth_is_refused_before_the_interpreter_could_crash_on_it() -> None:
    with _recursion_limit(10**6), pytest.raises(CorruptCheckpointError, match="too deeply"):
        parse_json(b"[" * 2_000_000, where="x")


def _num_calls(data: bytes) -> int:
    """How many functions, of Python or of C, are called until this text is refused."""
    num_calls = 0

    def count(frame: FrameType, event: str, function: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        parse_json(data, where="x")
    except CorruptCheckpointError:
        pass
    else:
        raise AssertionError("not refused")
    finally:
        sys.setprofile(before)
    return num_calls


_MANY_CALLS = 1000


@pytest.mark.parametrize(
    "data",
    [b'"' + b'\\"' * 4_000_000, b'"' * 9_000_000, b"[" + b"0," * 5_000_000, b'"\\' * 3_000_000],
    ids=["escaped quotes", "quotes", "values", "unterminated"],
)
def test_a_flood_is_refused_before_a_value_is_made(data: bytes) -> None:
    tracemalloc.start()
    try:
        num_calls = _num_calls(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_calls < _MANY_CALLS
    assert peak_bytes < 4 * len(data)


def test_each_value_of_a_text_within_the_limits_costs_a_call() -> None:
    assert _num_calls(b"[" + b"0," * _MANY_CALLS) >= _MANY_CALLS


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="at most 67108864"):
        parse_json(b" " * (64 << 20) + b"1", where="x")


@given(st.binary(max_size=300))
def test_any_bytes_give_a_value_or_a_typed_error(data: bytes) -> None:
    for parse in (parse_json, unseal):
        with suppress(CorruptCheckpointError):
            parse(data, where="x")


def test_content_with_a_right_digest_is_parsed_strictly_too() -> None:
    for body in (b'{"a": NaN,\n', b'{"a": 1, "a": 1,\n', b"[\n", b"", b'{"digest": 1,\n'):
        digest = xxhash.xxh3_128_hexdigest(body).encode()
        with pytest.raises(CorruptCheckpointError, match="not strict JSON"):
            unseal(body + b'  "digest": "xxh3-128:' + digest + b'"\n}\n', where="x")
