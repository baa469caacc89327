"""State that methods, properties, closures, classes and environments of real scripts change."""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from shapes_idiom_counts import begin, set_rate
from tiny_training import EPOCHS, loss_of, step

BEST, BAD, ITERATION, RATE = 1e9, 0, 0, 0.1
STATE = {"bad": 0, "best": 1e9}


def each_batch(directory, record, options, weight):
    """One loop of a function that others give a weight to: it is called before each step."""
    model, optimizer, loader, ckpt = begin(directory, options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        loss = loss * weight(loss.item())
        step(ckpt, optimizer, loss)
        record(loss, model)


# ---------------------------------------------------------------- objects and classes


def property_that_looks_at_a_history(directory, *, record, **options):
    class Fit:
        def __init__(self):
            self.losses, self.rate = [], 0.1

        @property
        def stalled(self):
            return len(self.losses) > 3 and min(self.losses[-3:]) > min(self.losses)

        def run(self):
            model, optimizer, loader, ckpt = begin(directory, options)
            for batch in ckpt.batches(loader, epochs=EPOCHS):
                loss = loss_of(model, batch)
                step(ckpt, optimizer, loss)
                self.losses.append(loss.item())
                if self.stalled:
                    self.rate *= 0.7
                set_rate(optimizer, self.rate)
                record(loss, model)

    Fit().run()


class Schedule:
    num_steps = 0

    @classmethod
    def rate(cls, loss):
        cls.num_steps += 1
        return 1 / cls.num_steps


def count_that_a_class_method_moves(directory, *, record, **options):
    each_batch(directory, record, options, Schedule.rate)


class Settings:
    ratio = 0.5


def attribute_of_the_settings_that_grows(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    settings = Settings()
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs * settings.ratio, targets))
        step(ckpt, optimizer, loss)
        settings.ratio = min(2.0, settings.ratio + 0.1)
        record(loss, model)


class Base:
    def __init__(self):
        self.best, self.steps = 1e9, 0

    def after_step(self, loss):
        self.steps += 1
        if loss < self.best:
            self.best = loss


class Trainer(Base):
    lowest = 1e9

    def fit(self, directory, record, options):
        model, optimizer, loader, ckpt = begin(directory, options)
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            set_rate(optimizer, 0.1 / (1 + self.steps))
            loss = loss_of(model, batch) * (1 + min(self.best, Trainer.lowest, 1.0))
            step(ckpt, optimizer, loss)
            self.after_step(loss.item())
            Trainer.lowest = min(Trainer.lowest, loss.item())
            record(loss, model)


def base_class_that_keeps_the_best_value(directory, *, record, **options):
    Trainer().fit(directory, record, options)


def callback_that_a_list_holds(directory, *, record, **options):
    class Stopper:
        def __init__(self):
            self.count, self.best = 0, 1e9

        def on_step_end(self, value):
            self.count = 0 if value < self.best else self.count + 1
            self.best = min(self.best, value)

    model, optimizer, loader, ckpt = begin(directory, options)
    callbacks = [Stopper()]
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) / (1 + sum(each.count for each in callbacks))
        step(ckpt, optimizer, loss)
        for callback in callbacks:
            callback.on_step_end(loss.item())
        record(loss, model)


@dataclass
class Progress:
    step: int = 0
    best: float = 1e9


