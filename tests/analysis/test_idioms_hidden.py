"""State that properties, class methods, closures, generators and exceptions hide."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CARRIED = {
    "a property that looks at a history": (
        """
        class T:
            def __init__(self):
                self.losses = []
                self.lr = 0.1
            @property
            def stalled(self):
                return len(self.losses) > 3 and min(self.losses[-3:]) > min(self.losses)
            def fit(self):
                for epoch in range(9):
                    for x in loader:  # LOOP
                        update(model(x).sum())
                    self.losses.append(evaluate(model))
                    if self.stalled:
                        self.lr *= 0.5
                        for g in optimizer.param_groups:
                            g["lr"] = self.lr
        T().fit()
        """,
        {"self.losses", "self.lr"},
    ),
    "a counter that a class method moves": (
        """
        class Sched:
            step_count = 0
            @classmethod
            def lr(cls):
                cls.step_count += 1
                return 0.1 / cls.step_count
        for x in loader:  # LOOP
            for g in optimizer.param_groups:
                g["lr"] = Sched.lr()
            update(model(x).sum())
        """,
        {"Sched.step_count"},
    ),
    "an agent with a buffer inside of a runner": (
        """
        import gym
        from collections import deque
        class Agent:
            def __init__(self):
                self.net = nn.Linear(3, 2)
                self.buffer = deque(maxlen=10)
                self.n = 0
            def act(self, s):
                self.n += 1
                return self.net(s).argmax() if self.n > 5 else random.randrange(2)
            def learn(self):
                update(self.net(random.sample(self.buffer, 4)).sum())
        class Runner:
            def __init__(self):
                self.env = gym.make("x")
                self.agent = Agent()
            def run(self):
                s = self.env.reset()
                for t in range(100):  # LOOP
                    a = self.agent.act(s)
                    s, r, d, _ = self.env.step(a)
                    self.agent.buffer.append((s, a, r))
                    self.agent.learn()
        Runner().run()
        """,
        {"s", "self.agent", "self.env"},
    ),
    "an observation that a rollout keeps in self": (
        """
        import gym
        class R:
            def __init__(self):
                self.env = gym.make("x")
                self.obs = self.env.reset()
                self.done = False
            def rollout(self):
                out = []
                for _ in range(8):
                    a = model(self.obs)
                    self.obs, r, self.done, _ = self.env.step(a)
                    out.append((a, r))
                    if self.done:
                        self.obs = self.env.reset()
                return out
            def train(self):
                for it in range(10):  # LOOP
                    for a, r in self.rollout():
                        update(a.sum() * r)
        R().train()
        """,
        {"self.env", "self.obs"},
    ),
    "a weight beside a generator of the file": (
        """
        def batches():
            k = 0
            for b in loader:
                k += 1
                yield b, k
        weight = 1.0
        for b, k in batches():  # LOOP
            loss = model(b).sum() * weight
            update(loss)
            weight = 0.5 * weight + 0.5 / (1 + loss.item())
        """,
        {"weight"},
    ),
    "a threshold in a closure's dict": (
        """
        def make():
            th = {"v": 0.5}
            def select(x):
                keep = x > th["v"]
                th["v"] = 0.9 * th["v"] + 0.1 * float(x.mean())
                return keep
            return select
        select = make()
        for x in loader:  # LOOP
            update(model(x)[select(x)].sum())
        """,
        {"th"},
    ),
    "a count of two loops": (
        """
        it = 0
        while True:
            for x in loader:
                it += 1
                if it > 100:
                    break
                update(model(x).sum())
            else:
                continue
            break
        for it2 in range(2):
            for x in loader:  # LOOP
                it += 1
                if it % 7 == 0:
                    evaluate(model)
                update(model(x).sum())
        """,
        {"it"},
    ),
    "the best three checkpoints": (
        """
        topk = []
        for epoch in range(9):
            for x in loader:  # LOOP
                update(model(x).sum())
            v = evaluate(model)
            if len(topk) < 3 or v < topk[-1][0]:
                torch.save(model.state_dict(), f"{epoch}.pt")
                topk.append((v, f"{epoch}.pt"))
                topk.sort()
                topk = topk[:3]
        """,
        {"topk"},
    ),
    "a phase and an epoch of its own": (
        """
        epoch, phase = 0, "a"
        while epoch < 10:
            for x in loader:  # LOOP
                loss = model(x).sum() if phase == "a" else -model(x).sum()
                update(loss)
            if loss.item() < 0.1:
                phase = "b"
            epoch += 1
        """,
        {"epoch", "phase"},
    ),
    "a turn that alternates": (
        """
        turn = True
        opt2 = torch.optim.Adam(model.parameters())
        for x in loader:  # LOOP
            opt = optimizer if turn else opt2
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
            turn = not turn
        """,
        {"turn"},
    ),
    "a ring buffer of the file": (
        """
        import numpy as np
        class Buf:
            def __init__(self):
                self.data, self.ptr, self.full = np.zeros((10, 3)), 0, False
            def add(self, x):
                self.data[self.ptr] = x
                self.ptr = (self.ptr + 1) % 10
                self.full = self.full or self.ptr == 0
            def sample(self):
                hi = 10 if self.full else self.ptr
                return self.data[np.random.randint(0, hi, 4)]
        buf = Buf()
        for x in loader:  # LOOP
            buf.add(x)
            update(model(torch.tensor(buf.sample())).sum())
        """,
        {"buf"},
    ),
    "a global step that a schedule reads": (
        """
        ITER = 0
        def lr_at():
            return 0.1 * 0.5 ** (ITER // 100)
        def train_one(x):
            global ITER
            ITER += 1
            for g in optimizer.param_groups:
                g["lr"] = lr_at()
            update(model(x).sum())
        def main():
            for epoch in range(3):
                for x in loader:  # LOOP
                    train_one(x)
        if __name__ == "__main__":
            main()
        """,
        {"ITER"},
    ),
    "keywords that a step gives back": (
        """
        def step(x, *, h=None, scale=1.0):
            out, h = model(x, h)
            update(out.sum() * scale)
            return {"h": h.detach(), "scale": scale * 0.99}
        kw = {}
        for x in loader:  # LOOP
            kw = step(x, **kw)
        """,
        {"kw"},
    ),
    "a counter that a lambda reads": (
        """
        n = 0
        warm = lambda: min(1.0, n / 10)
        for x in loader:  # LOOP
            for g in optimizer.param_groups:
                g["lr"] = 0.1 * warm()
            update(model(x).sum())
            n += 1
        """,
        {"n"},
    ),
    "a factor among the settings": (
        """
        cfg = {"mult": 1.0}
        for epoch in range(3):
            for x in loader:  # LOOP
                loss = (lambda o: o.sum() * cfg["mult"])(model(x))
                update(loss)
            cfg["mult"] *= 0.5
        """,
        {"cfg"},
    ),
    "a set of examples that were seen": (
        """
        seen = set()
        for ids, x in loader:  # LOOP
            fresh = [i for i in ids if i not in seen]
            seen.update(ids)
            if fresh:
                update(model(x[fresh]).sum())
        """,
        {"seen"},
    ),
    "a normalisation of rewards": (
        """
        import gym
        from running import RunningMeanStd
        env = gym.make("x")
        rms = RunningMeanStd(shape=())
        s = env.reset()
        for t in range(100):  # LOOP
            a = model(s)
            s, r, d, _ = env.step(a)
            rms.update(r)
            update(a.sum() * (r - rms.mean) / rms.var**0.5)
        """,
        {"env", "rms", "s"},
    ),
    "a countdown to the next copy of the weights": (
        """
        import gym
        target = copy.deepcopy(model)
        sync_in = 100
        for x in loader:  # LOOP
            update((model(x) - target(x)).sum())
            sync_in -= 1
            if not sync_in:
                target.load_state_dict(model.state_dict())
                sync_in = 100
        """,
        {"sync_in"},
    ),
    "a batch size that failures halve": (
        """
        micro = 8
        for x in loader:  # LOOP
            try:
                for part in x.split(micro):
                    model(part).sum().backward()
            except RuntimeError:
                micro //= 2
                continue
            optimizer.step()
            optimizer.zero_grad()
        """,
        {"micro"},
    ),
    "a prior from the predictions of an epoch": (
        """
        prior = torch.ones(3) / 3
        for epoch in range(3):
            counts = torch.zeros(3)
            for x in loader:  # LOOP
                p = model(x).softmax(1)
                update((p * prior.log()).sum())
                counts += p.detach().sum(0)
            prior = counts / counts.sum()
        """,
        {"counts", "prior"},
    ),
    "a stop by an exception": (
        """
        class Stop(Exception):
            pass
        bad, best = 0, 1e9
        def check(v):
            global bad, best
            if v < best:
                best, bad = v, 0
            else:
                bad += 1
            if bad > 3:
                raise Stop
        try:
            for epoch in range(9):
                for x in loader:  # LOOP
                    update(model(x).sum())
                check(evaluate(model))
        except Stop:
            print("stopped")
        """,
        {"bad", "best"},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_hidden_state_is_found(case: str, names: Callable[[str], set[str]]) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected
