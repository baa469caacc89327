"""RNG states are restored exactly; those of a new rank are distinct, deterministic and reported."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumekit.capture.model import ModelState
from resumekit.capture.named_tensors import RankBuffers
from resumekit.capture.rng import RngState, generator_state, set_generator_state, states_of_new_rank
from resumekit.errors import DeclarationError, InvalidStateError, StateMismatchError
from resumekit.state import WorldChange

BIT_GENERATORS = [
    np.random.MT19937,
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.Philox,
    np.random.SFC64,
]


def bit_generator(kind: Any, seed: int) -> np.random.Generator:
    return np.random.Generator(kind(seed))


# A seed and an offset.
CUDA_STATE, DRAWN_CUDA_STATE = (
    torch.tensor([7, offset]).view(torch.uint8).clone() for offset in (0, 4)
)

MAKERS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "random": random.Random,
    "RandomState": np.random.RandomState,
    **{kind.__name__: functools.partial(bit_generator, kind) for kind in BIT_GENERATORS},
}


def draws(generator: Any) -> list[str]:
    """Uniform and normal numbers, with an odd number of the latter: they come in pairs."""
    if isinstance(generator, torch.Generator):
        return [x.hex() for x in torch.randn(3, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [x.hex() for x in (generator.random(), generator.gauss(0, 1))]
    return [float(x).hex() for x in (generator.random(), generator.standard_normal())]


def global_draws() -> list[str]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [float(x).hex() for x in [*numbers, *torch.randn(3).tolist()]]


def test_the_global_generators_continue(stored: Any) -> None:
    global_draws()
    saved = stored(RngState().state_dict())
    expected = [global_draws() for _ in range(3)]
    assert global_draws() not in expected
    state = RngState()
    state.check_state_dict(saved)
    assert state.load_state_dict(saved) == ()
    assert [global_draws() for _ in range(3)] == expected


def test_taking_the_state_draws_nothing() -> None:
    RngState().load_state_dict(RngState().state_dict())
    saved = RngState().state_dict()
    expected = global_draws()
    RngState().load_state_dict(saved)
    RngState().state_dict()
    assert global_draws() == expected


@pytest.mark.parametrize("name", MAKERS)
def test_a_named_generator_continues(name: str, stored: Any) -> None:
    running, live = MAKERS[name](0), MAKERS[name](0)
    draws(running)
    saved = stored(RngState({"mine": running}).state_dict())
    expected = [draws(running) for _ in range(3)]
    state = RngState({"mine": live})
    state.check_state_dict(saved)
    assert state.load_state_dict(saved) == ()
    assert [draws(live) for _ in range(3)] == expected


@pytest.mark.parametrize("name", MAKERS)
def test_a_named_generator_that_is_not_restored_does_not_continue(name: str) -> None:
    running, live = MAKERS[name](0), MAKERS[name](0)
    draws(running)
    assert draws(running) != draws(live)


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_of_a_generator_is_a_snapshot(name: str) -> None:
    generator = MAKERS[name](0)
    saved = generator_state(generator)
    expected = draws(generator)
    assert set_generator_state(generator, saved) == ""
    assert draws(generator) == expected


def test_spawned_children_continue(stored: Any) -> None:
    running, live = np.random.default_rng(3), np.random.default_rng(3)
    running.spawn(2)
    saved = stored(generator_state(running))
    expected = [draws(child) for child in running.spawn(2)]
    assert set_generator_state(live, saved) == ""
    assert [draws(child) for child in live.spawn(2)] == expected


def test_children_that_cannot_be_counted_on_are_reported(stored: Any) -> None:
    running = np.random.default_rng(3)
    saved = stored(RngState({"mine": running}).state_dict())
    (message,) = RngState({"mine": np.random.default_rng(4)}).load_state_dict(saved)
    assert message.startswith("mine: its seed sequence is another one")
    ahead = np.random.default_rng(3)
    ahead.spawn(1)
    (message,) = RngState({"mine": ahead}).load_state_dict(saved)
    assert "more children" in message


def test_a_list_as_entropy_is_understood(stored: Any) -> None:
    generator = np.random.default_rng([1, 2**70])
    saved = stored(generator_state(generator))
    expected = draws(generator)
    assert set_generator_state(generator, saved) == ""
    assert draws(generator) == expected


def refused(live: RngState, saved: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        live.check_state_dict(saved)
    assert caught.value.remedy
    return str(caught.value)


def test_a_named_generator_on_one_side_only_is_refused(stored: Any) -> None:
    with_one = RngState({"sampler": torch.Generator()})
    assert "sampler" in refused(RngState(), stored(with_one.state_dict()))
    assert "rng: sampler" in refused(with_one, stored(RngState().state_dict()))


def test_a_generator_of_another_kind_is_refused_with_both(stored: Any) -> None:
    saved = stored(RngState({"mine": MAKERS["PCG64"](0)}).state_dict())
    message = refused(RngState({"mine": MAKERS["Philox"](0)}), saved)
    assert "PCG64" in message
    assert "Philox" in message
    assert "Python generator" in refused(RngState({"mine": random.Random()}), saved)


def test_a_torch_state_of_another_size_is_refused(stored: Any) -> None:
    saved = stored(RngState().state_dict())
    saved["torch"] = saved["torch"][:16]
    assert "(16,)" in refused(RngState(), saved)
    with pytest.raises(InvalidStateError, match="rng: torch"):
        RngState().check_content("rng", saved)


@pytest.mark.parametrize("state", [None, {}, {"python": 3}, {"python": {}, "numpy": {}}])
def test_what_is_no_random_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidStateError, match="rng"):
        RngState().check_content("rng", state)


@pytest.mark.parametrize("given", [random.SystemRandom(), 3, np.random.SeedSequence(1)], ids=type)
def test_what_has_no_state_to_save_is_refused_when_declared(given: Any) -> None:
    with pytest.raises(DeclarationError, match="no state to save"):
        RngState({"mine": given})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without CUDA")
@pytest.mark.parametrize("current", [{}, {"current_device": "cuda:1"}], ids=["older", "newer"])
def test_cuda_devices_that_are_not_here_are_reported(stored: Any, current: dict[str, str]) -> None:
    saved = stored(RngState().state_dict())
    assert saved["cuda"] == []
    saved |= {"cuda": [CUDA_STATE, DRAWN_CUDA_STATE], **current}
    state = RngState()
    state.check_state_dict(saved)
    (message,) = state.load_state_dict(saved)
    assert message.startswith("draws may differ on cuda:1: the checkpoint has")
    assert message.endswith("here are 0")
    saved["cuda"][1] = CUDA_STATE
    assert state.load_state_dict(saved) == ()  # nothing was drawn on them


@pytest.mark.parametrize("name", ["cuda:2", "cuda", "python:0", "xpu:0", 0])
def test_a_current_device_without_a_state_is_refused(name: Any) -> None:
    devices = {"cuda": [CUDA_STATE] * 2, "current_device": name}
    with pytest.raises(StateMismatchError, match="current_device"):
        RngState().check_state_dict({**RngState().state_dict(), **devices})


def test_a_new_rank_gets_the_states_of_devices_with_the_current_one_first() -> None:
    """Ranks that drew alike drew on different devices."""
    common = RngState().state_dict()
    states = {
        rank: {**common, "cuda": devices, "current_device": f"cuda:{rank}"}
        for rank, devices in enumerate(
            ([DRAWN_CUDA_STATE, CUDA_STATE], [CUDA_STATE, DRAWN_CUDA_STATE])
        )
    }
    found, (message,) = RngState().resplit_state_dict(states, WorldChange(2, 3, 2))
    assert (
        message
        == "rng: rank 2 is new, it takes the random state that the former ranks had in common"
    )
    assert (found["cuda"], found["current_device"]) == (states[0]["cuda"], "cuda:0")
    del states[1]["current_device"]  # then they did not draw alike
    _, (message,) = RngState().resplit_state_dict(states, WorldChange(2, 3, 2))
    assert message == "rng: rank 2 is new, its cuda derived from the random state of rank 0"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_devices_continue(stored: Any) -> None:
    torch.randn(1, device="cuda")
    saved = stored(RngState().state_dict())
    expected = torch.randn(4, device="cuda").tolist()
    assert RngState().load_state_dict(saved) == ()
    assert torch.randn(4, device="cuda").tolist() == expected


GENERATORS: dict[str, Any] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "PCG64": np.random.default_rng,
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "RandomState": np.random.RandomState,
    "python": random.Random,
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


def seeded(seed: int) -> RngState:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return RngState({name: make(seed) for name, make in GENERATORS.items()})


def drawn(rng: RngState) -> dict[str, float]:
    named = {name: draw(generator) for name, generator in rng.generators.items()}
    common = {
        "global python": random.random(),
        "global numpy": float(np.random.rand()),
        "global torch": float(torch.rand(())),
    }
    return {**named, **common}


def drawn_by(rank: int, states: list[Any], world_size: int) -> tuple[dict[str, float], Any]:
    """What a rank of the new job draws first, and the messages."""
    change = WorldChange(rank, world_size, len(states))
    rng = seeded(1234)  # whatever the process happens to be at
    state, messages = rng.resplit_state_dict({r: states[r] for r in change.readable}, change)
    rng.check_state_dict(state)
    rng.load_state_dict(copy.deepcopy(state))
    return drawn(rng), messages


def test_a_new_rank_draws_its_own_numbers_and_the_same_each_time() -> None:
    states = [seeded(seed).state_dict() for seed in (0, 1)]
    by_rank = [drawn_by(rank, states, 5) for rank in range(5)]
    for rank in range(2):
        expected = drawn(seeded(rank))
        assert by_rank[rank] == (expected, ())
    for name in by_rank[0][0]:
        assert len({numbers[name] for numbers, _ in by_rank}) == 5, name
    assert by_rank == [drawn_by(rank, states, 5) for rank in range(5)]
    assert by_rank[4][1] == (
        "rng: rank 4 is new, its python, numpy, torch, "
        + ", ".join(f"generator {name}" for name in GENERATORS)
        + " derived from the random state of rank 0",
    )


def test_what_all_former_ranks_drew_alike_a_new_one_draws_alike() -> None:
    states = [seeded(7).state_dict() for _ in range(2)]
    torch.manual_seed(8)
    states[1]["torch"] = torch.get_rng_state()
    numbers, (message,) = drawn_by(2, states, 3)
    expected = drawn(seeded(7))
    differing = [name for name in numbers if numbers[name] != expected[name]]
    assert differing == ["global torch"]
    assert message == "rng: rank 2 is new, its torch derived from the random state of rank 0"


def test_one_former_rank_does_not_show_whether_the_ranks_were_alike() -> None:
    states = [seeded(7).state_dict()]
    (first, _), (second, _) = (drawn_by(rank, states, 2) for rank in range(2))
    assert not set(first.items()) & set(second.items())


def test_a_cuda_state_gets_another_seed_and_keeps_its_offset() -> None:
    state = torch.arange(16, dtype=torch.uint8)
    found, derived = states_of_new_rank({0: {"cuda": [state, state]}}, 1)
    first, second = found["cuda"]
    assert derived == ("cuda",)
    assert first.dtype == torch.uint8
    assert first.shape == (16,)
    assert first[8:].tolist() == second[8:].tolist() == list(range(8, 16))
    seeds = {tuple(each[:8].tolist()) for each in (state, first, second)}
    assert len(seeds) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_cuda_generator_takes_a_derived_state() -> None:
    state = torch.cuda.get_rng_state()
    found, _ = states_of_new_rank({0: {"cuda": [state]}}, 1)
    torch.cuda.set_rng_state(found["cuda"][0])
    assert torch.equal(torch.cuda.get_rng_state(), found["cuda"][0])


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_derived_state_fits_its_generator(kind: str) -> None:
    generator = GENERATORS[kind](3)
    found, _ = states_of_new_rank({0: {kind: generator_state(generator)}}, 1)
    other = GENERATORS[kind](3)
    assert set_generator_state(other, found[kind]) == ""
    assert draw(other) != draw(generator)


def test_each_former_rank_is_in_the_care_of_one_rank() -> None:
    for former in range(1, 9):
        for now in range(1, 9):
            changes = [WorldChange(rank, now, former) for rank in range(now)]
            inherited = [rank for change in changes for rank in change.inherited]
            assert sorted(inherited) == list(range(former))
            for change in changes:
                assert {0, change.model_rank, *change.inherited} <= set(change.readable)
                assert set(change.readable) <= set(range(former))
                assert change.is_new == (change.rank not in range(former))


def test_a_new_rank_gets_a_copy_of_a_former_ranks_buffers() -> None:
    states = {rank: {"running_mean": torch.full((2,), float(rank))} for rank in (0, 1)}
    buffers = RankBuffers(ModelState(nn.BatchNorm1d(2)), key="model/rank_buffers")
    kept, messages = buffers.resplit_state_dict(states, WorldChange(1, 3, 2))
    assert (kept, messages) == (states[1], ())
    copied, messages = buffers.resplit_state_dict(states, WorldChange(2, 3, 2))
    assert copied is states[0]
    assert messages == ("model/rank_buffers: rank 2 is new, its buffers are those of rank 0",)