def dataclass_of_progress(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    progress = Progress()
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        progress.step += 1
        loss = loss_of(model, batch) / progress.step
        step(ckpt, optimizer, loss)
        record(loss, model)


def alias_of_an_attribute(directory, *, record, **options):
    class Store:
        def __init__(self):
            self.items = []

    model, optimizer, loader, ckpt = begin(directory, options)
    store = Store()
    items = store.items
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        items.append(batch[0])
        loss = loss_of(model, (random.choice(store.items), batch[1]))
        step(ckpt, optimizer, loss)
        record(loss, model)


# ---------------------------------------------------------------- functions and closures


def threshold_in_the_dict_of_a_closure(directory, *, record, **options):
    def make_select():
        threshold = {"value": 0.5}

        def select(loss):
            keep = 1.0 if loss > threshold["value"] else 0.3
            threshold["value"] = 0.8 * threshold["value"] + 0.2 * loss
            return keep

        return select

    each_batch(directory, record, options, make_select())


def stopper_of_a_closure(directory, *, record, **options):
    def make_stopper():
        best, bad = 1e9, 0

        def weight(value):
            nonlocal best, bad
            best, bad = (value, 0) if value < best else (best, bad + 1)
            return 1 / (1 + bad)

        return weight

    each_batch(directory, record, options, make_stopper())


def decorator_around_the_step(directory, *, record, **options):
    def counted(function):
        calls = 0

        @functools.wraps(function)
        def wrapper(loss):
            nonlocal calls
            calls += 1
            return function(loss, calls)

        return wrapper

    @counted
    def weight(loss, calls):
        return 1 / calls

    each_batch(directory, record, options, weight)


def state_on_a_function(directory, *, record, **options):
    def weight(loss):
        weight.count += 1
        return 1 / weight.count

    weight.count = 0
    each_batch(directory, record, options, weight)


def state_that_a_function_takes_and_returns(directory, *, record, **options):
    def train_step(state, batch):
        state = {**state, "step": state["step"] + 1}
        loss = loss_of(model, batch) * min(1.0, state["step"] / 10)
        step(ckpt, optimizer, loss)
        record(loss, model)
        return state

    model, optimizer, loader, ckpt = begin(directory, options)
    state = {"step": 0}
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        state = train_step(state, batch)


# ---------------------------------------------------------------- globals


def global_step_that_a_schedule_reads(directory, *, record, **options):
    def rate():
        return 0.2 * 0.8**ITERATION

    def train_one(batch):
        global ITERATION
        ITERATION += 1
        set_rate(optimizer, rate())
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)

    model, optimizer, loader, ckpt = begin(directory, options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        train_one(batch)


def rate_that_a_function_of_the_file_sets(directory, *, record, **options):
    def adjust():
        global RATE
        RATE *= 0.6
        set_rate(optimizer, RATE)

    model, optimizer, loader, ckpt = begin(directory, options)
    for _ in ckpt.epochs(EPOCHS):
        adjust()
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)


def check(value):
    if value < STATE["best"]:
        STATE.update(best=value, bad=0)
    else:
        STATE["bad"] += 1
    return 1 / (1 + STATE["bad"])


def dict_of_the_module_that_a_function_changes(directory, *, record, **options):
    each_batch(directory, record, options, check)


class NoProgressError(Exception):
    pass


def stop_by_an_exception(directory, *, record, **options):
    def look(value):
        global BEST, BAD
        BEST, BAD = (value, 0) if value < BEST else (BEST, BAD + 1)
        if BAD > 15:
            raise NoProgressError

    model, optimizer, loader, ckpt = begin(directory, options)
    try:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            loss = loss_of(model, batch) * (1 + BAD)
            step(ckpt, optimizer, loss)
            record(loss, model)
            look(loss.item())
    except NoProgressError:
        ckpt.stop("no progress")


# ---------------------------------------------------------------- agents and environments


class Corridor:
    """Walks in noise from a generator of its own."""

    def __init__(self):
        self.generator, self.position, self.time = np.random.default_rng(1), np.zeros(4), 0

    def reset(self):
        self.position = self.generator.normal(size=4)
        self.time = 0
        return torch.tensor(self.position, dtype=torch.float32)

    def step(self, action):
        self.time += 1
        self.position = self.position * 0.9 + action + self.generator.normal(size=4) / 10
        observed = torch.tensor(self.position, dtype=torch.float32)
        return observed, float(-np.abs(self.position).sum()), self.time == 5


class Agent:
    def __init__(self, model):
        self.model, self.memory, self.epsilon, self.num_acts = model, deque(maxlen=8), 1.0, 0

    def act(self, state):
        self.num_acts += 1
        self.epsilon *= 0.95
        if random.random() < self.epsilon:
            return random.uniform(-1, 1)
        return self.model(state).item()

    def remember(self, state, reward):
        self.memory.append((state, reward))

    def sample(self):
        chosen = random.choices(self.memory, k=4)
        targets = torch.tensor([[reward / 10] for _, reward in chosen])
        return torch.stack([state for state, _ in chosen]), targets


