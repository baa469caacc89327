"""Training loops as users write them, whose state is where a review found that it was lost.

State of functions and classes, changes at the start of an epoch, and whole programs: Q-learning, a
loop of a fixed number of steps, a language model with a hidden state. The state of each decides
how it trains.
"""

from __future__ import annotations

import functools
import math
import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import reviewed_settings
import torch
from tiny_training import BATCHES, EPOCHS, Recorder, loss_of, make
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

Program = Callable[..., None]


def make_parts(*, lr: float = 0.05) -> tuple[Any, Optimizer, DataLoader[Any]]:
    """A model of four layers, SGD with momentum, and a loader."""
    return make(lr=lr)


def descend(optimizer: Optimizer, loss: torch.Tensor) -> float:
    """One step; gives the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# ---------------------------------------------------------------- functions, classes, globals


def scaled_by(factor: Callable[[float], float]) -> Program:
    """A loop whose loss is scaled by ``factor(loss)``, which has state somewhere."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, optimizer, loader = make_parts()
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch)
            loss = loss * factor(loss.item())
            ckpt.step(loss=descend(optimizer, loss))
            record(loss, model)

    return train


def scaled_in_two_lines(factor: Callable[[float], float]) -> Program:
    """The same with nothing passed."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, optimizer, loader = make_parts()
        with Checkpointer(directory, **options) as ckpt:
            for batch in ckpt.batches(loader, epochs=EPOCHS):
                loss = loss_of(model, batch)
                loss = loss * factor(loss.item())
                descend(optimizer, loss)
                record(loss, model)

    return train


def closure(directory: str, *, record: Recorder, **options: Any) -> None:
    """Two functions in the training function share a list and a float."""
    model, optimizer, loader = make_parts()
    recent: list[float] = []
    level = 1.0

    def observe(loss: float) -> None:
        nonlocal level
        recent.append(loss)
        level += 0.2 * (loss - level)

    def weight() -> float:
        return 0.5 * level + 0.1 * sum(recent[-4:])

    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * weight()
        value = descend(optimizer, loss)
        observe(value)
        ckpt.step(loss=value)
        record(loss, model)


def closure_in_two_lines(directory: str, *, record: Recorder, **options: Any) -> None:
    """The same with nothing passed."""
    model, optimizer, loader = make_parts()
    recent: list[float] = []
    level = 1.0

    def observe(loss: float) -> None:
        nonlocal level
        recent.append(loss)
        level += 0.2 * (loss - level)

    with Checkpointer(directory, **options) as ckpt:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch) * (0.5 * level + 0.1 * sum(recent[-4:]))
            observe(descend(optimizer, loss))
            record(loss, model)


def by_default_argument(loss: float, seen: dict[str, float] = {}) -> float:  # noqa: B006
    """Its dict is made once, with the function."""
    seen["sum"] = seen.get("sum", 0.0) + loss
    seen["count"] = seen.get("count", 0) + 1
    return 0.5 + seen["sum"] / seen["count"] / 3


def by_attribute(loss: float) -> float:
    """It counts in an attribute of itself, which its first call makes."""
    by_attribute.calls = getattr(by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1.0 / math.sqrt(by_attribute.calls)  # type: ignore[attr-defined]


class Meter:
    """Its sums are attributes of the class, as a base for all meters."""

    total = 0.0
    records: list[float] = []

    def observe(self, loss: float) -> None:
        Meter.total = 0.8 * Meter.total + loss
        self.records.append(loss)


meter = Meter()


def by_class_attribute(loss: float) -> float:
    """A float and a list of a class."""
    meter.observe(loss)
    return 0.4 + meter.total / 9 + max(meter.records) / 9


warmth = 1.0
history: list[float] = []


def warm(loss: float) -> None:
    """Assigns one global and appends to another."""
    global warmth
    warmth = 0.9 * warmth + 0.1 * loss
    history.append(warmth)


def by_global(loss: float) -> float:
    """Reads the globals that ``warm`` changes."""
    warm(loss)
    return 0.5 + sum(history[-3:]) / 6


def by_global_of_a_module(loss: float) -> float:
    """Lets another module change its global and reads it there."""
    reviewed_settings.cool(loss)
    return 0.3 + 0.7 * reviewed_settings.temperature


def by_environment(loss: float) -> float:
    """Keeps a number as text in the environment."""
    count = int(os.environ.get("REVIEWED_COUNT", "0")) + 1
    os.environ["REVIEWED_COUNT"] = str(count)
    return 0.5 + count / 42


by_lambda = (lambda rows: lambda loss: 0.4 + sum(rows.__iadd__([loss])[-3:]) / 6)([])


@functools.lru_cache(maxsize=8)
def direction(key: int) -> torch.Tensor:
    """A random tensor, drawn once for each key."""
    return torch.rand(3)


def by_cache(loss: float) -> float:
    """A sum of the random tensor of a key."""
    return 0.3 + direction(int(100 * loss) % 4).sum().item() / 3


mutable_default_argument = scaled_by(by_default_argument)
function_attribute = scaled_by(by_attribute)
class_attribute = scaled_by(by_class_attribute)
changed_global = scaled_by(by_global)
global_of_a_module = scaled_by(by_global_of_a_module)
environment_variable = scaled_by(by_environment)
lambda_over_a_list = scaled_by(by_lambda)
cached_random_tensor = scaled_by(by_cache)
mutable_default_argument_in_two_lines = scaled_in_two_lines(by_default_argument)
function_attribute_in_two_lines = scaled_in_two_lines(by_attribute)
class_attribute_in_two_lines = scaled_in_two_lines(by_class_attribute)
changed_global_in_two_lines = scaled_in_two_lines(by_global)
global_of_a_module_in_two_lines = scaled_in_two_lines(by_global_of_a_module)
environment_variable_in_two_lines = scaled_in_two_lines(by_environment)
lambda_over_a_list_in_two_lines = scaled_in_two_lines(by_lambda)
cached_random_tensor_in_two_lines = scaled_in_two_lines(by_cache)


def tensor_hook(directory: str, *, record: Recorder, **options: Any) -> None:
    """A hook of a weight is an object that counts its calls and shrinks the gradient."""

    class Shrink:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, grad: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return grad / (1 + 0.3 * self.calls)

    model, optimizer, loader = make_parts()
    model[0].weight.register_hook(Shrink())
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        ckpt.step(loss=descend(optimizer, loss))
        record(loss, model)


def tensor_hook_with_nonlocal(directory: str, *, record: Recorder, **options: Any) -> None:
    """A hook of a weight counts in a variable of the training function; nothing is passed."""
    model, optimizer, loader = make_parts()
    calls = 0

    def shrink(grad: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return grad / (1 + 0.3 * calls)

    model[0].weight.register_hook(shrink)
    with Checkpointer(directory, **options) as ckpt:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch)
            descend(optimizer, loss)
            record(loss, model)


# ---------------------------------------------------------------- at the start of an epoch


def halve_rate(model: Any, optimizer: Any) -> None:
    """Of every group."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@torch.no_grad()
