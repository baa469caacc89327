"""What a step takes from the step before, in the forms that real scripts have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CARRIED = {
    "a warm-up of a teacher by a global step": (
        """
        def sigmoid_rampup(current, length):
            return min(1.0, current / length)
        global_step = 0
        teacher = copy.deepcopy(model)
        def update_ema(model, ema, alpha, step):
            alpha = min(1 - 1 / (step + 1), alpha)
            for e, p in zip(ema.parameters(), model.parameters()):
                e.data.mul_(alpha).add_(p.data)
        def train(epoch):
            global global_step
            for x in loader:  # LOOP
                weight = sigmoid_rampup(epoch, 10)
                update(model(x).sum() + weight * teacher(x).sum())
                global_step += 1
                update_ema(model, teacher, 0.99, global_step)
        for epoch in range(3):
            train(epoch)
        """,
        {"global_step"},
    ),
    "an attribute of the settings that grows": (
        """
        class Config:
            mask_ratio = 0.5
        cfg = Config()
        for epoch in range(3):
            for x in loader:  # LOOP
                update(model(x, cfg.mask_ratio).sum())
            cfg.mask_ratio = min(0.9, cfg.mask_ratio + 0.1)
        """,
        {"cfg"},
    ),
    "stages of a curriculum": (
        """
        stages, stage, seen = [8, 16, 32], 0, 0
        while stage < 3:
            for x in loader:  # LOOP
                update(model(x[:, : stages[stage]]).sum())
                seen += len(x)
            if seen > 100:
                stage += 1
                seen = 0
        """,
        {"seen", "stage"},
    ),
    "the end of episodes in vectorised environments": (
        """
        import gym
        envs = gym.vector.make("x", 4)
        obs, done = envs.reset(), torch.zeros(4)
        returns = torch.zeros(4)
        for it in range(10):  # LOOP
            values = []
            for t in range(8):
                action = model(obs)
                values.append(action * (1 - done))
                obs, reward, done, info = envs.step(action)
                returns += reward
            update(torch.stack(values).sum())
        """,
        {"done", "envs", "obs"},
    ),
    "a hidden state for each sequence": (
        """
        states = {}
        for key, x in loader:  # LOOP
            h = states.get(key, torch.zeros(3))
            out, h = model(x, h)
            states[key] = h.detach()
            update(out.sum())
        """,
        {"states"},
    ),
    "targets of the first time that an example was seen": (
        """
        cache = {}
        for key, x in loader:  # LOOP
            base = cache.setdefault(key, model(x).detach())
            update((model(x) - base).sum())
        """,
        {"cache"},
    ),
    "recent losses whose sum stops the training": (
        """
        recent = [0.0] * 10
        for x in loader:  # LOOP
            loss = model(x).sum()
            recent = recent[1:] + [loss.item()]
            if sum(recent) / 10 < 0.1:
                break
            update(loss)
        """,
        {"recent"},
    ),
    "a queue that a function gives back": (
        """
        def enqueue(queue, keys):
            return torch.cat([keys, queue])[:100]
        queue = torch.zeros(100, 3)
        for x in loader:  # LOOP
            k = model(x)
            update((k @ queue.T).sum())
            queue = enqueue(queue, k.detach())
        """,
        {"queue"},
    ),
    "a best value among the options": (
        """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        args.best = 0.0
        for epoch in range(3):
            for x in loader:  # LOOP
                update(model(x).sum())
            score = evaluate(model)
            if score > args.best:
                args.best = score
                torch.save(model.state_dict(), "best.pt")
        """,
        {"args.best"},
    ),
    "a loss scale by hand": (
        """
        scale, good = 2.0**16, 0
        for x in loader:  # LOOP
            loss = model(x).sum()
            (loss * scale).backward()
            finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
            if finite:
                for p in model.parameters():
                    p.grad.div_(scale)
                optimizer.step()
                good += 1
                if good % 2000 == 0:
                    scale *= 2
            else:
                scale /= 2
                good = 0
            optimizer.zero_grad()
        """,
        {"good", "scale"},
    ),
    "momentum by hand": (
        """
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        for x in loader:  # LOOP
            model(x).sum().backward()
            with torch.no_grad():
                for p, v in zip(model.parameters(), velocity):
                    v.mul_(0.9).add_(p.grad)
                    p -= 0.1 * v
                    p.grad = None
        """,
        {"velocity"},
    ),
    "Adam by hand": (
        """
        m = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        t = 0
        for x in loader:  # LOOP
            t += 1
            model(x).sum().backward()
            for n, p in model.named_parameters():
                m[n] = 0.9 * m[n] + 0.1 * p.grad
                p.data -= 0.1 * m[n] / (1 - 0.9**t)
            model.zero_grad()
        """,
        {"m", "t"},
    ),
    "weights without a module": (
        """
        w = torch.zeros(3, requires_grad=True)
        b = torch.zeros(1, requires_grad=True)
        for x, y in loader:  # LOOP
            loss = ((x @ w + b - y) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                b -= 0.1 * b.grad
                w.grad.zero_()
                b.grad.zero_()
        """,
        {"b", "w"},
    ),
    "a list of tensors that an optimizer trains": (
        """
        w = torch.zeros(3, requires_grad=True)
        b = torch.zeros(1, requires_grad=True)
        params = [w, b]
        opt = torch.optim.SGD(params, lr=0.1)
        for x, y in loader:  # LOOP
            loss = ((x @ w + b - y) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        """,
        {"b", "w"},
    ),
    "a stopping counter in attributes": (
        """
        class Fit:
            def __init__(self):
                self.wait = 0
                self.best = None
            def improved(self, v):
                if self.best is None or v < self.best:
                    self.best, self.wait = v, 0
                    return True
                self.wait += 1
                return False
            def run(self):
                for epoch in range(9):
                    for x in loader:  # LOOP
                        update(model(x).sum())
                    if not self.improved(evaluate(model)) and self.wait > 3:
                        return
        Fit().run()
        """,
        {"self.best", "self.wait"},
    ),
    "an object from elsewhere that is advanced": (
        """
        from lib import Scheduler2
        tf = Scheduler2(start=1.0)
        for x in loader:  # LOOP
            update(model(x, tf.value).sum())
            tf.advance()
        """,
        {"tf"},
    ),
    "a mixture with the batch before": (
        """
        previous = None
        for x, y in loader:  # LOOP
            mixed = x if previous is None else 0.7 * x + 0.3 * previous
            update(model(mixed).sum())
            previous = x
        """,
        {"previous"},
    ),
    "an environment of the file": (
        """
        import gym
        class Wrap:
            def __init__(self, env):
                self.env, self.t = env, 0
            def reset(self):
                self.t = 0
                return self.env.reset()
            def step(self, a):
                self.t += 1
                return self.env.step(a)
        env = Wrap(gym.make("x"))
        s = env.reset()
        for i in range(100):  # LOOP
            a = model(s)
            s, r, d, _ = env.step(a)
            update(a.sum() * r)
            if d:
                s = env.reset()
        """,
        {"env", "s"},
    ),
    "two values that follow each other": (
        """
        a = b = 1.0
        for x in loader:  # LOOP
            loss = model(x).sum() * a
            update(loss)
            b = b * 0.9
            a = b if loss.item() > 1 else a
        """,
        {"a", "b"},
    ),
    "batches that are collected": (
        """
        buffer = []
        for x in loader:  # LOOP
            buffer += [x]
            if len(buffer) == 4:
                update(model(torch.cat(buffer)).sum())
                del buffer[:]
        """,
        {"buffer"},
    ),
    "an index into a list of learning rates": (
        """
        lrs, k = [0.1, 0.01], 0
        best = 1e9
        for epoch in range(9):
            for x in loader:  # LOOP
                update(model(x).sum())
            v = evaluate(model)
            if v > best and k < 1:
                k += 1
                optimizer.param_groups[0]["lr"] = lrs[k]
            best = min(v, best)
        """,
        {"best", "k"},
    ),
    "a named tuple that is replaced": (
        """
        from collections import namedtuple
        State = namedtuple("State", "h step")
        s = State(torch.zeros(1), 0)
        for x in loader:  # LOOP
            out, h = model(x, s.h)
            s = s._replace(h=h.detach(), step=s.step + 1)
            update(out.sum())
        """,
        {"s"},
    ),
    "weights of a sampler by the losses": (
        """
        from torch.utils.data import WeightedRandomSampler
        weights = [1.0] * 100
        for epoch in range(5):
            sampler = WeightedRandomSampler(weights, 100)
            for x, i in DataLoader(loader.dataset, sampler=sampler):  # LOOP
                loss = model(x)
                update(loss.sum())
                weights[i] = loss.item()
        """,
        {"weights"},
    ),
    "the step of the best value": (
        """
        evals, best_step = 0, 0
        def maybe_eval(step):
            return evaluate(model)
        best = 1e9
        for step, x in enumerate(loader):  # LOOP
            update(model(x).sum())
            with torch.no_grad():
                v = maybe_eval(step)
            if v < best:
                best, best_step = v, step
            if step - best_step > 100:
                break
        """,
        {"best", "best_step"},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_a_value_of_the_step_before_is_found(case: str, names: Callable[[str], set[str]]) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected
