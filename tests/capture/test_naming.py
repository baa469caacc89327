"""Names that no wrapper changes, and that a user's own ``module`` keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel

from resumekit.capture.model import clean_name, clean_names, parameter_names, unwrapped
from resumekit.errors import ConfigurationError


class Misleading(nn.Module):
    """Its own sub-modules are called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


PLAIN = list(Misleading().state_dict())


def wrapped_inside(model: Misleading) -> Misleading:
    model.block[1] = checkpoint_wrapper(compiled(model.block[1]))
    model.block = compiled(checkpoint_wrapper(model.block))
    return model


WRAPPINGS = {
    "plain": lambda model: model,
    "DataParallel": DataParallel,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "offloaded": offload_wrapper,
    "compiled DataParallel": lambda model: compiled(DataParallel(model)),
    "DataParallel of a compiled one": lambda model: DataParallel(compiled(model)),
    "checkpointed in a compiled one": lambda model: compiled(checkpoint_wrapper(model)),
    "wrapped inside": wrapped_inside,
    "wrapped inside and outside": lambda model: DataParallel(compiled(wrapped_inside(model))),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_names_are_those_of_the_unwrapped_module(wrapping: str) -> None:
    model = WRAPPINGS[wrapping](Misleading())
    assert [clean_name(model, raw) for raw in model.state_dict()] == PLAIN
    assert sorted(clean_names(model, model.state_dict()).values()) == sorted(PLAIN)
    named = [clean_name(model, raw) for raw, _ in model.named_parameters()]
    assert named == [name for name, _ in Misleading().named_parameters()]
    assert type(unwrapped(model)) is Misleading


@pytest.mark.usefixtures("_one_rank")
def test_names_in_ddp_are_those_of_the_unwrapped_module() -> None:
    for model in (
        DistributedDataParallel(Misleading()),
        DistributedDataParallel(compiled(Misleading())),
        compiled(DistributedDataParallel(wrapped_inside(Misleading()))),
    ):
        assert [clean_name(model, raw) for raw in model.state_dict()] == PLAIN
        assert type(unwrapped(model)) is Misleading


def test_a_class_derived_from_a_wrapper_is_a_wrapper() -> None:
    class Custom(DataParallel):
        pass

    assert clean_name(Custom(Misleading()), "module.module.weight") == "module.weight"


def test_a_class_that_only_has_the_name_of_a_wrapper_is_none() -> None:
    class OptimizedModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(1, 1)

    assert clean_name(OptimizedModule(), "_orig_mod.weight") == "_orig_mod.weight"


def test_two_tensors_that_get_one_name_are_refused() -> None:
    wrapper = DataParallel(nn.Linear(1, 1))
    wrapper.register_buffer("weight", torch.ones(1))
    with pytest.raises(ConfigurationError, match="one tensor for one name"):
        clean_names(wrapper, wrapper.state_dict())


def test_a_tied_parameter_is_called_by_its_first_name() -> None:
    model = Misleading()
    model.block[1].weight = model.module.weight
    assert parameter_names({"model": model}, [model.block[1].weight]) == ["module.weight"]


def test_a_parameter_of_no_module_has_no_name() -> None:
    assert parameter_names({}, [torch.ones(1)]) == [""]
