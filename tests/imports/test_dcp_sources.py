"""Directories of ``torch.distributed.checkpoint`` as the start of a run; nothing in them runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.imports.content import read_content
from resumekit.imports.importing import import_checkpoint
from resumekit.imports.sharded import read_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavail)")


def made(order: tuple[int, ...] = (0, 1, 2, 3), split: int = 4) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = [list(net.parameters())[each] for each in order]
    groups = [{"params": parameters[:split]}, {"params": parameters[split:]}]
    return net, torch.optim.AdamW([each for each in groups if each["params"]], lr=0.1)


def trained() -> tuple[nn.Module, Any]:
    net, optimizer = made()
    for number in range(3):
        net(torch.full((2, 4), float(number))).sum().backward()
        optimizer.step()
    return net, optimizer


def named_state(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """As get_optimizer_state_dict gives it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return dict(get_optimizer_state_dict(net, optimizer))


def saved(path: Path, **more: Any) -> Path:
    net, optimizer = trained()
    state = {"model": net.state_dict(), "optim": named_state(net, optimizer), **more}
    dcp.save(state, checkpoint_id=path)
    return path


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and all(map(is_same, a, b)) and len(a) == len(b)
    return type(a) is type(b) and bool(a == b)


def test_what_was_saved_is_read_as_it_was(tmp_path: Path) -> None:
    _, optimizer = trained()
    state = {
        "optim": optimizer.state_dict(),  # by numbers
        "step": 3,
        "pair": (1, "a"),
        "list": [torch.ones(2), {"a": torch.zeros((), dtype=torch.int64)}],
        "nothing": torch.empty(0, 3),
    }
    dcp.save(state, checkpoint_id=tmp_path / "a")
    assert is_same(read_dcp(tmp_path / "a", trusts=False), state)
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))]).state_dict()
    dcp.save({"optim": plain}, checkpoint_id=tmp_path / "b")
    assert is_same(read_dcp(tmp_path / "b", trusts=False), {"optim": plain})
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    flat = {"a": torch.ones(2), "b": {"c": 1}}
    dcp.save(flat, checkpoint_id=tmp_path / "c", planner=planner)
    assert is_same(read_dcp(tmp_path / "c", trusts=False), flat)


def resume(source: Path, run: Path, net: nn.Module, optimizer: Any) -> None:
    options: Any = {"model": net, "optimizer": optimizer, "import_from": source}
    with Checkpointer(run, **options) as checkpointer:
        checkpointer.resume()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)])
def test_moments_have_names_whatever_the_order_of_the_optimizer(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    expected = trained()
    net, optimizer = made(order)
    resume(saved(tmp_path / "a"), tmp_path / "run", net, optimizer)
    assert is_same(named_state(net, optimizer)["state"], named_state(*expected)["state"])
    assert is_same(net.state_dict(), expected[0].state_dict())


def test_a_parameter_in_another_group_is_refused(tmp_path: Path) -> None:
    net, optimizer = made(split=2)
    dcp.save({"model": net.state_dict(), "o": named_state(net, optimizer)}, checkpoint_id=tmp_path)
    net, optimizer = made((2, 1, 0, 3), split=2)
    with pytest.raises(StateMismatchError, match="in param group 0, expected in group 1"):
        resume(tmp_path, tmp_path / "run", net, optimizer)


def flattened_state(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return dict(get_optimizer_state_dict(net, optimizer, options=options))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2)])
def test_a_flattened_optimizer_has_groups_by_their_hyperparameters(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    net, optimizer = made(split=2)
    optimizer.param_groups[1]["lr"] = 0.3
    for number in range(3):
        net(torch.full((2, 4), float(number))).sum().backward()
        optimizer.step()
    expected = named_state(net, optimizer)
    flat = flattened_state(net, optimizer)
    dcp.save({"model": net.state_dict(), "optim": flat}, checkpoint_id=tmp_path / "a")
    other, its_optimizer = made(order, split=2)
    resume(tmp_path / "a", tmp_path / "run", other, its_optimizer)
    found = named_state(other, its_optimizer)
    assert is_same(found["state"], expected["state"])
    assert [each["lr"] for each in found["param_groups"]] == [0.1, 0.3]
    assert is_same(other.state_dict(), net.state_dict())


def test_flattened_groups_of_equal_hyperparameters_are_refused_with_their_sizes(
    tmp_path: Path,
) -> None:
    net, optimizer = made(split=2)
    flat = flattened_state(net, optimizer)
    dcp.save({"model": net.state_dict(), "optim": flat}, checkpoint_id=tmp_path / "a")
    with pytest.raises(StateMismatchError, match=r"groups of 4 .*, expected groups of 2, 2 "):
        resume(tmp_path / "a", tmp_path / "run", *made(split=2))


def test_a_flattened_state_of_no_parameter_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    flat = {**flattened_state(net, optimizer), "state.2.weight.exp_avg": torch.ones(1)}
    dcp.save({"model": net.state_dict(), "optim": flat}, checkpoint_id=tmp_path)
    with pytest.raises(ConfigurationError, match=r"state of 2\.weight, which is no parameter"):
        read_content(tmp_path)


# ---------------------------------------------------------------- nothing of it runs


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_metadata_that_names_anything_else_is_refused_and_not_made(tmp_path: Path) -> None:
    source, proof = saved(tmp_path / "a"), tmp_path / "proof"
    metadata = pickle.loads((source / ".metadata").read_bytes())  # noqa: S301
    metadata.planner_data["more"] = Hostile(proof)
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigurationError, match=r"it names pathlib\.Path\.touch"):
        import_checkpoint(source, tmp_path / "run")
    assert not proof.exists()
    assert not (tmp_path / "run").exists()
    dcp.FileSystemReader(source).read_metadata()
    assert proof.exists()  # the control: torch's own reader makes it


