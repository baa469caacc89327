"""A training script whose state is in attributes: of modules, callbacks, datasets, a Trainer class.

It writes down by its own means what each step did; the tests compare that, and nothing else.
"""

from __future__ import annotations

from collections import deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

Transition = namedtuple("Transition", "obs reward")
NUM_STEPS, SAVE_EVERY = 12, 4


class Anneal:
    """A helper object with slots and a cycle."""

    __slots__ = ("history", "owner", "rate")

    def __init__(self, owner: Any) -> None:
        self.rate, self.history, self.owner = 1.0, deque(maxlen=3), owner

    def step(self) -> float:
        self.rate *= 0.9
        self.history.append(self.rate)
        return sum(self.history)


class Environment:
    """Draws from a generator of its own and remembers its state."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(3)
        self.state = np.zeros(2)

    def step(self) -> Transition:
        self.state = 0.5 * self.state + self.draws.normal(size=2)
        return Transition(self.state.copy(), float(self.state.sum()))


class Agent:
    """A replay buffer of namedtuples, an environment, and a bank that is only rolled."""

    def __init__(self) -> None:
        self.environment = Environment()
        self.buffer: deque[Transition] = deque(maxlen=5)
        self.anneal = Anneal(self)
        self.same = self.anneal
        self.bank = torch.linspace(-1, 1, 2**19)
        self.nets = {"norm": [nn.BatchNorm1d(2)]}

    def act(self) -> float:
        self.buffer.append(self.environment.step())
        self.bank = self.bank.roll(1001)
        observed = torch.tensor(np.stack([each.obs for each in self.buffer]), dtype=torch.float32)
        norm = self.nets["norm"][0]
        shift = norm(observed).sum() if len(observed) > 1 else observed.sum()
        rewards = sum(each.reward for each in self.buffer)
        return (
            float(shift)
            + rewards * self.same.step()
            + float(self.bank[0])
            + float(norm.running_mean.sum())
        )


class Samples(torch.utils.data.Dataset[Any]):
    """Each sample is scaled by how many were used before."""

    def __init__(self) -> None:
        self.used = 0
        self.curriculum: dict[str, Any] = {"level": 0, "seen": [0]}

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.used += 1
        self.curriculum["seen"].append(index)
        scale = self.used + sum(self.curriculum["seen"][-3:])
        return {"x": torch.full((4,), index / 16 + 0.01 * scale)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


class Acting(Net):
    """The agent belongs to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = Agent()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + 0.1 * self.agent.act())


class Diary:
    """What each step did, by the script's own means."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "diary"

    def note(self, step: int, loss: torch.Tensor, model: nn.Module) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        line = f"{step} {float(loss).hex()} {xxhash.xxh3_64_hexdigest(weights)}\n"
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line)


def train_torch(folder: Path, diary: Diary, **options: Any) -> None:
    from resumekit.adapters.torch import Checkpointer

    model = Acting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True)
    checkpointer = Checkpointer(
        folder / "run", model=model, optimizer=optimizer, save_every=SAVE_EVERY, **options
    )
    for batch in checkpointer.batches(loader, epochs=3):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(loss=loss)
        diary.note(checkpointer.progress.step, loss.detach(), model)


def train_trainer(folder: Path, diary: Diary, **options: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    class Annealing(TrainerCallback):
        """A helper made in __init__, and one made when the training begins."""

        def __init__(self) -> None:
            self.anneal = Anneal(self)
            self.agent: Any = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.agent = Agent()

        def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                kwargs["model"].linear.bias += 0.01 * self.anneal.step() + 0.01 * self.agent.act()
            diary.note(state.global_step, torch.zeros(()), kwargs["model"])

    class Normed(Trainer):
        """Modules in a dict, which no optimizer trains."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.norms = {"a": [nn.BatchNorm1d(4)]}

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            norm = self.norms["a"][0]
            return model(norm(inputs["x"]) + norm.running_mean)["loss"]

    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"x": torch.full((4,), index / 16)} for index in range(16)]
    trainer = Normed(Net(), arguments, train_dataset=data, callbacks=[Annealing()])
    resume = ResumeCallback(trainer, folder / "run", save_every=SAVE_EVERY, **options)
    trainer.add_callback(resume)
    trainer.train()


def train(directory: str, *, kind: str) -> None:
    torch.manual_seed(0)
    folder = Path(directory)
    {"torch": train_torch, "trainer": train_trainer}[kind](folder, Diary(folder), strict=True)
