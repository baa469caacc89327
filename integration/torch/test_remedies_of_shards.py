"""The remedies for models that are sharded over the ranks, followed on two ranks."""

from __future__ import annotations

import ast
import pkgutil
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_remedies import Remedy
from preloads import TORCH
from remedies_on_ranks import Cases, assert_exact, local, train
from sharded_workloads import in_a_process_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import resumekit
from resumekit import StateComponent
from resumekit.adapters.torch import Checkpointer
from resumekit.testing import Kit

PRELOAD = TORCH
CPU = torch.device("cpu")

cases = Cases()


@in_a_process_group
def follow(directory: str, *, layout: str = "") -> None:
    """One launch for all cases."""
    cases.run(Path(directory))


@pytest.fixture(scope="module")
def failures(kit: Kit) -> dict[str, str]:
    return cases.failures(kit, follow)


# ---------------------------------------------------------------- models


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False))


def make_fsdp1(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(make_net(), device_id=CPU, **options)


def make_fsdp2() -> nn.Module:
    net: Any = fully_shard(make_net(), mesh=init_device_mesh("cpu", (2,)))
    return net


def make_parallel() -> Any:
    """Under tensor parallel; the last layer is replicated."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    plan: Any = {each: ColwiseParallel(output_layouts=Replicate()) for each in "01"}
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def launch(
    directory: Path,
    make: Callable[[], nn.Module],
    *,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    average: nn.Module | None = None,
    is_alike: bool = False,
    leave_after: int = 4,
    **options: Any,
) -> tuple[int, list[torch.Tensor]]:
    """Trains a model that is made in this way; an average follows it.

    Args:
        directory: of the run.
        make: makes the model.
        kind: makes its optimizer.
        average: follows the model.
        is_alike: whether all ranks take the same data, as under tensor parallel.
        leave_after: the last step of this launch.
        **options: of the Checkpointer.
    """
    model = make()
    optimizer = kind(model.parameters(), lr=0.1)
    given = {"save_every": 1, "loop_variables": "off", **options}
    if average is not None:
        given["ema"] = average
    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, **given)
    each_step = None if average is None else partial(move, average, model)
    return train(
        *(checkpointer, model, optimizer),
        leave_after=leave_after,
        is_alike=is_alike,
        each_step=each_step,
    )


def move(average: nn.Module, model: nn.Module) -> None:
    """One step of an exponential moving average."""
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data.lerp_(fast.detach(), 0.1)


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    found = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, tensor.contiguous())
    return found


def named_in(text: str) -> Callable[..., Any]:
    """The function whose full name is in a remedy."""
    found: Callable[..., Any] = pkgutil.resolve_name(re.findall(r"torch[\w.]+", text)[0])
    return found


# ---------------------------------------------------------------- FSDP1


@cases.follows("Pass use_orig_params=True, or use torch.distributed.fsdp.fully_shard")
def keep_the_parameters(directory: Path, remedy: Remedy) -> None:
    wrong = partial(make_fsdp1, use_orig_params=False)
    text = remedy.of(launch, directory / "wrong", wrong)
    ((name, value),) = re.findall(r"(\w+)=(\w+)", text)
    named = partial(make_fsdp1, **{name: ast.literal_eval(value)})
    assert_exact(directory / "named", partial(launch, make=named))
    assert_exact(directory / "other", partial(launch, make=lambda: named_in(text)(make_net())))


@cases.follows("Use torch.distributed.fsdp.fully_shard")
def shard_the_average(directory: Path, remedy: Remedy) -> None:
    def average(shard: Callable[[nn.Module], Any], where: Path, leave_after: int = 4) -> Any:
        ema = shard(make_net())
        result = launch(where, make_fsdp2, average=ema, leave_after=leave_after)
        return result[0], [local(each).detach().clone() for each in ema.parameters()]

    wrong = partial(FullyShardedDataParallel, use_orig_params=True, device_id=CPU)
    text = remedy.of(average, wrong, directory / "wrong")
    assert_exact(directory, partial(average, named_in(text)))


@cases.follows("Use torch.distributed.fsdp.fully_shard with tensor parallel")
def shard_two_dimensions(directory: Path, remedy: Remedy) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))

    def make(shard: Callable[..., Any]) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        net = parallelize_module(make_net(), mesh["tensor"], plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 has one rank to shard over
            made: nn.Module = shard(net, mesh["shard"])
        return made

    def flat(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return FullyShardedDataParallel(net, device_mesh=mesh, use_orig_params=True, device_id=CPU)

    launch_alike = partial(launch, is_alike=True)
    text = remedy.of(launch_alike, directory / "wrong", partial(make, flat))
    right = partial(make, lambda net, mesh: named_in(text)(net, mesh=mesh))
    assert_exact(directory, partial(launch_alike, make=right))


class RecentNorms(torch.optim.Optimizer):
    """Divides a gradient by the norms of this one and the one before."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            norm = gradient.norm()
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms = self.state[parameter].get("norms", torch.ones(2))
            self.state[parameter]["norms"] = torch.stack([norms[1], norm])
            parameter.sub_(gradient * (self.param_groups[0]["lr"] / float(norms.sum() + norm)))


@cases.follows("Use torch.distributed.fsdp.fully_shard with this optimizer")
def keep_the_norms(directory: Path, remedy: Remedy) -> None:
    train_with = partial(launch, kind=RecentNorms)
    wrong = partial(make_fsdp1, use_orig_params=True)
    text = remedy.of(train_with, directory / "wrong", wrong)
    assert_exact(directory, partial(train_with, make=lambda: named_in(text)(make_net())))


# ---------------------------------------------------------------- options


@cases.follows("Leave it out: each rank or group saves its part")
def let_each_rank_save_its_shard(directory: Path, remedy: Remedy) -> None:
    remedy.of(launch, directory / "wrong", make_fsdp2, per_rank={"model"})
    assert_exact(directory, partial(launch, make=make_fsdp2))


class Weights:
    """A component that holds a model and is no module."""

    def __init__(self, net: nn.Module) -> None:
        self.state_dict, self.load_state_dict = net.state_dict, net.load_state_dict


@cases.follows("Leave mid_accumulation at 'boundary'")
def save_at_the_boundary(directory: Path, remedy: Remedy) -> None:
    def launch_other(
        directory: Path, leave_after: int = 4, **options: Any
    ) -> tuple[int, list[torch.Tensor]]:
        """One whose gradients nobody knows."""
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        parts: dict[str, Any] = {"model": Weights(net), "optimizer": optimizer}
        components = [StateComponent(key, each) for key, each in parts.items()]
        given = {"save_every": 1, "loop_variables": "off", **options}
        checkpointer = resumekit.Checkpointer(directory, components=components, **given)
        return train(checkpointer, net, optimizer, leave_after=leave_after, is_alike=True)

    calls: dict[str, Callable[..., tuple[int, list[torch.Tensor]]]] = {
        "shards": partial(launch, make=make_fsdp2),
        "other": launch_other,
    }
    for name, call in calls.items():
        text = remedy.of(call, directory / f"{name} wrong", mid_accumulation="gradients")
        ((option, value),) = re.findall(r"Leave (\w+) at '(\w+)'", text)
        assert_exact(directory / name, partial(call, **{option: value}))


# ---------------------------------------------------------------- replicas and ties


@cases.follows("Tie the tensors on every rank, or on none")
def tie_on_all_or_none(directory: Path, remedy: Remedy) -> None:
    def make(is_tied: bool) -> nn.Module:
        net = make_parallel()
        if is_tied:
            net[1].weight = net[0].weight
        return net

    rank = torch.distributed.get_rank()
    launch_alike = partial(launch, is_alike=True)
    remedy.of(launch_alike, directory / "wrong", partial(make, rank == 0))
    for is_tied in (True, False):
        assert_exact(directory / str(is_tied), partial(launch_alike, make=partial(make, is_tied)))


def make_copies(*, is_sharded: bool, is_synchronised: bool = False) -> nn.Module:
    """The last parameter differs between the ranks: a plain tensor, or a replicated shard."""
    net: Any = make_parallel()
    if is_sharded:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        net = fully_shard(make_net(), mesh=mesh)
    with torch.no_grad():
        last = local([*net.parameters()][-1])
        last += torch.distributed.get_rank()
        if is_synchronised:
            torch.distributed.broadcast(last, 0)
    return net


@cases.follows('pass per_rank={"{}"} (resumekit run: --per-rank {})')
def let_each_rank_save_its_bias(directory: Path, remedy: Remedy) -> None:
    launch_alike = partial(launch, is_alike=True)
    make = partial(make_copies, is_sharded=False)
    whole = Remedy(f"Synchronise it, or {remedy.text}")
    text = whole.of(launch_alike, directory / "wrong", make)
    alike = partial(make, is_synchronised=True)
    assert_exact(directory / "alike", partial(launch_alike, make=alike))
    (name,) = re.findall(r'per_rank=\{"(\w+)"\}', text)
    named = {name, "optimizer"}
    assert_exact(directory / "each", partial(launch_alike, make=make, per_rank=named))


@cases.follows("pass validate='off' to save one of them")
def make_copies_alike(directory: Path, remedy: Remedy) -> None:
    launch_alike = partial(launch, is_alike=True)
    make = partial(make_copies, is_sharded=True)
    whole = Remedy(f"Synchronise it, or {remedy.text}")
    text = whole.of(launch_alike, directory / "wrong", make)
    alike = partial(make, is_synchronised=True)
    assert_exact(directory / "alike", partial(launch_alike, make=alike))
    ((name, value),) = re.findall(r"(\w+)='(\w+)'", text)
    _, ends = launch_alike(directory / "off", make, **{name: value})
    copies = gathered(ends[-1])
    assert not torch.equal(*copies)
    num_steps, loaded = launch_alike(directory / "off", make)  # after its end
    assert num_steps == 0
    saved, other = gathered(loaded[-1])
    assert torch.equal(saved, other)
    assert any(torch.equal(saved, each) for each in copies)


class Sum:
    """A sum over the ranks, of which each has a summand."""

    def __init__(self) -> None:
        rank = torch.distributed.get_rank()
        mesh = init_device_mesh("cpu", (2,))
        self.value = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial()])

    def state_dict(self) -> dict[str, DTensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        local(self.value).copy_(local(state["value"]))


@cases.follows("Call redistribute() with Replicate or Shard first")
def add_up_the_summands(directory: Path, remedy: Remedy) -> None:
    text = remedy.of(launch, directory / "wrong", make_fsdp2, ema=Sum())
    ((call, *kinds),) = re.findall(r"(\w+)\(\) with (\w+) or (\w+)", text)
    placements: dict[str, Placement] = {"Replicate": Replicate(), "Shard": Shard(0)}
    for kind in kinds:
        total = Sum()
        total.value = getattr(total.value, call)(placements=[placements[kind]])
        launch(directory / kind, make_fsdp2, ema=total, leave_after=2)
        local(total.value).zero_()
        launch(directory / kind, make_fsdp2, ema=total)
        assert total.value.full_tensor().tolist() == [3.0] * 4


# ---------------------------------------------------------------- batches


@cases.follows("A save needs all ranks: give them as many batches each, without join()")
def give_all_ranks_as_many_batches(directory: Path, remedy: Remedy) -> None:
    rank = torch.distributed.get_rank()

    def launch_uneven(directory: Path) -> None:
        model = nn.parallel.DistributedDataParallel(make_net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(TensorDataset(torch.ones(4 + rank, 4)))
        checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, save_every=1)
        with checkpointer, model.join():
            for (batch,) in checkpointer.batches(loader, epochs=1):
                model(batch).sum().backward()
                checkpointer.step()

    remedy.of(launch_uneven, directory / "wrong")
    assert_exact(
        directory, partial(launch, make=lambda: nn.parallel.DistributedDataParallel(make_net()))
    )


@pytest.mark.parametrize("text", cases)
def test_two_ranks_follow(failures: dict[str, str], text: str) -> None:
    assert not failures[text], failures[text]
