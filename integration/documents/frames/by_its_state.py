import torch
from parts import LAUNCH, objects, step_of
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from resumekit.adapters.torch import Checkpointer


class Stream(IterableDataset):
    """Notes what it reads: one that is replayed would read the used part again."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        while self.position < 64:
            self.position += 1
            with open(f"read-{LAUNCH}.txt", "a", encoding="utf-8") as file:
                file.write(f"{self.position}\n")
            yield (torch.full((8,), self.position / 64),)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


...  # fragment 2
model, optimizer, _ = objects()
loader = ByItsState(StatefulDataLoader(Stream(), batch_size=4))
train_on = step_of(model, optimizer)
ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer)
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
with open(f"read-{LAUNCH}.txt", encoding="utf-8") as file:
    assert (int(file.readline()) > 40) == (LAUNCH == 2)  # after ten batches of four
