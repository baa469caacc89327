from pipeline_parts import Stage, objects_of_stages
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class Cache:
    """Of a node."""

    def __init__(self) -> None:
        self.num_hits = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_hits": self.num_hits}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_hits = state["num_hits"]


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))
model, optimizer, loader = objects_of_stages(2)
cache = Cache()
...  # fragment 3
stage = Stage(model, optimizer, mesh)
for batch in ckpt.batches(loader, epochs=3):
    cache.num_hits += 1
    stage.train_on(batch)
    ckpt.step()
assert cache.num_hits == 3 * len(loader)
