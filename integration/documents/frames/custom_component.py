import torch
from parts import objects, record, step_of


class Curriculum:
    def __init__(self) -> None:
        self.difficulty = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"difficulty": self.difficulty}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.difficulty = state["difficulty"]


model, _, loader = objects()
curriculum = Curriculum()
train_on = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
...  # fragment 2
for batch in ckpt.batches(loader, epochs=3):
    curriculum.difficulty += 0.5
    train_on(batch)
    ckpt.step()
record(curriculum.difficulty)
