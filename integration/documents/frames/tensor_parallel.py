import torch
from parts import objects, record, stop_first_launch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.torch import Checkpointer

dist.init_process_group("gloo")
_, _, plain = objects()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
parallelize_module(model, group["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
copies = {"num_replicas": 2, "rank": group.get_local_rank("data")}
loader = DataLoader(plain.dataset, 4, sampler=DistributedSampler(plain.dataset, **copies))
...  # fragment 1
for (x,) in ckpt.batches(loader, epochs=3):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad.to_local(), group=mesh.get_group("data"))
    optimizer.step()
    record(loss)
    stop_first_launch()
assert ckpt.progress.samples == 3 * 64
