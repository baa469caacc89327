"""Slots take one object or a dict of named ones."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from resumekit.capture.model import by_key
from resumekit.capture.slots import state_components
from resumekit.errors import DeclarationError
from resumekit.state import SharingPattern, Slot


def test_one_object_has_the_key_of_its_slot() -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    components = state_components(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler.StepLR(optimizer, 1),
        grad_scaler=torch.amp.GradScaler("cpu"),
        ema=AveragedModel(model),
    )
    keys = [component.key for component in components]
    shared = ["model", "optimizer", "lr_scheduler", "grad_scaler", "ema"]
    assert keys == [*shared, "model/attributes"]
    assert {cast(Any, component.stateful).key for component in components} == set(keys)
    patterns = {component.key: component.sharing_pattern for component in components}
    assert patterns.pop("model/attributes") is SharingPattern.PER_RANK
    assert set(patterns.values()) == {SharingPattern.REPLICATED}


def test_named_objects_have_their_names_in_their_keys_and_the_models_name_parameters() -> None:
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    optimizer = SGD([p for model in models.values() for p in model.parameters()])
    components = {
        component.key: component.stateful
        for component in state_components(model=models, optimizer={"both": optimizer})
    }
    attributes = ["model/a/attributes", "model/b/attributes"]
    assert list(components) == ["model/a", "model/b", "optimizer/both", *attributes]
    names = components["optimizer/both"].state_dict()["parameters"]
    assert list(names) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_an_empty_slot_has_no_component() -> None:
    assert by_key(Slot.EMA, None) == {}
    keys = [c.key for c in state_components(model=nn.Linear(1, 1))]
    assert keys == ["model", "model/attributes"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([nn.Linear(1, 1)], "a list of objects without names"),
        ({"": nn.Linear(1, 1)}, "the name ''"),
        ({"a/b": nn.Linear(1, 1)}, "the name 'a/b'"),
        ({3: nn.Linear(1, 1)}, "the name 3"),
        ({"a": 3}, "model/a: a int"),
        (3, "model: a int"),
    ],
)
def test_what_cannot_be_a_slot_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        by_key(Slot.MODEL, given)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"expected a torch\.nn\.Module"):
        state_components(model=SGD(nn.Linear(1, 1).parameters()))
