"""A loop around an agent or a trainer of another package: ``--kind ppo``."""

from __future__ import annotations

from typing import Any

import torch
from judged_script import arguments, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

NUM_UPDATES, STEPS_OF_UPDATE = 12, 64


def agent_of(kind: str) -> Any:
    """An agent of Stable-Baselines3 on a small environment of Gymnasium."""
    import stable_baselines3

    off_policy = {"learning_starts": 40, "buffer_size": 500}
    settings: dict[str, Any] = {
        "ppo": {"n_steps": STEPS_OF_UPDATE, "batch_size": 32, "n_epochs": 2},
        "dqn": {**off_policy, "target_update_interval": 30},
        "sac": off_policy,
    }[kind]
    environment = "Pendulum-v1" if kind == "sac" else "CartPole-v1"
    make = getattr(stable_baselines3, kind.upper())
    return make("MlpPolicy", environment, seed=0, device="cpu", **settings)


def train_agent(directory: str, kind: str, **options: Any) -> None:
    """Each iteration learns from as many steps of the environment."""
    agent = agent_of(kind)
    ckpt = Checkpointer(directory, save_every=2, **options)
    for update in ckpt.epochs(NUM_UPDATES):
        agent.learn(STEPS_OF_UPDATE, reset_num_timesteps=False)
        weights = torch.cat([each.detach().flatten() for each in agent.policy.parameters()])
        state = {"steps": agent.num_timesteps, "weights": weights}
        record(update + 1, loss=weights.sum(), state=state)
        ckpt.step()


def train_engine(directory: str, **options: Any) -> None:
    """An engine of Ignite with a handler and an average; it runs one epoch after the other."""
    from ignite.engine import Engine, Events
    from ignite.metrics import RunningAverage

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def update(engine: Engine, batch: Any) -> float:
        loss = model(batch[0]).square().mean() * (1 + engine.state.metrics.get("average", 0.0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    engine = Engine(update)
    RunningAverage(output_transform=lambda loss: loss).attach(engine, "average")

    @engine.on(Events.ITERATION_COMPLETED)
    def write(engine: Engine) -> None:
        state = {"epoch": engine.state.epoch, "average": engine.state.metrics["average"]}
        record(engine.state.iteration, loss=engine.state.output, optimizers=optimizer, state=state)

    ckpt = Checkpointer(directory, save_every=3, **options)
    for epoch in ckpt.epochs(2):
        engine.run(ckpt.batches(loader), max_epochs=epoch + 1)


if __name__ == "__main__":
    args = arguments("kind")
    if args.kind == "ignite":
        train_engine(args.directory, strict=args.strict)
    else:
        train_agent(args.directory, args.kind, strict=args.strict)
