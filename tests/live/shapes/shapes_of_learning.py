"""Shapes of training: averages and networks by hand, optimizers of the script, replay."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, deque

import torch
from tiny_training import EPOCHS, loss_of, make, run_as_script, step
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from resumekit.adapters.torch import Checkpointer


def warm_up_by_a_step_counter(directory, *, record, **options):
    """The learning rate is set from the loop's own count of the steps."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    num_steps = 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        num_steps += 1
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, num_steps / 15)
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


def average_of_the_weights_by_hand(directory, *, record, **options):
    """A dict of averaged weights, changed in place, which the weights are drawn to."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        distance = sum((p - shadow[n]).square().sum() for n, p in model.named_parameters())
        loss = loss_of(model, batch) + 0.5 * distance
        step(ckpt, optimizer, loss)
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), 0.2)
        record(loss, model)


class MovingAverage:
    """As many scripts have it: new tensors in each step, swapped into the model and out again."""

    def __init__(self, model):
        self.model, self.shadow, self.backup = model, {}, {}
        for name, p in model.named_parameters():
            self.shadow[name] = p.data.clone()

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name] = 0.2 * p.data + 0.8 * self.shadow[name]

    def apply(self):
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self):
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]
        self.backup = {}


def average_that_is_swapped_in(directory, *, record, **options):
    """The averaged weights are evaluated in each step, and their loss decides."""
    model, optimizer, loader = make()
    ema = MovingAverage(model)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        ema.apply()
        with torch.no_grad():
            factor = loss_of(model, batch).item()
        ema.restore()
        loss = factor * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        ema.update()
        record(loss, model)


def target_network_that_is_not_given(directory, *, record, **options):
    """A copy of the model follows it by soft updates and gives the targets."""
    model, optimizer, loader = make()
    target = copy.deepcopy(model)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        with torch.no_grad():
            aims = targets[:, :1] + 0.5 * target(inputs)
        loss = (model(inputs) - aims).square().mean()
        step(ckpt, optimizer, loss)
        with torch.no_grad():
            for p, q in zip(target.parameters(), model.parameters(), strict=True):
                p.mul_(0.8).add_(q, alpha=0.2)
        record(loss, model)


def averaged_model_that_is_not_given(directory, *, record, **options):
    """The same with torch's AveragedModel."""
    model, optimizer, loader = make()
    averaged = AveragedModel(model)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        with torch.no_grad():
            aims = targets[:, :1] + 0.5 * averaged(inputs)
        loss = (model(inputs) - aims).square().mean()
        step(ckpt, optimizer, loss)
        averaged.update_parameters(model)
        record(loss, model)


def second_optimizer_that_is_not_given(directory, *, record, **options):
    """A second network with its own optimizer, neither of them given."""
    model, optimizer, loader = make()
    critic = nn.Linear(4, 1)
    critic_optimizer = SGD(critic.parameters(), lr=0.05, momentum=0.9)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        critic_loss = loss_of(critic, batch)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        loss = (0.4 + critic_loss.item()) * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


def scheduler_that_is_not_given(directory, *, record, **options):
    """A learning rate scheduler that the Checkpointer is not given."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=21)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        scheduler.step()
        record(loss, model)


def plateau_scheduler_that_is_not_given(directory, *, record, **options):
    """ReduceLROnPlateau, which counts bad steps."""
    model, optimizer, loader = make()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        plateau.step(loss.item())
        record(loss, model)


# ---------------------------------------------------------------- optimizers of the script


class SharpnessAware(torch.optim.Optimizer):
    """SAM as published: the momentum is in ``base_optimizer``, which ``state_dict`` leaves out."""

    def __init__(self, params):
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base_optimizer.step()


class SlowWeights(torch.optim.Optimizer):
    """Lookahead: slow weights as an attribute; ``state_dict`` is the inner optimizer's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.num_steps = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Counting(SGD):
    """A counter outside ``state_dict`` sets the learning rate."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.n = 0

    def step(self, closure=None):
        self.n += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / math.sqrt(self.n)
        return super().step(closure)


class Normed(torch.optim.Adam):
    """A running norm of the gradients outside ``state_dict`` scales them."""

    def __init__(self, params):
        super().__init__(params, lr=0.02)
        self.norm = None

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
        self.norm = norm if self.norm is None else 0.8 * self.norm + 0.2 * norm
        for group in self.param_groups:
            group["lr"] = 0.05 * min(1.0, norm.item() / self.norm.item())
        return super().step(closure)


def with_optimizer(make_optimizer):
    """A shape with an optimizer of the script."""

    def train(directory, *, record, **options):
        model, _, loader = make()
        optimizer = make_optimizer(model)
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)

    return train


optimizer_with_a_base_optimizer = with_optimizer(lambda model: SharpnessAware(model.parameters()))
optimizer_with_slow_weights = with_optimizer(
    lambda model: SlowWeights(SGD(model.parameters(), lr=0.05, momentum=0.9))
)
optimizer_with_a_counter = with_optimizer(lambda model: Counting(model.parameters()))
optimizer_with_a_running_norm = with_optimizer(lambda model: Normed(model.parameters()))


# ---------------------------------------------------------------- replay and curricula


def replay_buffer(directory, *, record, **options):
    """A deque of pairs of tensors; each step trains on a batch of it that ``random`` draws."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    buffer = deque(maxlen=6)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        buffer.append(tuple(batch))
        loss = loss_of(model, random.choice(buffer))
        step(ckpt, optimizer, loss)
        record(loss, model)


