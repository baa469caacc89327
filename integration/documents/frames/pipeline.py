from pipeline_parts import Stage, objects_of_stages
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from resumekit.adapters.torch import Checkpointer

dist.init_process_group("gloo")
num_stages, num_copies = 2, 2
stage_module, optimizer, loader = objects_of_stages(num_stages)
...  # fragment 2
stage = Stage(stage_module, optimizer, mesh)
for batch in ckpt.batches(loader, epochs=3):
    stage.train_on(batch)
