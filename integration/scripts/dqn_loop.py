"""Q-learning in a user-defined loop: observations, a replay buffer and environments.

``--bare`` gives the Checkpointer the network and the optimizer alone.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from judged_script import arguments, record
from torch import nn
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer

NUM_STEPS, NUM_ENVIRONMENTS, WIDTH = 16, 2, 6


class Transition(NamedTuple):
    obs: np.ndarray
    action: int
    reward: float
    next_obs: np.ndarray


class Corridors:
    """Walkers in noisy corridors; the wind of each comes from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.positions = [0] * NUM_ENVIRONMENTS
        self.num_moves = 0

    def observe(self) -> np.ndarray:
        noise = self.generator.normal(size=(NUM_ENVIRONMENTS, WIDTH)) / 10
        return (np.eye(WIDTH)[self.positions] + noise).astype(np.float32)

    def move(self, actions: list[int]) -> tuple[np.ndarray, list[float]]:
        self.num_moves += 1
        rewards = []
        for i, action in enumerate(actions):
            wind = int(self.generator.integers(-1, 2))
            position = min(max(self.positions[i] + 2 * action - 1 + wind, 0), WIDTH - 1)
            rewards.append(float(position == WIDTH - 1) - 0.01 * self.num_moves)
            self.positions[i] = 0 if position == WIDTH - 1 else position
        return self.observe(), rewards


class SavedCorridors(Corridors):
    """With the two methods that extras ask for."""

    def state_dict(self) -> dict[str, Any]:
        generator = self.generator.bit_generator.state
        return {"walkers": self.positions, "moves": self.num_moves, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.positions, self.num_moves = state["walkers"], state["moves"]
        self.generator.bit_generator.state = state["generator"]


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))


def choose(network: nn.Module, obs: np.ndarray, epsilon: float) -> list[int]:
    if random.random() < epsilon:
        return [random.randrange(2) for _ in obs]
    return network(torch.tensor(obs)).argmax(1).tolist()


def temporal_difference(
    network: nn.Module, target: nn.Module, sample: list[Transition]
) -> torch.Tensor:
    obs, actions, rewards, next_obs = zip(*sample, strict=True)
    with torch.no_grad():
        best = target(torch.tensor(np.stack(next_obs))).max(1).values
    wanted = torch.tensor(rewards) + 0.9 * best
    values = network(torch.tensor(np.stack(obs))).gather(1, torch.tensor(actions)[:, None])
    return nn.functional.mse_loss(values.squeeze(1), wanted)


def train_bare(args: argparse.Namespace) -> None:
    q_network, target_network = make_network(), make_network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-2)
    envs = Corridors(seed=1)
    rb: deque[Transition] = deque(maxlen=24)
    steps = DataLoader(range(NUM_STEPS), batch_size=None)
    ckpt = Checkpointer(
        args.directory,
        model=q_network,
        optimizer=optimizer,
        save_every=3,
        strict=args.strict,
        loop_variables=args.loop_variables,
        transient={*args.transient.split(",")} - {""},
    )
    obs = envs.observe()
    epsilon = 1.0
    for step in ckpt.batches(steps, steps=NUM_STEPS):
        actions = choose(q_network, obs, epsilon)
        next_obs, rewards = envs.move(actions)
        for each in zip(obs, actions, rewards, next_obs, strict=True):
            rb.append(Transition(*each))
        obs = next_obs
        epsilon = max(0.1, epsilon * 0.9)
        sample = random.choices(rb, k=8)
        loss = temporal_difference(q_network, target_network, sample)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            target_network.load_state_dict(q_network.state_dict())
        state = {"obs": obs, "epsilon": epsilon, "rb": rb, "envs": envs}
        state["target_network"] = target_network.state_dict()
        record(step + 1, loss=loss, optimizers=optimizer, inputs=sample, state=state)
        ckpt.step(loss=loss)


def train(args: argparse.Namespace) -> None:
    q_network, target_network = make_network(), make_network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-2)
    envs = SavedCorridors(seed=1)
    rb: deque[Transition] = deque(maxlen=24)
    steps = DataLoader(range(NUM_STEPS), batch_size=None)
    extras: dict[str, Any] = {"obs": envs.observe(), "epsilon": 1.0, "rb": rb, "envs": envs}
    ckpt = Checkpointer(
        args.directory,
        model={"q": q_network, "target": target_network},
        optimizer=optimizer,
        extras=extras,
        save_every=3,
        strict=args.strict,
        loop_variables=args.loop_variables,
    )
    for step in ckpt.batches(steps, steps=NUM_STEPS):
        actions = choose(q_network, extras["obs"], extras["epsilon"])
        next_obs, rewards = envs.move(actions)
        for each in zip(extras["obs"], actions, rewards, next_obs, strict=True):
            rb.append(Transition(*each))
        extras["obs"] = next_obs
        extras["epsilon"] = max(0.1, extras["epsilon"] * 0.9)
        sample = random.choices(rb, k=8)
        loss = temporal_difference(q_network, target_network, sample)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            target_network.load_state_dict(q_network.state_dict())
        state = {**extras, "target_network": target_network.state_dict()}
        record(step + 1, loss=loss, optimizers=optimizer, inputs=sample, state=state)
        ckpt.step(loss=loss)


if __name__ == "__main__":
    args = arguments("transient")
    random.seed(0)
    torch.manual_seed(0)
    (train_bare if args.bare else train)(args)
