"""Tensors of user code go back to the kind of memory that they lay in."""

from __future__ import annotations

import torch
from torch import nn

from resumekit.capture.devices import device_of, made_on, off_host


def test_values_that_are_not_in_host_memory_are_named() -> None:
    values = {"here": [torch.ones(1)], "there": [torch.ones(1, device="meta")], "none": []}
    assert off_host(values, list) == ["there"]


def test_a_tensor_is_made_where_it_is_wanted_and_is_no_alias() -> None:
    saved = torch.ones(2)
    assert made_on(torch.device("meta"))(saved).is_meta
    for device in (None, torch.device("cpu")):
        made = made_on(device)(saved)
        made += 1
        assert torch.equal(saved, torch.ones(2))


def test_the_device_is_that_of_the_first_tensor() -> None:
    assert device_of([]) is None
    assert device_of([nn.ReLU(), nn.Linear(1, 1, device="meta")]) == torch.device("meta")
    assert device_of([nn.BatchNorm1d(1, affine=False)]) == torch.device("cpu")