def shrink_weights(model: Any, optimizer: Any) -> None:
    """In place."""
    for p in model.parameters():
        p.mul_(0.8)


def shrink_data(model: Any, optimizer: Any) -> None:
    """Through ``data``, of which autograd does not know; one of them is another tensor then."""
    model[0].weight.data.mul_(0.8)
    model[3].weight.data = model[3].weight.data * 0.7


def zero_momentum(model: Any, optimizer: Any) -> None:
    """In place."""
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


def drop_momentum(model: Any, optimizer: Any) -> None:
    """The optimizer starts without any state."""
    optimizer.state.clear()


def raise_dropout(model: Any, optimizer: Any) -> None:
    """A plain number of a module."""
    model[2].p += 0.15


def changed_in_epochs(change: Callable[..., None]) -> Program:
    """A loop over epochs that changes something before the first batch of each."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, optimizer, loader = make_parts(lr=0.15)
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for _ in ckpt.epochs(EPOCHS):
            change(model, optimizer)
            for batch in ckpt.batches(loader):
                loss = loss_of(model, batch)
                ckpt.step(loss=descend(optimizer, loss))
                record(loss, model)

    return train


def changed_in_two_loops(change: Callable[..., None]) -> Program:
    """Two loaders in each epoch, one after the other; the change is made before each of them."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, optimizer, loader = make_parts(lr=0.15)
        other = DataLoader(loader.dataset, batch_size=4, shuffle=True)
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for _ in ckpt.epochs(2):
            change(model, optimizer)
            for batch in ckpt.batches(loader):
                loss = loss_of(model, batch)
                ckpt.step(loss=descend(optimizer, loss))
                record(loss, model)
            change(model, optimizer)
            for batch in ckpt.batches(other, name="other"):
                loss = loss_of(model, batch).square()
                ckpt.step(loss=descend(optimizer, loss))
                record(loss, model)

    return train


