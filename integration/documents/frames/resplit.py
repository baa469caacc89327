"""Each of two ranks has counted its batches; the one that continues has the sum."""

import os

import torch
from parts import LAUNCH, objects, record, stop_first_launch
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from resumekit import Checkpointer, SharingPattern, StateComponent

if LAUNCH < 2:
    dist.init_process_group("gloo")


class Seen:  # fragment 4
    seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


model, _, loader = objects()
ranks = {"num_replicas": int(os.environ.get("WORLD_SIZE", "1"))}
ranks["rank"] = int(os.environ.get("RANK", "0"))
loader = DataLoader(loader.dataset, 4, sampler=DistributedSampler(loader.dataset, **ranks))
seen = Seen()
ckpt = Checkpointer(
    "runs/a",
    components=[
        StateComponent("model", model, SharingPattern.REPLICATED),
        StateComponent("callbacks/seen", seen, SharingPattern.PER_RANK),
    ],
    allow_changes={"world_size"},
)
report = ckpt.resume()
if LAUNCH == 2:
    assert report.step >= 3
    assert seen.seen == 2 * report.step, (seen.seen, report.step)
for _ in ckpt.batches(loader, epochs=1):
    seen.seen += 1
    record(seen.seen)
    stop_first_launch(after=3)
    ckpt.step()
