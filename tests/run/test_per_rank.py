"""The option ``per_rank``: which components it changes, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Checkpointer
from resumekit.adapters.torch import Checkpointer as TorchCheckpointer
from resumekit.capture.slots import state_components
from resumekit.distributed import World
from resumekit.errors import ConfigurationError
from resumekit.run.components import RunComponents
from resumekit.run.options import Options
from resumekit.state import SharingPattern, StateComponent
from resumekit.storage.store import Store

OF_GROUPS = (SharingPattern.SHARDED, SharingPattern.PER_GROUP)


def given() -> Sequence[StateComponent]:
    """A model, two optimizers, of which one trains a bare tensor, and a scheduler."""
    model, bare = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    adam = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1)
    optimizers = {"adam": adam, "sgd": torch.optim.SGD([bare], lr=0.1)}
    return state_components(model=model, optimizer=optimizers, lr_scheduler=scheduler)


def per_rank(*names: str, num_ranks: int = 2) -> tuple[RunComponents, set[str]]:
    """The components of a run; those that the option makes per rank."""
    owned = RunComponents(Options(per_rank=names), {}, {}, num_ranks=num_ranks)
    plain = RunComponents(Options(), {}, {}, num_ranks=num_ranks)
    owned.set_given(given())
    plain.set_given(given())
    before = {each.key: each.sharing_pattern for each in plain.all}
    after = {each.key: each.sharing_pattern for each in owned.all}
    changed = {key for key, pattern in after.items() if before[key] is not pattern}
    assert {after[key] for key in changed} <= {SharingPattern.PER_RANK}
    assert owned.per_rank == changed
    return owned, changed


@pytest.mark.parametrize(
    ("names", "changed"),
    [
        ((), ()),
        (("optimizer",), ("optimizer/adam", "optimizer/sgd")),
        (("optimizer/adam",), ("optimizer/adam",)),
        (("optimizer/sgd/parameters",), ("optimizer/sgd/parameters",)),
        (("lr_scheduler", "extras"), ("lr_scheduler", "extras")),
        (("rng", "model/attributes"), ()),
    ],
    ids=str,
)
def test_a_key_or_a_slot_names_components_with_one_state(
    names: tuple[str, ...], changed: tuple[str, ...]
) -> None:
    assert per_rank(*names)[1] == set(changed)


def test_parameters_that_training_adds_stay_replicated() -> None:
    owned, _ = per_rank("optimizer")
    (adam,) = [each for each in owned.optimizers() if isinstance(each, torch.optim.AdamW)]
    adam.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert owned.add_late(World())
    patterns = {each.key: each.sharing_pattern for each in owned.all}
    assert patterns["optimizer/adam/parameters"] is SharingPattern.REPLICATED
    assert patterns["optimizer/adam"] is SharingPattern.PER_RANK


def test_files_that_describe_one_model_are_not_written_for_several() -> None:
    component = StateComponent("model", nn.Linear(1, 1), files=lambda: {"config.json": b"{}"})
    owned = RunComponents(Options(per_rank={"model"}), {}, {}, num_ranks=2)
    owned.set_given([component])
    assert owned.all[0].files is None


@pytest.mark.parametrize("name", ["ema", "optimizer/muon"])
def test_a_name_that_no_component_has_is_refused_with_those_that_exist(
    tmp_path: Path, name: str
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"model": model, "optimizer": optimizer, "per_rank": {name}}
    with (
        TorchCheckpointer(tmp_path, **found) as checkpointer,
        pytest.raises(ConfigurationError) as caught,
    ):
        checkpointer.resume()
    assert f"per_rank: no component of this run is called {name!r}" in str(caught.value)
    assert "some of model, optimizer, " in str(caught.value)


def test_an_optimizer_that_the_loop_has_may_be_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = TorchCheckpointer(tmp_path, model=model, per_rank={"optimizer"})
    for _ in checkpointer.batches(DataLoader(TensorDataset(torch.ones(2))), epochs=1):
        model(torch.ones(1)).backward()
        optimizer.step()
        checkpointer.step()
    checkpointer.close()


@pytest.mark.parametrize("pattern", OF_GROUPS)
def test_a_component_that_is_sharded_or_of_a_group_is_refused(
    tmp_path: Path, pattern: SharingPattern
) -> None:
    group: Any = None if pattern is SharingPattern.SHARDED else [0]
    component = StateComponent("optimizer", nn.Linear(1, 1), pattern, process_group=group)
    with pytest.raises(ConfigurationError, match=f"per_rank: optimizer is {pattern.value}"):
        Checkpointer(tmp_path, components=[component], per_rank={"optimizer"})


def test_in_one_process_the_option_changes_nothing(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for names in ({"optimizer"}, set[str](), {"optimizer"}):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        found: dict[str, Any] = {"model": model, "optimizer": optimizer, "per_rank": names}
        with TorchCheckpointer(tmp_path, **found) as checkpointer:
            assert checkpointer.resume().resumed == bool(state)
            assert str(optimizer.state_dict()) == str(state or optimizer.state_dict())
            model(torch.ones(1)).backward()
            optimizer.step()
            checkpointer.save()
        state = optimizer.state_dict()
    store = Store(tmp_path)
    for name in store.step_names():
        manifest = store.open_step(name).manifest
        assert {each.key: each.pattern for each in manifest.components}["optimizer"] == "replicated"
        assert "per_rank" not in manifest.details