def changed_in_two_lines(change: Callable[..., None]) -> Program:
    """Nothing is passed."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, optimizer, loader = make_parts(lr=0.15)
        with Checkpointer(directory, **options) as ckpt:
            for _ in ckpt.epochs(EPOCHS):
                change(model, optimizer)
                for batch in ckpt.batches(loader):
                    loss = loss_of(model, batch)
                    descend(optimizer, loss)
                    record(loss, model)

    return train


def changed_again(change: Callable[..., None]) -> Program:
    """The control: a resumed launch makes the change once more, after its first batch came."""

    def train(directory: str, *, record: Recorder, **options: Any) -> None:
        model, optimizer, loader = make_parts(lr=0.15)
        options["transient"] = {"is_resumed"}  # each launch has its own
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        is_resumed = ckpt.resume().resumed
        for _ in ckpt.epochs(EPOCHS):
            change(model, optimizer)
            for batch in ckpt.batches(loader):
                if is_resumed:
                    change(model, optimizer)
                is_resumed = False
                loss = loss_of(model, batch)
                ckpt.step(loss=descend(optimizer, loss))
                record(loss, model)

    return train


def each_way(change: Callable[..., None]) -> tuple[Program, Program, Program, Program]:
    """The four loops with a change."""
    return (
        changed_in_epochs(change),
        changed_in_two_loops(change),
        changed_in_two_lines(change),
        changed_again(change),
    )


epochs_halve_rate, loops_halve_rate, lines_halve_rate, again_halve_rate = each_way(halve_rate)
epochs_shrink_weights, loops_shrink_weights, lines_shrink_weights, again_shrink_weights = each_way(
    shrink_weights
)
epochs_shrink_data, loops_shrink_data, lines_shrink_data, again_shrink_data = each_way(shrink_data)
epochs_zero_momentum, loops_zero_momentum, lines_zero_momentum, again_zero_momentum = each_way(
    zero_momentum
)
epochs_drop_momentum, loops_drop_momentum, lines_drop_momentum, again_drop_momentum = each_way(
    drop_momentum
)
epochs_raise_dropout, loops_raise_dropout, lines_raise_dropout, again_raise_dropout = each_way(
    raise_dropout
)


def epochs_add_a_group(directory: str, *, record: Recorder, **options: Any) -> None:
    """Layer by layer joins the optimizer at the start of an epoch."""
    model, _, loader = make_parts()
    layers = [model[3], model[0]]
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = SGD(layers[0].parameters(), lr=0.1, momentum=0.9)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        if epoch == 1:
            for p in model[0].parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": [*layers[1].parameters()], "lr": 0.02})
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            ckpt.step(loss=descend(optimizer, loss))
            record(loss, model)


def epochs_add_a_group_once(directory: str, *, record: Recorder, **options: Any) -> None:
    """The same, written so that a launch that begins in a later epoch adds the group as well."""
    model, _, loader = make_parts()
    optimizer = SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        if epoch >= 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.02})
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            ckpt.step(loss=descend(optimizer, loss))
            record(loss, model)


# ---------------------------------------------------------------- whole programs


class Pendulum:
    """An environment with a state, a count and a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.angle, self.speed, self.time = 0.0, 0.0, 0
        self.log: list[tuple[int, float]] = []

    def reset(self) -> np.ndarray:
        """A random angle."""
        self.angle, self.speed, self.time = float(self.rng.uniform(-1, 1)), 0.0, 0
        return self._observed()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """Observation, reward, and whether the episode is over."""
        push = 0.3 * (action - 1) + 0.05 * float(self.rng.standard_normal())
        self.speed += push - 0.2 * math.sin(self.angle)
        self.angle += self.speed
        self.time += 1
        self.log.append((self.time, self.angle))
        return self._observed(), -abs(self.angle), self.time == 9 or abs(self.angle) > 3

    def _observed(self) -> np.ndarray:
        return np.array([math.cos(self.angle), math.sin(self.angle), self.speed], np.float32)


def td_loss(online: nn.Module, target: nn.Module, rows: list[Any]) -> torch.Tensor:
    """Of a batch from the buffer."""
    before, actions, rewards, after, ended = (np.array(each) for each in zip(*rows, strict=True))
    with torch.no_grad():
        best = target(torch.from_numpy(after)).amax(1)
    aims = torch.from_numpy(rewards).float() + 0.9 * best * torch.from_numpy(~ended)
    values = online(torch.from_numpy(before)).gather(1, torch.from_numpy(actions)[:, None])
    return mse_loss(values[:, 0], aims)


def numbers() -> Any:
    """Of the frames; a dataset for a loader."""
    return range(24)


def make_q_network() -> nn.Module:
    """Three actions."""
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))


