from lightning.fabric import Fabric
from parts import objects, record, stop_first_launch
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

fabric = Fabric(accelerator="cpu", devices=1)
module, adamw, loader = objects()
x = loader.dataset.tensors[0]
loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=4, shuffle=True)
...  # fragment 1.1
...  # fragment 1.2
for batch in ():  # fragment 1.3
    ...  # fragment 1.4
    loss = (model(inputs) - targets).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    record(loss)
    stop_first_launch()
    ...  # fragment 1.6
