"""Q-learning with Lightning: agent, environment and replay buffer in plain attributes.

``--forget yes`` makes the agent again and empties the buffer at the first step of each launch: such
a run cannot be resumed.
``--batches`` is the length of an epoch; saves are within epochs of 3 and at the end of one of 5.
``--late yes`` samples the buffer while it grows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from judged_script import arguments, record
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resumekit.adapters.lightning import ResumeCallback

forgets: dict[str, str] = {}
epoch: dict[str, Any] = {"batches": 3}
WIDTH, EPISODE, BATCH_SIZE, NUM_STEPS = 5, 8, 4, 16


class Experience(NamedTuple):
    state: np.ndarray
    action: int
    reward: float
    done: bool
    new_state: np.ndarray


class Pendulum:
    """A point that drifts; wind and starting positions come from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)
        self.position = np.zeros(WIDTH, dtype=np.float32)
        self.age = 0

    def reset(self) -> np.ndarray:
        self.age = 0
        self.position = self.generator.normal(size=WIDTH).astype(np.float32)
        return self.position

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.age += 1
        wind = self.generator.normal(size=WIDTH).astype(np.float32) / 4
        self.position = self.position * (0.9 if action else 1.05) + wind
        return self.position, float(-np.abs(self.position).sum()), self.age >= EPISODE


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self.buffer: deque[Experience] = deque(maxlen=capacity)

    def append(self, experience: Experience) -> None:
        self.buffer.append(experience)

    def sample(self, size: int) -> list[Experience]:
        indices = np.random.choice(len(self.buffer), size)
        return [self.buffer[i] for i in indices]


class Agent:
    def __init__(self, env: Pendulum, replay_buffer: ReplayBuffer) -> None:
        self.env = env
        self.replay_buffer = replay_buffer
        self.state = env.reset()

    @torch.no_grad()
    def play_step(self, network: nn.Module, epsilon: float) -> tuple[float, bool]:
        if np.random.random() < epsilon:
            action = int(np.random.randint(2))
        else:
            action = int(network(torch.tensor(self.state)).argmax())
        new_state, reward, done = self.env.step(action)
        self.replay_buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done


class ReplayDataset(IterableDataset[Any]):
    def __init__(self, buffer: ReplayBuffer, size: int) -> None:
        self.buffer = buffer
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        yield from self.buffer.sample(self.size)


class LateReplayDataset(ReplayDataset):
    """Keeps a few samples, and draws another one of the buffer for each that it gives."""

    def __iter__(self) -> Iterator[Any]:
        kept = self.buffer.sample(BATCH_SIZE)
        for _ in range(self.size):
            kept.append(self.buffer.buffer[-1])
            yield kept.pop(0)


class QLearning(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer = ReplayBuffer(32)
        self.agent = Agent(Pendulum(), self.buffer)
        self.total_reward = 0.0
        self.episode_reward = 0.0
        for _ in range(8):
            self.agent.play_step(self.net, epsilon=1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if forgets.pop("agent", ""):
            self.buffer.buffer.clear()
            self.agent = Agent(Pendulum(), self.buffer)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        epsilon = max(0.1, 1.0 - self.global_step / 12)
        reward, done = self.agent.play_step(self.net, epsilon)
        self.episode_reward += reward
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0
        if self.global_step % 4 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.target_net(next_states).max(1).values * ~dones
        loss = nn.functional.mse_loss(values, best * 0.9 + rewards.float())
        self.log("episode_reward", self.episode_reward)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = {"agent": self.agent, "episode": [self.episode_reward, self.total_reward]}
        optimizer = self.optimizers()
        record(
            self.global_step, loss=outputs["loss"], optimizers=optimizer, inputs=batch, state=state
        )

    def train_dataloader(self) -> DataLoader[Any]:
        kind = LateReplayDataset if epoch["late"] else ReplayDataset
        return DataLoader(kind(self.buffer, BATCH_SIZE * epoch["batches"]), BATCH_SIZE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


def main() -> None:
    args = arguments("forget", "batches", "late")
    epoch["late"] = args.late
    epoch["batches"] = int(args.batches or epoch["batches"])
    forgets["agent"] = args.forget
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        max_epochs=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ResumeCallback(args.directory, save_every=5, strict=args.strict, transient={"forgets"})
        ],
    )
    trainer.fit(QLearning())


if __name__ == "__main__":
    main()
