"""``dqn.py`` with a resume of its own: ``torch.save`` of networks, optimizer, step and epsilon.

It follows PyTorch's tutorial "Saving and Loading a General Checkpoint".

Prove: resumekit prove --at step:450 -- python examples/stock/dqn.py --dir {dir}
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

GAMMA = 0.99


class CartPole:
    """The dynamics of Barto, Sutton and Anderson (1983); an episode has 500 steps at most."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def reset(self):
        self.state = self.generator.uniform(-0.05, 0.05, size=4)
        self.num_steps = 0
        return self.state.astype(np.float32)

    def step(self, action):
        _, velocity, angle, spin = self.state
        force = (10.0 if action == 1 else -10.0) + self.generator.normal(scale=0.5)
        push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        acceleration = push - 0.05 * turn * math.cos(angle) / 1.1
        self.state = self.state + 0.02 * np.array([velocity, acceleration, spin, turn])
        self.num_steps += 1
        has_failed = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21
        return self.state.astype(np.float32), 1.0, has_failed, self.num_steps == 500


def make_network():
    return nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def td_loss(q_network, target_network, transitions):
    obs, actions, rewards, next_obs, has_failed = zip(*transitions, strict=True)
    with torch.no_grad():
        next_values = target_network(torch.tensor(np.stack(next_obs))).max(1).values
        targets = torch.tensor(rewards) + GAMMA * next_values * ~torch.tensor(has_failed)
    values = q_network(torch.tensor(np.stack(obs))).gather(1, torch.tensor(actions)[:, None])
    return F.smooth_l1_loss(values.squeeze(1), targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/dqn")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--learning-starts", type=int, default=500)
    parser.add_argument("--train-every", type=int, default=4)
    parser.add_argument("--sync-every", type=int, default=200)
    args = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    q_network, target_network = make_network(), make_network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    env = CartPole(seed=0)
    buffer = deque(maxlen=2000)
    returns = deque(maxlen=20)

    os.makedirs(args.dir, exist_ok=True)
    path = os.path.join(args.dir, "checkpoint.pt")
    start_step, start_epsilon = 0, 1.0
    if os.path.isfile(path):
        checkpoint = torch.load(path)
        q_network.load_state_dict(checkpoint["q_network"])
        target_network.load_state_dict(checkpoint["target_network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_step, start_epsilon = checkpoint["step"], checkpoint["epsilon"]

    obs, episode_return, epsilon = env.reset(), 0.0, start_epsilon
    for step in range(start_step, args.steps):
        if random.random() < epsilon:
            action = random.randrange(2)
        else:
            action = q_network(torch.tensor(obs)).argmax().item()
        next_obs, reward, has_failed, is_over = env.step(action)
        buffer.append((obs, action, reward, next_obs, has_failed))
        episode_return += reward
        obs = next_obs
        if has_failed or is_over:
            returns.append(episode_return)
            obs, episode_return = env.reset(), 0.0
        epsilon = max(0.05, epsilon * 0.999)

        if len(buffer) >= args.learning_starts and step % args.train_every == 0:
            loss = td_loss(q_network, target_network, random.sample(buffer, 64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % args.sync_every == 0:
            target_network.load_state_dict(q_network.state_dict())
        if step % 400 == 399:
            checkpoint = {
                "step": step + 1,
                "epsilon": epsilon,
                "q_network": q_network.state_dict(),
                "target_network": target_network.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(checkpoint, path)
        if step % 500 == 499 and returns:
            print(f"step {step + 1}: mean return {sum(returns) / len(returns):.1f}", flush=True)


if __name__ == "__main__":
    main()