def q_learning(directory: str, *, record: Recorder, **options: Any) -> None:
    """DQN with nothing passed: buffer, target, epsilon, generator and environment are variables."""
    torch.manual_seed(0)
    random.seed(0)
    rng = np.random.default_rng(5)
    online, target = make_q_network(), make_q_network()
    target.load_state_dict(online.state_dict())
    optimizer = Adam(online.parameters(), lr=0.01)
    env, buffer = Pendulum(1), deque(maxlen=16)
    observed, epsilon, num_episodes = env.reset(), 1.0, 0
    frames: DataLoader[Any] = DataLoader(numbers(), batch_size=None)
    with Checkpointer(directory, **options) as ckpt:
        for frame in ckpt.batches(frames, epochs=1):
            if rng.random() < epsilon:
                action = int(rng.integers(3))
            else:
                action = int(online(torch.from_numpy(observed)).argmax())
            following, reward, is_over = env.step(action)
            buffer.append((observed, action, reward, following, is_over))
            observed = env.reset() if is_over else following
            num_episodes += is_over
            epsilon = max(0.05, 0.93 * epsilon)
            loss = td_loss(online, target, random.choices(buffer, k=6))
            descend(optimizer, loss)
            if frame % 4 == 3:
                target.load_state_dict(online.state_dict())
            record(loss, online)
    print(num_episodes, epsilon)


def q_learning_passed(directory: str, *, record: Recorder, **options: Any) -> None:
    """The same in an agent object, with the online network and its optimizer passed."""

    class Agent:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(5)
            self.online, self.target = make_q_network(), make_q_network()
            self.target.load_state_dict(self.online.state_dict())
            self.optimizer = Adam(self.online.parameters(), lr=0.01)
            self.buffer: deque[Any] = deque(maxlen=16)
            self.epsilon, self.updates = 1.0, 0

        def act(self, observed: np.ndarray) -> int:
            self.epsilon = max(0.05, 0.93 * self.epsilon)
            if self.rng.random() < self.epsilon:
                return int(self.rng.integers(3))
            return int(self.online(torch.from_numpy(observed)).argmax())

        def learn(self) -> torch.Tensor:
            loss = td_loss(self.online, self.target, random.choices(self.buffer, k=6))
            descend(self.optimizer, loss)
            self.updates += 1
            if self.updates % 4 == 0:
                self.target.load_state_dict(self.online.state_dict())
            return loss

    torch.manual_seed(0)
    random.seed(0)
    agent, env = Agent(), Pendulum(1)
    observed = env.reset()
    frames: DataLoader[Any] = DataLoader(numbers(), batch_size=None)
    ckpt = Checkpointer(directory, model=agent.online, optimizer=agent.optimizer, **options)
    for _ in ckpt.batches(frames, epochs=1):
        action = agent.act(observed)
        following, reward, is_over = env.step(action)
        agent.buffer.append((observed, action, reward, following, is_over))
        observed = env.reset() if is_over else following
        loss = agent.learn()
        ckpt.step(loss=loss.item())
        record(loss, agent.online)


def fixed_number_of_steps(directory: str, *, record: Recorder, **options: Any) -> None:
    """``while True`` over an iterator that is made again; the running loss may stop the run."""
    model, optimizer, loader = make_parts()
    with Checkpointer(directory, **options) as ckpt:
        data = iter(ckpt.batches(loader, steps=24))
        step, running = 0, None
        while True:
            try:
                batch = next(data)
            except StopIteration:
                break
            loss = loss_of(model, batch)
            value = descend(optimizer, loss)
            running = value if running is None else 0.9 * running + 0.1 * value
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, running)
            step += 1
            record(loss, model)
            if step >= 20 or running < 0.1:
                break


def iterator_made_again(directory: str, *, record: Recorder, **options: Any) -> None:
    """``StopIteration`` ends an epoch, and the iterator is made again; no ``for`` loop at all."""
    model, optimizer, loader = make_parts()
    max_steps, step, running = 18, 0, 1.0
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    epochs = iter(ckpt.epochs(EPOCHS))
    next(epochs)
    data = iter(ckpt.batches(loader))
    while True:
        try:
            batch = next(data)
        except StopIteration:
            next(epochs)
            data = iter(ckpt.batches(loader))
            batch = next(data)
        loss = loss_of(model, batch) * (0.5 + running / 2)
        value = descend(optimizer, loss)
        ckpt.step(loss=value)
        running = 0.9 * running + 0.1 * value
        step += 1
        record(loss, model)
        if step >= max_steps:
            break