def test_metadata_does_not_change_the_classes_of_torch(tmp_path: Path) -> None:
    # The global, then (None, {"poison": 1}) as its state.
    hostile = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'poison'\nI1\nstb."
    source = saved(tmp_path / "a")
    (source / ".metadata").write_bytes(hostile)
    with pytest.raises(ConfigurationError, match="it cannot be read"):
        read_content(source)
    assert not hasattr(Metadata, "poison")
    pickle.loads(hostile)  # noqa: S301  (the control)
    assert hasattr(Metadata, "poison")
    del Metadata.poison


def test_an_object_among_the_values_is_refused_and_not_made(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    source = saved(tmp_path / "a", more=Hostile(proof))
    with pytest.raises(ConfigurationError, match="only an unrestricted pickle can make"):
        read_content(source)
    assert not proof.exists()


def outside(metadata: Any, key: str) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            info.relative_path = f"../a/{info.relative_path}"


def short(metadata: Any, key: str) -> None:
    chunk = metadata.state_dict_metadata[key].chunks[0]
    chunk.sizes = torch.Size((3, 4))


def twice(metadata: Any, key: str) -> None:
    entry = metadata.state_dict_metadata[key]
    entry.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 4)))] * 2


def larger(metadata: Any, key: str) -> None:
    entry = metadata.state_dict_metadata[key]
    entry.size = entry.chunks[0].sizes = torch.Size((5, 4))


def huge(metadata: Any, key: str) -> None:
    entry = metadata.state_dict_metadata[key]
    entry.size = entry.chunks[0].sizes = torch.Size((1 << 60, 4))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (outside, "not in the directory"),
        (short, "its parts miss 4 of its elements"),
        (twice, "its parts overlap by 16"),
        (larger, r"the part \[0:5, 0:4\] is another one"),
        (huge, "not one as a DCP checkpoint"),
    ],
)
def test_a_tensor_has_exactly_its_parts(
    tmp_path: Path, damage: Callable[[Any, str], None], text: str
) -> None:
    source = saved(tmp_path / "a")
    metadata = pickle.loads((source / ".metadata").read_bytes())  # noqa: S301
    damage(metadata, "model.0.weight")
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigurationError, match=text):
        read_content(source)


def test_files_that_are_cut_or_missing_are_an_error_of_one_line(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    (file,) = source.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-400])
    with pytest.raises(ConfigurationError, match="it cannot be read"):
        read_content(source)
    file.rename(source / "__9_0.distcp")
    with pytest.raises(ConfigurationError, match="it cannot be read"):
        read_content(source)
    (source / ".metadata").write_bytes(b"\x80\x04}")
    with pytest.raises(ConfigurationError, match="it cannot be read"):
        read_content(source)
