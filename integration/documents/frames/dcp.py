"""FSDP2 on two ranks: a run, then another program that loads its newest step, then saves."""

import os

import torch
from parts import objects
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resumekit.adapters.torch import Checkpointer

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _, _ = objects()
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[each]["exp_avg"] for each in model.parameters()]
    return [each.detach().to_local().clone() for each in (*model.parameters(), *moments)]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


trained, its_optimizer = sharded()
loader = objects()[2]
ckpt = Checkpointer("runs/a", model=trained, optimizer=its_optimizer)
for (x,) in ckpt.batches(loader, epochs=1):
    (trained(x) - x).square().mean().backward()
    its_optimizer.step()
    its_optimizer.zero_grad()
expected = values(trained, its_optimizer)
ckpt.close()

model, optimizer = sharded()
...  # fragment 1
assert are_equal(values(model, optimizer), expected)


class App:
    def state_dict(self):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state):
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


app = App()
for number in (1, 2):
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert not are_equal(values(model, optimizer), expected)
    if number == 1:
        ...  # fragment 2.1
        assert are_equal(values(model, optimizer)[:4], expected)
    else:
        ...  # fragment 2.2
        ...  # fragment 2.3
        assert are_equal(values(model, optimizer), expected)

os.makedirs("other", exist_ok=True)
os.chdir("other")
step = 120
...  # fragment 3
step = 130
...  # fragment 4
steps = sorted(name for name in os.listdir("runs/a") if name.startswith("step-"))
assert steps == ["step-00000120", "step-00000130"], steps
for tensor in state["model"].values():
    tensor.zero_()
dcp.load(state, storage_reader=StorageReader("runs/a"))
set_state_dict(
    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
assert are_equal(values(model, optimizer), expected)