class Language(nn.Module):
    """An embedding, an LSTM with dropout behind it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 12, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(12, 11)

    def forward(self, tokens: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        """Logits, and the hidden state for the next batch."""
        out, hidden = self.lstm(self.drop(self.embed(tokens)), hidden)
        return self.head(self.drop(out)), hidden


def chunks_of_text() -> DataLoader[Any]:
    """Consecutive chunks of a random text, in order."""
    text = torch.randint(11, (BATCHES * 4 * 6 + 1,))
    pairs = TensorDataset(text[:-1].reshape(-1, 6), text[1:].reshape(-1, 6))
    return DataLoader(pairs, batch_size=4)


def repackage(hidden: Any) -> Any:
    """Detached from the graph of the step."""
    return tuple(each.detach() for each in hidden)


@torch.no_grad()
def perplexity(model: Language, loader: DataLoader[Any]) -> float:
    """The loss on the validation text, with a hidden state of its own."""
    model.eval()
    hidden, total = None, 0.0
    for inputs, targets in loader:
        logits, hidden = model(inputs, hidden)
        total += cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    model.train()
    return total / len(loader)


def language_model(directory: str, *, record: Recorder, **options: Any) -> None:
    """The hidden state goes from batch to batch; a worse validation loss divides the rate."""
    torch.manual_seed(0)
    model, train_loader, val_loader = Language(), chunks_of_text(), chunks_of_text()
    lr, best_val_loss = 20.0, None
    optimizer = SGD(model.parameters(), lr=lr)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(4):
        hidden = (torch.zeros(1, 4, 12), torch.zeros(1, 4, 12))
        for inputs, targets in ckpt.batches(train_loader):
            hidden = repackage(hidden)
            logits, hidden = model(inputs, hidden)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            ckpt.step(loss=descend(optimizer, loss))
            record(loss, model)
        val_loss = perplexity(model, val_loader)
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0
            for group in optimizer.param_groups:
                group["lr"] = lr


def language_model_by_hand(directory: str, *, record: Recorder, **options: Any) -> None:
    """The same without an optimizer object for the rate: weights are changed by ``lr`` itself."""
    torch.manual_seed(0)
    model, train_loader, val_loader = Language(), chunks_of_text(), chunks_of_text()
    lr, best_val_loss, hidden = 20.0, float("inf"), None
    ckpt = Checkpointer(directory, model=model, **options)
    for _ in ckpt.epochs(4):
        for inputs, targets in ckpt.batches(train_loader):
            hidden = None if hidden is None else repackage(hidden)
            model.zero_grad()
            logits, hidden = model(inputs, hidden)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-lr)
            ckpt.step(loss=loss.item())
            record(loss, model)
        val_loss = perplexity(model, val_loader)
        if val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4.0


# ---------------------------------------------------------------- a counter from the resume


def counter_from_the_resume(directory: str, *, record: Recorder, **options: Any) -> None:
    """The loop's own count starts at ``ckpt.resume().step``."""
    model, optimizer, loader = make_parts()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    step = ckpt.resume().step
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + 0.1 * step)
        loss = loss_of(model, batch)
        step += 1
        ckpt.step(loss=descend(optimizer, loss))
        record(loss, model)


def counter_from_zero(directory: str, *, record: Recorder, **options: Any) -> None:
    """The control: the count starts at 0 in each launch."""
    model, optimizer, loader = make_parts()
    step = 0
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1.0 + 0.1 * step)
        loss = loss_of(model, batch)
        step += 1  # noqa: SIM113 - the count is the mistake
        ckpt.step(loss=descend(optimizer, loss))
        record(loss, model)


def counter_in_an_object(directory: str, *, record: Recorder, **options: Any) -> None:
    """A trainer object counts from there, in a loop of epochs, with an average beside it."""

    class Loop:
        def __init__(self) -> None:
            self.model, self.optimizer, self.loader = make_parts()
            self.ckpt = Checkpointer(
                directory, model=self.model, optimizer=self.optimizer, **options
            )
            self.step = self.ckpt.resume().step
            self.average = 1.0

        def run(self) -> None:
            for _ in self.ckpt.epochs(EPOCHS):
                for batch in self.ckpt.batches(self.loader):
                    rate = 0.1 * self.average / (1.0 + 0.1 * self.step)
                    self.optimizer.param_groups[0]["lr"] = rate
                    loss = loss_of(self.model, batch)
                    value = descend(self.optimizer, loss)
                    self.average = 0.9 * self.average + 0.1 * value
                    self.step += 1
                    self.ckpt.step(loss=value)
                    record(loss, self.model)

    Loop().run()