def agent_and_environment(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    env, agent = Corridor(), Agent(model)
    state, episode_reward = env.reset(), 0.0
    for _ in ckpt.batches(loader, epochs=EPOCHS):
        next_state, reward, done = env.step(agent.act(state))
        agent.remember(state, reward)
        state, episode_reward = next_state, episode_reward + reward
        loss = loss_of(model, agent.sample()) * (1 + abs(episode_reward) / 100)
        step(ckpt, optimizer, loss)
        if done:
            state, episode_reward = env.reset(), 0.0
        record(loss, model)


def agent_in_a_runner(directory, *, record, **options):
    class Runner:
        def __init__(self):
            self.model, self.optimizer, self.loader, self.ckpt = begin(directory, options)
            self.env, self.agent = Corridor(), Agent(self.model)

        def run(self):
            state = self.env.reset()
            for _ in self.ckpt.batches(self.loader, epochs=EPOCHS):
                state, reward, _ = self.env.step(self.agent.act(state))
                self.agent.remember(state, reward)
                loss = loss_of(self.model, self.agent.sample())
                step(self.ckpt, self.optimizer, loss)
                record(loss, self.model)

    Runner().run()


def observation_that_a_rollout_keeps(directory, *, record, **options):
    class Rollouts:
        def __init__(self):
            self.env = Corridor()
            self.obs, self.done = self.env.reset(), False

        def collect(self, model):
            pairs = []
            for _ in range(3):
                with torch.no_grad():
                    action = model(self.obs).item()
                before = self.obs
                self.obs, reward, self.done = self.env.step(action)
                pairs.append((before, torch.tensor([reward / 10])))
                if self.done:
                    self.obs = self.env.reset()
            return [torch.stack(each) for each in zip(*pairs, strict=True)]

    model, optimizer, loader, ckpt = begin(directory, options)
    rollouts = Rollouts()
    for _ in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, rollouts.collect(model))
        step(ckpt, optimizer, loss)
        record(loss, model)


def rollout_that_returns_the_observation(directory, *, record, **options):
    def rollout(env, obs):
        obs, reward, done = env.step(float(obs.mean()))
        return (obs[None], torch.tensor([[reward / 10]])), env.reset() if done else obs

    model, optimizer, loader, ckpt = begin(directory, options)
    env = Corridor()
    obs = env.reset()
    for _ in ckpt.batches(loader, epochs=EPOCHS):
        batch, obs = rollout(env, obs)
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


def correlated_noise(directory, *, record, **options):
    class Noise:
        def __init__(self):
            self.state = np.zeros(4)

        def noise(self):
            self.state = self.state - 0.15 * self.state + 0.2 * np.random.randn(4)
            return torch.tensor(self.state, dtype=torch.float32)

    model, optimizer, loader, ckpt = begin(directory, options)
    noise = Noise()
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs + noise.noise(), targets))
        step(ckpt, optimizer, loss)
        record(loss, model)


def filter_of_observations(directory, *, record, **options):
    class Filter:
        def __init__(self):
            self.count, self.mean, self.deviation = 0, torch.zeros(4), torch.ones(4)

        def __call__(self, x):
            self.count += 1
            self.mean += (x.mean(0) - self.mean) / self.count
            self.deviation = 0.9 * self.deviation + 0.1 * x.std(0)
            return (x - self.mean) / self.deviation

    model, optimizer, loader, ckpt = begin(directory, options)
    normalise = Filter()
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (normalise(inputs), targets))
        step(ckpt, optimizer, loss)
        record(loss, model)


def two_buffers_in_a_dict(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    buffers = {"near": deque(maxlen=3), "far": deque(maxlen=3)}
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        buffers["near" if inputs.mean() > 0 else "far"].append(inputs)
        chosen = random.choice([each for buffer in buffers.values() for each in buffer])
        loss = loss_of(model, (chosen, targets))
        step(ckpt, optimizer, loss)
        record(loss, model)


def learned_steps_of_an_agent(directory, *, record, **options):
    class Learner:
        def __init__(self):
            self.learn_step, self.counter, self.memory = 0, 0, torch.zeros(6, 4)
            self.target = None

        def store(self, transition):
            self.memory[self.counter % 6, :] = transition
            self.counter += 1

        def learn(self, model, targets):
            if self.learn_step % 4 == 0:
                self.target = [p.detach().clone() for p in model.parameters()]
            self.learn_step += 1
            known = self.memory[torch.randint(0, min(self.counter, 6), (4,))]
            distance = (next(model.parameters()) - self.target[0]).square().sum()
            return loss_of(model, (known, targets)) + distance

    model, optimizer, loader, ckpt = begin(directory, options)
    learner = Learner()
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        learner.store(inputs[0])
        loss = learner.learn(model, targets)
        step(ckpt, optimizer, loss)
        record(loss, model)
