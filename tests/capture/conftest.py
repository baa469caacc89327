"""A small training job of real torch objects, and what the tests here say about states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumekit.capture.model import ModelState
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.rng import RngState
from resumekit.serialization.decoding import decode
from resumekit.serialization.digests import leaf_digests
from resumekit.serialization.encoding import encode

Make = Callable[[Any], Any]


class Net(nn.Module):
    """Sparse or dense embedding, dropout, and a layer that never gets a gradient."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=sparse)
        self.hidden = nn.Linear(4, 6)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(indices)))
        return self.head(self.dropout(hidden)).squeeze(-1)


class Job:
    """A training job: a model, an optimizer, maybe a scheduler, and the random state."""

    def __init__(
        self,
        make_optimizer: Make,
        make_scheduler: Make | None = None,
        *,
        seed: int = 0,
        sparse: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Net(sparse=sparse)
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.states: dict[str, Any] = {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.optimizer, {"model": self.model}),
            "rng": RngState(),
        }
        self.num_steps = 0

    def train(self, num_steps: int) -> list[tuple[str, ...]]:
        """The loss and the learning rates of each step, bit for bit."""
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> tuple[str, ...]:
        data = torch.Generator().manual_seed(self.num_steps)
        indices = torch.randint(8, (5,), generator=data)
        target = torch.randn(5, generator=data)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(indices) - target).square().mean()
            loss.backward()
            return loss

        loss = float(self.optimizer.step(closure).detach())
        if self.scheduler is not None:
            metric = (loss,) if hasattr(self.scheduler, "num_bad_epochs") else ()
            self.scheduler.step(*metric)
        self.num_steps += 1
        return (loss.hex(), *(float(g["lr"]).hex() for g in self.optimizer.param_groups))

    def save(self) -> dict[str, Any]:
        """The live state of each part."""
        saved = {name: stateful.state_dict() for name, stateful in self.states.items()}
        return {**saved, "num_steps": self.num_steps}

    def load(self, saved: Mapping[str, Any], leave_out: str = "") -> None:
        """Checks every part, then loads it; one may be left out."""
        for name, stateful in self.states.items():
            stateful.check_state_dict(saved[name])
        for name, stateful in self.states.items():
            if name != leave_out:
                assert stateful.load_state_dict(saved[name]) == ()
        self.num_steps = saved["num_steps"]


@pytest.fixture
def job() -> type[Job]:
    """The class of a training job."""
    return Job


@pytest.fixture
def stored() -> Callable[[Any], Any]:
    """Gives a state as it is read from storage."""
    return _stored


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    """Holds two states to be equal in types and bits."""
    return _assert_same


def _stored(state: Any) -> Any:
    encoded = encode(state, where="state")
    tensors = {name: _read(leaf) for name, leaf in encoded.tensors.items()}
    return decode(json.loads(json.dumps(encoded.tree)), tensors)


def _read(leaf: Any) -> torch.Tensor:
    data = np.frombuffer(b"".join(leaf.buffers()), dtype=np.uint8).copy()
    dtype = leaf.element.torch_dtype
    tensor = torch.from_numpy(data).view(dtype).reshape(leaf.shape)
    if leaf.strides is None:
        return tensor
    return torch.empty_strided(leaf.shape, leaf.strides, dtype=dtype).copy_(tensor)


def _assert_same(found: Any, expected: Any) -> None:
    found_digests, expected_digests = leaf_digests(found), leaf_digests(expected)
    differing = [n for n in expected_digests if found_digests.get(n) != expected_digests[n]]
    assert not differing, f"these leaves differ: {differing}"
    assert found_digests.keys() == expected_digests.keys()
    _assert_same_types(found, expected)


def _assert_same_types(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same_types(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for each, partner in zip(found, expected, strict=True):
            _assert_same_types(each, partner)
