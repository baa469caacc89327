"""Training loops whose optimizer keeps state that its ``state_dict`` leaves out.

Each is written twice: with ``model=`` and ``optimizer=`` passed and ``step()`` called, and with the
two lines of a loop that passes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tiny_training import EPOCHS, Recorder, loss_of, make
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from resumekit.adapters.torch import Checkpointer


class Sam(Optimizer):
    """Sharpness-aware minimization: climbs by rho, then steps from the old weights.

    The optimizer that steps is an attribute. It shares the param groups, and keeps its momentum in
    its own ``state``; the climbed-from weights are in the ``state`` of this one.
    """

    def __init__(self, params: Any, kind: Any, *, rho: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = kind(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        """Climbs to the worst weights nearby."""
        norm = torch.stack([p.grad.norm() for p in self._parameters()]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
                p.add_(p.grad, alpha=float(group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Goes back and makes the step of the inner optimizer."""
        for p in self._parameters():
            p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        """Both halves; the closure gives the second gradient."""
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups

    def _parameters(self) -> Iterable[Any]:
        return (p for group in self.param_groups for p in group["params"])


class Lookahead(Optimizer):
    """Every fourth step the fast weights are drawn to slow ones, which are an attribute.

    ``state_dict`` and ``load_state_dict`` are those of the inner optimizer. As published,
    ``__init__`` does not call that of its base class.
    """

    def __init__(self, optimizer: Optimizer, *, every: int = 4, alpha: float = 0.5) -> None:
        self.optimizer = optimizer
        self.every, self.alpha, self.num_steps = every, alpha, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = optimizer.state
        self.slow_weights = [
            [p.detach().clone() for p in group["params"]] for group in self.param_groups
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
                for p, kept in zip(group["params"], slow, strict=True):
                    kept.add_(p - kept, alpha=self.alpha)
                    p.copy_(kept)
        return loss


class SlowState(Optimizer):
    """The same with the slow weights in a ``state`` of its own, by parameter."""

    def __init__(self, optimizer: Optimizer, *, every: int = 4) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.every, self.counter = optimizer, every, 0
        self.param_groups = optimizer.param_groups
        self.state: Any = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())
        loss = self.optimizer.step(closure)
        self.counter += 1
        if self.counter % self.every == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(self.state[p]["slow"].lerp_(p, 0.5))
        return loss


class Decaying(SGD):
    """Sets its learning rate from its own count of the steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1.0 + 0.2 * self.n)
        return super().step(closure)


class Tempered(Adam):
    """Scales the gradients by a running mean of their norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.03)
        self.running_norm = 0.0

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = float(torch.stack([each.norm() for each in grads]).norm())
        self.running_norm = 0.9 * self.running_norm + 0.1 * norm
        for group in self.param_groups:
            group["lr"] = 0.03 * min(1.0, self.running_norm / norm)
        return super().step(closure)


def make_sam(model: nn.Module) -> Sam:
    """Around SGD with momentum."""
    return Sam(model.parameters(), SGD, lr=0.05, momentum=0.9)


def sam(directory: str, *, record: Recorder, **options: Any) -> None:
    """The two halves of a step with two gradients, as its page shows them."""
    model, _, loader = make()
    optimizer = make_sam(model)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.first_step()
        loss_of(model, batch).backward()
        optimizer.second_step()
        ckpt.step(loss=loss)
        record(loss, model)


def sam_in_two_lines(directory: str, *, record: Recorder, **options: Any) -> None:
    """Nothing is passed."""
    model, _, loader = make()
    optimizer = make_sam(model)
    with Checkpointer(directory, **options) as ckpt:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.first_step()
            loss_of(model, batch).backward()
            optimizer.second_step()
            record(loss, model)


def sam_with_a_closure(directory: str, *, record: Recorder, **options: Any) -> None:
    """One call of ``step`` with a closure makes both halves."""
    model, _, loader = make()
    optimizer = make_sam(model)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):

        def evaluate(batch: Any = batch) -> torch.Tensor:
            again = loss_of(model, batch)
            again.backward()
            return again

        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step(evaluate)
        ckpt.step(loss=loss)
        record(loss, model)


Make = Callable[[nn.Module], Optimizer]
Program = Callable[..., None]


def passed(make_optimizer: Make) -> Program:
    """A loop that passes model and optimizer."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, _, loader = make()
        optimizer = make_optimizer(model)
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
            record(loss, model)

    return train


def in_two_lines(make_optimizer: Make) -> Program:
    """A loop that passes nothing."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, _, loader = make()
        optimizer = make_optimizer(model)
        with Checkpointer(directory, **options) as ckpt:
            for batch in ckpt.batches(loader, epochs=EPOCHS):
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                record(loss, model)

    return train


def make_lookahead(model: nn.Module) -> Optimizer:
    """Around SGD with momentum."""
    return Lookahead(SGD(model.parameters(), lr=0.05, momentum=0.9))


def make_slow_state(model: nn.Module) -> Optimizer:
    """Around Adam."""
    return SlowState(Adam(model.parameters(), lr=0.02))


def make_decaying(model: nn.Module) -> Optimizer:
    """A subclass of SGD."""
    return Decaying(model.parameters())


def make_tempered(model: nn.Module) -> Optimizer:
    """A subclass of Adam."""
    return Tempered(model.parameters())


lookahead, lookahead_in_two_lines = passed(make_lookahead), in_two_lines(make_lookahead)
slow_state, slow_state_in_two_lines = passed(make_slow_state), in_two_lines(make_slow_state)
decaying, decaying_in_two_lines = passed(make_decaying), in_two_lines(make_decaying)
tempered, tempered_in_two_lines = passed(make_tempered), in_two_lines(make_tempered)
