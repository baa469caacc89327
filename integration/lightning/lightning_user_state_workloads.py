"""Modules and callbacks on Lightning whose training state is in objects of their own.

The script writes a line for each batch and a digest of its weights: the tests compare these, and
ask the library nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning_workloads import QUIET
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.lightning import ResumeCallback

NUM_BATCHES = 12


class Anneal:
    """A helper as people write it: it has no state_dict."""

    def __init__(self) -> None:
        self.value, self.history = 1.0, [1.0]

    def step(self) -> float:
        self.value *= 0.9
        self.history.append(self.value)
        return self.value


class Annealed(LightningModule):
    """Scales its loss with a helper object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.anneal = Anneal()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.anneal.step() * self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=1e-2)


class Plain(Annealed):
    """The same without."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layers(batch[0]) - 1).square().mean()


class Tempered(Plain):
    """Changes a hyperparameter in each step, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"temperature": 1.0, "schedule": {"factor": 0.9}})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.hparams.temperature *= self.hparams.schedule["factor"]
        return self.hparams.temperature * super().training_step(batch, batch_idx)


class Preparing(Plain):
    """Loads weights, sets a rate and clips when a fit begins, and changes the rate in each epoch.

    Every launch calls these hooks; what they do is a part of the run's first moments only.
    """

    def on_fit_start(self) -> None:
        with torch.no_grad():
            next(self.layers.parameters()).copy_(torch.full((8, 4), 0.1) + torch.eye(8, 4))

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 2e-2
        nn.init.zeros_([*self.layers.parameters()][-1])

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class Stamped(Plain):
    """Its part of a checkpoint is known once the training has started, and reads a clock."""

    def on_train_start(self) -> None:
        self.begun = [time.monotonic()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = time.monotonic() - self.begun[0]


class AnnealsRate(Callback):
    """Sets the learning rate by a helper object."""

    def __init__(self) -> None:
        self.anneal = Anneal()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-2 * self.anneal.step()


class Halves(Callback):
    """Halves the learning rate from its fifth batch on; its attribute begins in its class."""

    factor = 1.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.factor = 0.5
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-2 * self.factor


class Decaying(AnnealsRate):
    """Sets the weight decay by the number of its steps too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        super().on_train_batch_start(trainer, *rest)
        self.num_steps += 1
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 1e-2 * (self.num_steps % 5)


class Forgetful(Decaying):
    """Its state has the number of steps, and lacks what sets the rate."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]


class ForgetfulHook(Decaying):
    """The same with the hooks of a checkpoint."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_steps"] = self.num_steps

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.num_steps = checkpoint["num_steps"]


class Experience(NamedTuple):
    state: np.ndarray
    action: int
    reward: float
    new_state: np.ndarray


class ReplayBuffer:
    """As in Lightning's examples, pl_domain_templates/reinforce_learn_Qnet.py."""

    def __init__(self, capacity: int) -> None:
        self.buffer: deque[Experience] = deque(maxlen=capacity)

    def append(self, experience: Experience) -> None:
        self.buffer.append(experience)

    def sample(self, size: int) -> tuple[torch.Tensor, ...]:
        chosen = np.random.choice(len(self.buffer), size, replace=True)
        states, actions, rewards, new = zip(*(self.buffer[i] for i in chosen), strict=True)
        arrays = (np.array(states), np.array(actions), np.array(rewards), np.array(new))
        return tuple(torch.tensor(each, dtype=torch.float32) for each in arrays)


class Corridor:
    """An environment with a position, noise and a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.position = 0.0

    def reset(self) -> np.ndarray:
        self.position = float(self.rng.normal())
        return self._observe()

    def step(self, action: int) -> tuple[np.ndarray, float]:
        self.position += (2 * action - 1) * 0.3 + 0.05 * float(self.rng.normal())
        return self._observe(), -abs(self.position)

    def _observe(self) -> np.ndarray:
        return np.array([self.position, self.position**2], dtype=np.float32)


class Agent:
    """Plays in the environment and fills the buffer."""

    def __init__(self, env: Corridor, buffer: ReplayBuffer) -> None:
        self.env, self.buffer = env, buffer
        self.state = env.reset()

    @torch.no_grad()
    def play_step(self, net: nn.Module, epsilon: float) -> float:
        if np.random.random() < epsilon:
            action = int(np.random.randint(2))
        else:
            action = int(net(torch.tensor(self.state)).argmax())
        new_state, reward = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, new_state))
        self.state = new_state
        return reward


class Dqn(LightningModule):
    """A replay buffer, an environment, an agent and a target network in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target_net = self._make(), self._make()
        self.buffer = ReplayBuffer(20)
        self.env = Corridor()
        self.agent = Agent(self.env, self.buffer)
        self.total_reward = 0.0
        for _ in range(10):
            self.agent.play_step(self.net, epsilon=1.0)

    def _make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        epsilon = max(0.1, 1 - self.global_step / 20)
        self.total_reward += self.agent.play_step(self.net, epsilon)
        states, actions, rewards, new_states = self.buffer.sample(8)
        values = self.net(states).gather(1, actions.long().unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = rewards + 0.9 * self.target_net(new_states).max(1).values
        if self.global_step % 5 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        return nn.functional.mse_loss(values, wanted)

    def configure_optimizers(self) -> Any:
        return Adam(self.net.parameters(), lr=1e-2)


class Writing(Callback):
    """Writes down the loss of each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        reward = getattr(pl_module, "total_reward", 0.0)
        with self.path.open("a") as file:
            print(float(outputs["loss"].detach()).hex(), float(reward).hex(), file=file)


MODULES = {
    "annealed": Annealed,
    "plain": Plain,
    "tempered": Tempered,
    "preparing": Preparing,
    "stamped": Stamped,
    "dqn": Dqn,
}


CALLBACKS = {
    "anneals": AnnealsRate,
    "halves": Halves,
    "forgetful": Forgetful,
    "forgetful hook": ForgetfulHook,
}


def train(directory: str, *, module: str, save_every: int = 3, callback: str | None = None) -> None:
    """Trains for two epochs, under ``strict=True``."""
    seed_everything(0)
    written = Path(directory).parent
    launch = len(list(written.glob("losses-*.txt")))
    callbacks: list[Callback] = [
        Writing(written / f"losses-{launch}.txt"),
        EarlyStopping("lr", patience=99, strict=False, check_on_train_epoch_end=True),
    ]
    if callback is not None:
        callbacks.append(CALLBACKS[callback]())
    callbacks.append(ResumeCallback(directory, save_every=save_every, strict=True))
    model: Any = MODULES[module]()
    data = TensorDataset(torch.randn(NUM_BATCHES * 4, 4))
    trainer = Trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=False, **QUIET)
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.numpy().tobytes())
    (written / "weights.txt").write_text(digest.hexdigest())
