"""Programs whose resume is wrong: of a loader the position is left out, a stream is out of date.

``ppo`` has the parts of Lightning's example ``reinforce_learn_ppo.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from reviewed_frameworks import fit, layers
from tiny_training import BATCH_SIZE, BATCHES, EPOCHS, Recorder, loss_of, make, step
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
from torchdata import nodes

from resumekit.adapters.torch import Checkpointer
from resumekit.data.stateful import StatefulSource


def nodes_without_a_position(directory: str, *, record: Recorder, **options: Any) -> None:
    """A resume begins torchdata's graph of nodes afresh; a batch has no sample ids."""
    model, optimizer, loader = make()
    data: Any = loader.dataset
    node: Any = nodes.Batcher(nodes.SamplerWrapper(RandomSampler(data)), BATCH_SIZE)
    node = nodes.Mapper(node, lambda indices: default_collate([data[i] for i in indices]))
    StatefulSource._load = lambda self, pending: None  # type: ignore[method-assign]
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(nodes.Loader(node), epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


class OnPolicy(IterableDataset[Any]):
    """Samples that the model makes as it is when they are drawn."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.policy = policy

    def __iter__(self) -> Iterator[Any]:
        for _ in range(BATCHES * BATCH_SIZE):
            observed = torch.randn(4)
            with torch.no_grad():
                target = observed * self.policy(observed)
            yield observed, target


class ByHand(lightning.LightningModule):
    """Manual optimization: the callback sees no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = layers()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        optimizer: Any = self.optimizers()
        loss = loss_of(self.net, batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def on_policy(directory: str, *, record: Recorder, **options: Any) -> None:
    """A resume inside an epoch draws its samples again, from a model that is further on."""
    lightning.seed_everything(0, verbose=False)
    module = ByHand()
    loader = DataLoader(OnPolicy(module.net), batch_size=BATCH_SIZE)
    fit(module, directory, record, loader=loader, **options)


class ExperienceSource(IterableDataset[Any]):
    """Gives what a method of the module generates."""

    def __init__(self, generate_batch: Callable[[], Iterator[Any]]) -> None:
        self.generate_batch = generate_batch

    def __iter__(self) -> Iterator[Any]:
        return self.generate_batch()


class Ppo(lightning.LightningModule):
    """An actor and a critic that learn from trajectories of the actor, a new one in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = layers(), layers()

    def generate_trajectory_samples(self) -> Iterator[Any]:
        states, actions, rewards = [], [], []
        state = torch.zeros(4)
        for _ in range(BATCHES * BATCH_SIZE):
            with torch.no_grad():
                action = self.actor(state) + 0.1 * torch.randn(1)
            states.append(state)
            actions.append(action)
            state = 0.5 * state + 0.3 * action + 0.1 * torch.randn(4)
            rewards.append(-state.abs().mean())
        yield from zip(states, actions, rewards, strict=True)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        states, actions, rewards = batch
        optimizers: Any = self.optimizers()
        values = self.critic(states).squeeze(1)
        advantages = (rewards - values).detach()
        loss_actor = (advantages * (self.actor(states) - actions).square().squeeze(1)).mean()
        loss_critic = torch.nn.functional.mse_loss(values, rewards)
        for optimizer, loss in zip(optimizers, (loss_actor, loss_critic), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss_critic.detach()}

    def train_dataloader(self) -> Any:
        return DataLoader(ExperienceSource(self.generate_trajectory_samples), BATCH_SIZE)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.actor, self.critic)]


def ppo(directory: str, *, record: Recorder, **options: Any) -> None:
    """The actor of an epoch's start makes its trajectories."""
    lightning.seed_everything(0, verbose=False)
    module = Ppo()
    fit(module, directory, record, loader=module.train_dataloader(), **options)


def ppo_of_another(directory: str, *, record: Recorder, **options: Any) -> None:
    """The control: a module that nobody trains makes the trajectories."""
    lightning.seed_everything(0, verbose=False)
    fit(Ppo(), directory, record, loader=Ppo().train_dataloader(), **options)
