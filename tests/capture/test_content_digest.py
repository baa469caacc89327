"""Content digests: equal for equal content, other for every change that a program can see."""

from __future__ import annotations

import logging
from collections import deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumekit.capture.user_state.walk import content_digest

LIMIT = 10**8
Transition = namedtuple("Transition", "obs action reward")


class Slotted:
    __slots__ = ("items", "parent")

    def __init__(self) -> None:
        self.items = [1, 2.0, "three"]
        self.parent: Any = self


class Agent:
    def __init__(self) -> None:
        self.weights = torch.arange(2**19, dtype=torch.float32)
        self.buffer = deque([Transition(np.arange(3.0), 1, 0.5)], maxlen=4)
        self.net = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.net.weight)
        self.inner = Slotted()
        self.log = logging.getLogger("agent")


def digest(value: Any) -> int:
    found = content_digest(value, limit_bytes=LIMIT)
    assert found is not None
    return found


def flip(agent: Agent) -> None:
    agent.weights = agent.weights.flip(0)


def roll(agent: Agent) -> None:
    agent.weights = agent.weights.roll(1)


def permute(agent: Agent) -> None:
    agent.weights = agent.weights[torch.randperm(2**19)]


def write_through_data(agent: Agent) -> None:
    agent.net.weight.data[0, 0] = 2.0


def append(agent: Agent) -> None:
    agent.buffer.append(agent.buffer[0])


def change_a_slot(agent: Agent) -> None:
    agent.inner.items[2] = "four"


def cut_a_cycle(agent: Agent) -> None:
    agent.inner.parent = Slotted()


CHANGES = (flip, roll, permute, write_through_data, append, change_a_slot, cut_a_cycle)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_every_change_is_seen(change: Any) -> None:
    agent = Agent()
    before = digest(agent)
    assert before == digest(agent) == digest(Agent())
    change(agent)
    assert digest(agent) != before


def test_an_optimizer_is_its_state() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    before = digest(optimizer)
    model(torch.ones(1)).backward()
    optimizer.step()
    assert digest(optimizer) != before


@pytest.mark.parametrize("value", [iter([1]), (n for n in (1,)), [iter([1])], logging])
def test_what_cannot_be_read_has_no_digest(value: Any) -> None:
    assert content_digest(value, limit_bytes=LIMIT) is None


def test_what_is_larger_than_the_limit_has_no_digest() -> None:
    assert content_digest(torch.zeros(1000), limit_bytes=3999) is None
    assert content_digest(torch.zeros(1000), limit_bytes=4000) is not None


def transitions() -> deque[Any]:
    rows = (Transition(np.full(3, i, np.float32), i, i / 2) for i in range(200))
    return deque(rows, maxlen=300)


ROW_CHANGES: dict[str, Any] = {
    "an array's element": lambda rows: rows[150].obs.__setitem__(2, 0.5),
    "a number": lambda rows: rows.__setitem__(150, rows[150]._replace(action=7)),
    "a type": lambda rows: rows.__setitem__(150, rows[150]._replace(reward=75)),
    "an element type": lambda rows: rows.__setitem__(
        150, rows[150]._replace(obs=rows[150].obs.astype(np.int32))
    ),
    "a shape": lambda rows: rows.__setitem__(150, rows[150]._replace(obs=np.zeros(4))),
    "the order": lambda rows: rows.rotate(1),
    "the length": lambda rows: rows.pop(),
}


@pytest.mark.parametrize("change", ROW_CHANGES.values(), ids=ROW_CHANGES)
def test_every_change_of_a_long_sequence_of_rows_is_seen(change: Any) -> None:
    rows = transitions()
    before = digest(rows)
    assert before == digest(transitions())
    change(rows)
    assert digest(rows) != before


def test_rows_that_share_an_array_differ_from_rows_with_equal_arrays() -> None:
    one = np.ones(3)
    shared, equal = [(one, 1)] * 200, [(np.ones(3), 1) for _ in range(200)]
    assert digest(shared) == digest([(one.copy(), 1)] * 200)
    assert digest(shared) != digest(equal)


@pytest.mark.parametrize("kind", [float, int])
def test_the_length_limit_of_a_deque_is_content(kind: Any) -> None:
    values = [kind(each) for each in range(100)]
    assert digest(deque(values, maxlen=200)) != digest(deque(values, maxlen=300))
