"""Handwritten digits through two pipeline stages of two ranks each: a custom trainer.

torchrun --nproc_per_node=4 train_pipeline.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit import Checkpointer, SharingPattern, StateComponent


def main(directory: str = "runs/digits-pipeline", epochs: int = 2) -> None:
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))
    stage, copy = mesh.get_local_rank("stages"), mesh.get_local_rank("copies")
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16,
        torch.tensor(digits.target),
    )
    sampler = DistributedSampler(data, num_replicas=2, rank=copy, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    torch.manual_seed(stage)  # the copies of a stage begin alike
    last = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 10))
    model = last if stage == 1 else nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    torch.manual_seed(get_rank())  # and draw different dropout masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pipeline = ScheduleGPipe(
        PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("stages")),
        n_microbatches=2,
        loss_fn=nn.functional.cross_entropy,
    )

    copies = mesh.get_group("copies")
    checkpointer = Checkpointer(
        directory,
        components=[
            StateComponent("model", model, SharingPattern.PER_GROUP, process_group="copies"),
            StateComponent(
                "optimizer", optimizer, SharingPattern.PER_GROUP, process_group="copies"
            ),
        ],
        groups={"copies": copies},
        data_parallel_group="copies",
        save_every=10,
    )
    for inputs, targets in checkpointer.batches(loader, epochs=epochs):
        losses: list[torch.Tensor] = []
        if stage == 0:
            pipeline.step(inputs)
        else:
            pipeline.step(target=targets, losses=losses)
        for parameter in model.parameters():
            all_reduce(parameter.grad, group=copies)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(loss=torch.stack(losses).mean() if losses else 0.0)

    checkpointer.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
