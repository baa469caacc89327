import torch
from parts import LAUNCH, objects, record, stop_first_launch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from resumekit.adapters.torch import Checkpointer

_, _, loader = objects()
g, d = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
g_opt, d_opt = torch.optim.Adam(g.parameters(), 1e-2), torch.optim.Adam(d.parameters(), 1e-2)
averaged_model = AveragedModel(g)
initial = g.weight.clone()
...  # fragment 2
assert torch.equal(g.weight, initial) == (LAUNCH < 2)
for (x,) in ckpt.batches(loader, epochs=3):
    fake = g(torch.randn_like(x))
    for optimizer, loss in ((d_opt, d(fake.detach()).mean() - d(x).mean()), (g_opt, None)):
        value = -d(fake).mean() if loss is None else loss
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        record(value)
    averaged_model.update_parameters(g)
    record(averaged_model.module.weight.sum())
    stop_first_launch(after=30)