class Curriculum:
    """Levels in a Counter; the hardest one so far decides."""

    def __init__(self):
        self.seen, self.level = Counter(), 0

    def choose(self, loss):
        self.seen[int(10 * loss) % 4] += 1
        level, count = self.seen.most_common(1)[0]
        self.level = max(self.level, level + count % 2)
        return 0.3 + self.level / 5 + count / 20


def curriculum_with_a_counter(directory, *, record, **options):
    """A curriculum object with a Counter of the standard library."""
    model, optimizer, loader = make()
    curriculum = Curriculum()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        loss = curriculum.choose(loss.item()) * loss
        step(ckpt, optimizer, loss)
        record(loss, model)


def weights_kept_and_restored(directory, *, record, **options):
    """The best weights are kept in a variable and loaded again after three bad steps."""
    model, optimizer, loader = make(lr=0.3)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    best, best_weights, num_bad = float("inf"), None, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        if loss.item() < best:
            best, best_weights, num_bad = loss.item(), copy.deepcopy(model.state_dict()), 0
        else:
            num_bad += 1
        step(ckpt, optimizer, loss)
        if num_bad == 3:
            model.load_state_dict(best_weights)
            num_bad = 0
        record(loss, model)


def gradient_of_the_step_before(directory, *, record, **options):
    """The gradients of the step before are kept and mixed in."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    before = None
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        if before is not None:
            for p, g in zip(model.parameters(), before, strict=True):
                p.grad.add_(g, alpha=0.5)
        before = grads
        optimizer.step()
        ckpt.step(loss=loss)
        record(loss, model)


def adversarial_noise(directory, *, record, **options):
    """A tensor that requires gradients, updated by the sign of its own."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    noise = torch.zeros(4, 4, requires_grad=True)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs + noise, targets))
        step(ckpt, optimizer, loss)
        with torch.no_grad():
            noise += 0.1 * noise.grad.sign()
        noise.grad = None
        record(loss, model)


if __name__ == "__main__":
    run_as_script(globals())


class Average:
    """Averaged weights; ``state_dict`` lacks the count that sets how fast they follow."""

    def __init__(self, model):
        self.shadow = {name: each.clone() for name, each in model.state_dict().items()}
        self.num_updates = 0

    def update(self, model):
        self.num_updates += 1
        decay = min(0.9, self.num_updates / (self.num_updates + 3))
        for name, each in model.state_dict().items():
            self.shadow[name] = torch.lerp(each, self.shadow[name], decay)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = dict(state["shadow"])


def average_with_a_partial_state(directory, *, record, **options):
    """It is passed as ``ema``, and scales the loss."""
    model, optimizer, loader = make()
    average = Average(model)
    train_with(model, optimizer, loader, average, record, directory, ema=average, **options)


def average_among_the_extras(directory, *, record, **options):
    """The same, passed as one of the ``extras``."""
    model, optimizer, loader = make()
    average = Average(model)
    extras = {"rate": 1.0, "average": average}
    train_with(model, optimizer, loader, average, record, directory, extras=extras, **options)


def train_with(model, optimizer, loader, average, record, directory, **options):
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (1 + average.shadow["0.weight"].abs().sum())
        step(ckpt, optimizer, loss)
        average.update(model)
        record(loss, model)
