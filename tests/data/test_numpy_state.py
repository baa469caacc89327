"""What is read quickly is what NumPy gives, whatever was done to its global generator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resumekit.data import numpy_state
from resumekit.data.numpy_state import PACKED, NumpyState


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    generator, state = np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(state)


def in_full() -> bytes:
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    return PACKED.pack(inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


ACTIONS = st.one_of(
    st.tuples(st.just("seed"), st.integers(0, 2)),
    st.tuples(st.just("normal"), st.integers(1, 3)),
    st.tuples(st.just("uniform"), st.integers(1, 700)),
    st.tuples(st.just("keep"), st.just(0)),
    st.tuples(st.just("put back"), st.just(0)),
    st.tuples(st.just("read"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=20))
def test_every_read_is_a_full_one(actions: list[tuple[str, int]]) -> None:
    np.random.seed(0)
    reader, kept = NumpyState(), np.random.get_state()
    for action, number in actions:
        if action == "seed":
            np.random.seed(number)
        elif action == "normal":
            np.random.standard_normal(number)
        elif action == "uniform":
            np.random.random_sample(number)
        elif action == "keep":
            kept = np.random.get_state()
        elif action == "put back":
            np.random.set_state(kept)
        else:
            assert reader.read() == in_full()
    assert reader.read() == in_full()


def test_half_of_a_pair_is_seen_where_the_twister_stands_still() -> None:
    reader, read = NumpyState(), []
    for num_normals in (1, 2, 1):
        np.random.seed(5)
        np.random.standard_normal(num_normals)
        read.append(reader.read())
        assert read[-1] == in_full()
    assert read[0] == read[2] != read[1]


def test_an_unchanged_state_is_not_asked_for_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = NumpyState()
    first = reader.read()
    monkeypatch.setattr(numpy_state, "PACKED", None)  # a full read needs it
    assert reader.read() == first
    np.random.random_sample()
    with pytest.raises(AttributeError):
        reader.read()


def test_where_the_bytes_do_not_tell_all_every_read_is_a_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numpy_state, "_bytes_tell_all", lambda: False)
    reader = NumpyState()
    for _ in range(3):
        assert reader.read() == in_full()
        np.random.standard_normal()


def test_another_kind_of_generator_is_told_by_none_and_another_twister_is_read() -> None:
    reader = NumpyState()
    assert reader.read() is not None
    np.random.set_bit_generator(np.random.PCG64(1))
    assert reader.read() is None
    np.random.set_bit_generator(np.random.MT19937(1))
    assert reader.read() == in_full()
