"""What is read quickly is what the library gives, whatever was done to its global generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resumekit.capture import global_rng
from resumekit.capture.global_rng import NumpyState, PythonState, python_state

State = dict[str, Any]


class Library(NamedTuple):
    """One of the two, as the tests drive it."""

    reader: type[PythonState] | type[NumpyState]
    layout_check: str  # the name of the check on a new generator
    in_full: Callable[[], State]
    seed: Callable[[int], Any]
    normals: Callable[[int], Any]
    uniforms: Callable[[int], Any]
    restore: Callable[[State], Any]


def _put_python_back(state: State) -> None:
    words = global_rng.PYTHON_WORDS.unpack(state["words"])
    random.setstate((state["version"], words, state["gauss_next"]))


PYTHON = Library(
    PythonState,
    "_is_python_layout_known",
    lambda: python_state(random),
    random.seed,
    lambda number: [random.gauss(0.0, 1.0) for _ in range(number)],
    lambda number: [random.random() for _ in range(number)],
    _put_python_back,
)
NUMPY = Library(
    NumpyState,
    "_is_numpy_layout_known",
    lambda: dict(np.random.get_state(legacy=False)),
    np.random.seed,
    np.random.standard_normal,
    np.random.random_sample,
    np.random.set_state,
)
numpy_random: Any = np.random  # its type hints do not export the two functions used below
LIBRARIES = pytest.mark.parametrize("library", [PYTHON, NUMPY], ids=["python", "numpy"])


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    generator, state, python = (
        numpy_random.get_bit_generator(),
        np.random.get_state(),
        python_state(random),
    )
    yield
    numpy_random.set_bit_generator(generator)
    np.random.set_state(state)
    _put_python_back(python)


def plain(state: State) -> Any:
    """The same as lists, to be compared."""
    return (
        np.asarray(state).tolist()
        if not isinstance(state, dict)
        else {name: plain(each) for name, each in state.items()}
    )


ACTIONS = st.one_of(
    st.tuples(st.just("seed"), st.integers(0, 2)),
    st.tuples(st.just("normals"), st.integers(1, 3)),
    st.tuples(st.just("uniforms"), st.integers(1, 700)),
    st.tuples(st.just("keep"), st.just(0)),
    st.tuples(st.just("restore"), st.just(0)),
    st.tuples(st.just("read"), st.just(0)),
)


@LIBRARIES
@settings(max_examples=100, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=20))
def test_every_read_is_a_full_one(library: Library, actions: list[tuple[str, int]]) -> None:
    library.seed(0)
    reader, kept = library.reader(), library.in_full()
    for action, number in actions:
        if action == "keep":
            kept = library.in_full()
        elif action == "restore":
            library.restore(kept)
        elif action == "read":
            assert plain(reader.read()) == plain(library.in_full())
        else:
            getattr(library, action)(number)
    assert plain(reader.read()) == plain(library.in_full())


@LIBRARIES
def test_half_of_a_pair_is_seen_without_a_change_of_the_words(library: Library) -> None:
    reader, read = library.reader(), []
    for num_normals in (1, 2, 1):
        library.seed(5)
        library.normals(num_normals)
        read.append(plain(reader.read()))
        assert read[-1] == plain(library.in_full())
    assert read[0] == read[2] != read[1]


@LIBRARIES
def test_an_unchanged_state_is_not_asked_for_in_full(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = library.reader()
    first = reader.read()
    asked: list[Any] = []
    in_full = library.reader._in_full

    def asks(self: Any) -> Any:
        asked.append(self)
        return in_full(self)

    monkeypatch.setattr(library.reader, "_in_full", asks)
    assert reader.read() is first
    assert not asked, "the memory layout of this interpreter or library is not the expected one"
    library.uniforms(1)
    assert reader.read() is not first
    assert asked


@LIBRARIES
def test_what_was_read_stays_as_it_was(library: Library) -> None:
    reader = library.reader()
    library.seed(3)
    first = reader.read()
    before = plain(first)
    library.uniforms(700)
    reader.read()
    assert plain(first) == before


@LIBRARIES
def test_with_an_unknown_layout_every_read_is_a_full_one(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_rng, library.layout_check, lambda: False)
    reader = library.reader()
    for _ in range(3):
        assert plain(reader.read()) == plain(library.in_full())
        library.normals(1)


@LIBRARIES
def test_bytes_that_are_not_the_state_s_are_never_believed_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = library.reader()
    monkeypatch.setattr(reader, "_bytes", lambda: (b"always the same", b""))
    for _ in range(3):
        assert plain(reader.read()) == plain(library.in_full())
        library.normals(1)
    assert not reader._is_comparable


def test_another_kind_of_generator_in_numpy_is_read_in_full() -> None:
    reader = NumpyState()
    reader.read()
    numpy_random.set_bit_generator(np.random.PCG64(1))
    for _ in range(2):
        state = reader.read()
        assert state["bit_generator"] == "PCG64"
        assert plain(state) == plain(NUMPY.in_full())
        np.random.random_sample()


def test_functions_that_a_user_has_set_in_python_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = random.Random(7)
    reader = PythonState()
    reader.read()
    monkeypatch.setattr(random, "getstate", generator.getstate)
    for _ in range(2):
        assert reader.read() == python_state(generator)
        generator.random()
