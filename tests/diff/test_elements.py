"""The differences of single elements, against exact arithmetic and against torch's neighbours."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resumekit.diff import ElementDifferences
from resumekit.diff.tensors import are_comparable, compare_elements
from resumekit.serialization.leaves import ELEMENT_TYPES, element_type

NAN, INF = float("nan"), float("inf")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"))
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def compare(first: torch.Tensor, second: torch.Tensor) -> ElementDifferences:
    """How two tensors of one shape differ."""
    types = element_type(first.dtype), element_type(second.dtype)
    assert types[0] is not None
    assert types[1] is not None
    assert are_comparable(types[0], types[1])
    one, other = (_bytes(each) for each in (first, second))
    return compare_elements(one, other, (types[0], types[1]))


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def one_of(dtype: torch.dtype, value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *INTEGERS, torch.bool, torch.complex64])
def test_equal_bits_are_equal(dtype: torch.dtype) -> None:
    value = torch.tensor([0.0, 1.0, 2.0, 64.0]).to(dtype)
    assert compare(value, value.clone()) == ElementDifferences()


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    for value in (1.0, -1.0, 0.0, smallest, -smallest, 1000.0):
        here = one_of(dtype, value)
        above = torch.nextafter(here.float(), one_of(torch.float32, INF))
        if dtype in (torch.float32, torch.bfloat16) or dtype == torch.float64:
            above = torch.nextafter(here, one_of(dtype, INF))
        else:
            bits = here.view(torch.int16).item()
            step = 1 if bits >= 0 else -1
            above = torch.tensor([bits + step], dtype=torch.int16).view(dtype)
        found = compare(here, above)
        assert found.num_different == 1
        assert found.max_ulp == 1, value
        assert found.max_absolute == float(above.double() - here.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_step_over_zero_counts_the_denormals_of_both_signs(dtype: torch.dtype) -> None:
    smallest = one_of(dtype, torch.finfo(dtype).smallest_normal)
    width = smallest.element_size()
    plain = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    num_denormals = int(smallest.view(plain).item())
    found = compare(-smallest, smallest)
    assert found.max_ulp == 2 * num_denormals
    assert found.max_absolute == 2 * float(smallest.double())
    assert found.max_relative == 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_two_signs_differ_by_nothing(dtype: torch.dtype) -> None:
    found = compare(one_of(dtype, 0.0), one_of(dtype, -0.0))
    assert found == ElementDifferences(1, 0, 0.0, 0.0, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_equals_nan_of_the_same_bits_only(dtype: torch.dtype) -> None:
    nan = one_of(dtype, NAN)
    assert compare(nan, nan.clone()) == ElementDifferences()
    plain = {2: torch.int16, 4: torch.int32, 8: torch.int64}[nan.element_size()]
    other = (nan.view(plain) | 1).view(dtype)
    assert compare(nan, other) == ElementDifferences(1, 1)
    mixed = compare(torch.cat([nan, one_of(dtype, 1)]), torch.cat([one_of(dtype, 1)] * 2))
    assert mixed == ElementDifferences(1, 1)


def test_infinities_are_infinitely_far_away() -> None:
    found = compare(torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]))
    assert (found.max_absolute, found.max_relative) == (INF, INF)
    assert found.max_ulp == 2 * 0x7F800000


def test_the_largest_of_each_kind_is_reported() -> None:
    first = torch.tensor([1000.0, 1e-6, 5.0])
    second = torch.tensor([1000.5, 2e-6, 5.0])
    found = compare(first, second)
    assert found.num_different == 2
    assert found.max_absolute == 0.5
    assert found.max_relative == pytest.approx(0.5)
    assert found.max_ulp == 1 << 23


@given(
    *(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4) for _ in range(2)),
)
def test_distances_of_integers_are_exact(first: list[int], second: list[int]) -> None:
    found = compare(torch.tensor(first), torch.tensor(second))
    distances = [abs(a - b) for a, b in zip(first, second, strict=True)]
    assert (found.max_absolute or 0) == max(distances)
    assert found.num_different == sum(map(bool, distances))
    assert found.max_ulp is None


@given(*(st.floats(width=32, allow_nan=False, allow_infinity=False) for _ in range(2)))
def test_differences_of_floats_are_those_of_exact_arithmetic(first: float, second: float) -> None:
    found = compare(torch.tensor([first]), torch.tensor([second]))
    if struct.pack("f", first) == struct.pack("f", second):
        assert found == ElementDifferences()
        return
    exact = abs(Fraction(first) - Fraction(second))
    assert found.max_absolute == pytest.approx(float(exact), rel=1e-15)
    bits = [struct.unpack("<i", struct.pack("<f", each))[0] for each in (first, second)]
    ordered = [each if each >= 0 else -(each & 0x7FFFFFFF) for each in bits]
    assert found.max_ulp == abs(ordered[0] - ordered[1])
    larger = max(abs(Fraction(first)), abs(Fraction(second)))
    assert found.max_relative == pytest.approx(float(exact / larger) if larger else 0.0)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_values_are_those_of_torch(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    floats = values.to(torch.float32)
    keep = ~floats.isnan()
    first, second = values.view(torch.uint8)[keep].clone(), values.view(torch.uint8)[keep].flip(0)
    found = compare(first.view(dtype), second.clone().view(dtype))
    expected = (floats[keep].double() - floats[keep].flip(0).double()).abs()
    assert found.max_absolute == float(expected[~expected.isnan()].max())


def test_types_without_arithmetic_are_counted_only() -> None:
    element = ELEMENT_TYPES["float4_e2m1fn_x2"]
    one, other = np.array([1, 2, 3], np.uint8), np.array([1, 9, 9], np.uint8)
    assert compare_elements(one, other, (element, element)) == ElementDifferences(2)


def test_a_complex_number_is_compared_by_its_parts() -> None:
    found = compare(torch.tensor([1 + 1j, 2 + 2j]), torch.tensor([1.5 + 4j, 2 + 2j]))
    assert (found.num_different, found.max_absolute) == (1, 3.0)


def test_floats_of_two_widths_are_compared_by_value() -> None:
    first = torch.tensor([1.0, 1 / 3, NAN])
    found = compare(first, first.bfloat16())
    assert (found.num_different, found.num_nan, found.max_ulp) == (1, 0, None)
    assert found.max_absolute == float((first - first.bfloat16().float()).nan_to_num().abs().max())
    assert not are_comparable(ELEMENT_TYPES["int32"], ELEMENT_TYPES["float32"])


def test_blocks_are_joined() -> None:
    first = torch.zeros((1 << 20) + 3)
    second = first.clone()
    second[0], second[-1] = 1.0, -2.0
    found = compare(first, second)
    assert (found.num_different, found.max_absolute) == (2, 2.0)
