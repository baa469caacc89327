"""State that functions, closures, classes and their attributes change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CARRIED = {
    "a pool of generated images": (
        """
        class ImagePool:
            def __init__(self, size):
                self.size, self.images = size, []
            def query(self, images):
                kept = []
                for image in images:
                    if len(self.images) < self.size:
                        self.images.append(image)
                        kept.append(image)
                    elif random.uniform(0, 1) > 0.5:
                        index = random.randint(0, self.size - 1)
                        kept.append(self.images[index].clone())
                        self.images[index] = image
                    else:
                        kept.append(image)
                return torch.cat(kept)
        pool = ImagePool(50)
        D = nn.Linear(3, 1)
        for batch in loader:  # LOOP
            fake = model(batch)
            update(D(pool.query(fake.detach())).sum())
        """,
        {"pool"},
    ),
    "two hidden states of one assignment": (
        """
        def step(x, state):
            out, new = model(x, state)
            return out, new
        hx, cx = torch.zeros(1), torch.zeros(1)
        for batch in loader:  # LOOP
            out, (hx, cx) = step(batch, (hx, cx))
            hx, cx = hx.detach(), cx.detach()
            update(out.sum())
        """,
        {"cx", "hx"},
    ),
    "a state that a function takes and gives": (
        """
        def train_step(state, batch):
            state = {**state, "step": state["step"] + 1}
            scale = min(1.0, state["step"] / 100)
            update(model(batch).sum() * scale)
            return state
        state = {"step": 0}
        for batch in loader:  # LOOP
            state = train_step(state, batch)
        """,
        {"state"},
    ),
    "a learning rate that a function of the file sets": (
        """
        current = 0.1
        def adjust(epoch):
            global current
            if epoch in (3, 6):
                current *= 0.1
            for group in optimizer.param_groups:
                group["lr"] = current
        for epoch in range(10):
            adjust(epoch)
            for batch in loader:  # LOOP
                update(model(batch).sum())
        """,
        {"current"},
    ),
    "a dataclass of progress": (
        """
        from dataclasses import dataclass
        @dataclass
        class Progress:
            step: int = 0
            best: float = 1e9
        progress = Progress()
        for epoch in range(10):
            for batch in loader:  # LOOP
                progress.step += 1
                if progress.step % 5 == 0:
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5
                update(model(batch).sum())
        """,
        {"progress"},
    ),
    "class centers that a function updates in place": (
        """
        def move(centers, features, labels):
            for k in range(10):
                centers[k] = 0.9 * centers[k] + 0.1 * features[labels == k].mean(0)
        centers = torch.zeros(10, 3)
        for x, y in loader:  # LOOP
            features = model(x)
            update(((features - centers[y]) ** 2).sum())
            move(centers, features.detach(), y)
        """,
        {"centers"},
    ),
    "a closure with state": (
        """
        def make_step(model, optimizer):
            count = 0
            def step(batch):
                nonlocal count
                count += 1
                loss = model(batch).sum() * min(1.0, count / 100)
                update(loss)
                return loss.item()
            return step
        step = make_step(model, optimizer)
        for batch in loader:  # LOOP
            step(batch)
        """,
        {"count"},
    ),
    "a base class that keeps the best value": (
        """
        class Base:
            def __init__(self):
                self.best, self.steps = 1e9, 0
            def after_epoch(self):
                value = self.validate()
                if value < self.best:
                    self.best = value
                    torch.save(model.state_dict(), "best.pt")
            def validate(self):
                raise NotImplementedError
        class Trainer(Base):
            def fit(self):
                for epoch in range(3):
                    for batch in loader:  # LOOP
                        self.train_step(batch)
                    self.after_epoch()
            def train_step(self, batch):
                self.steps += 1
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / self.steps
                update(model(batch).sum())
            def validate(self):
                return evaluate(model)
        Trainer().fit()
        """,
        {"self.best", "self.steps"},
    ),
    "an object inside of an object": (
        """
        class History:
            def __init__(self):
                self.values = []
            def add(self, value):
                self.values.append(value)
            @property
            def is_worse(self):
                return len(self.values) > 3 and self.values[-1] > min(self.values)
        class Trainer:
            def __init__(self):
                self.history = History()
            def fit(self):
                for epoch in range(3):
                    for batch in loader:  # LOOP
                        update(model(batch).sum())
                    self.history.add(evaluate(model))
                    if self.history.is_worse:
                        break
        Trainer().fit()
        """,
        {"self.history"},
    ),
    "state on a function": (
        """
        def train_step(batch):
            train_step.count += 1
            update(model(batch).sum() / train_step.count)
        train_step.count = 0
        for batch in loader:  # LOOP
            train_step(batch)
        """,
        {"train_step.count"},
    ),
    "an alias of an attribute": (
        """
        class Store:
            pass
        from stores import make
        store = make()
        items = store.items
        for batch in loader:  # LOOP
            items.append(batch)
            update(model(random.choice(items)).sum())
        """,
        {"items"},
    ),
    "a scheduled sampling with a counter in self": (
        """
        class Runner:
            def __init__(self):
                self.iteration = 0
            def p(self):
                return 1.0 / (1 + self.iteration)
            def run(self):
                for batch in loader:  # LOOP
                    teacher = random.random() < self.p()
                    update(model(batch, teacher).sum())
                    self.iteration += 1
        Runner().run()
        """,
        {"self.iteration"},
    ),
    "a callback of the file that stops the training": (
        """
        class Stopper:
            def __init__(self):
                self.stop, self.count, self.best = False, 0, 1e9
            def on_epoch_end(self, value):
                self.count = 0 if value < self.best else self.count + 1
                self.best = min(self.best, value)
                self.stop = self.count > 3
        callbacks = [Stopper()]
        for epoch in range(30):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            value = evaluate(model)
            for callback in callbacks:
                callback.on_epoch_end(value)
            if any(callback.stop for callback in callbacks):
                break
        """,
        {"callbacks"},
    ),
    "a counter in a list": (
        """
        counter = [0]
        def lr_now():
            return 0.1 / (1 + counter[0])
        for batch in loader:  # LOOP
            for group in optimizer.param_groups:
                group["lr"] = lr_now()
            update(model(batch).sum())
            counter[0] += 1
        """,
        {"counter"},
    ),
    "a class attribute": (
        """
        class Trainer:
            best = 1e9
            def fit(self):
                for epoch in range(3):
                    for batch in loader:  # LOOP
                        update(model(batch).sum())
                    value = evaluate(model)
                    if value < Trainer.best:
                        Trainer.best = value
                        torch.save(model.state_dict(), "best.pt")
        Trainer().fit()
        """,
        {"Trainer.best"},
    ),
    "a module-level dict that a function changes": (
        """
        STATE = {"bad": 0, "best": 1e9}
        def check(value):
            if value < STATE["best"]:
                STATE.update(best=value, bad=0)
            else:
                STATE["bad"] += 1
            return STATE["bad"] > 3
        def main():
            for epoch in range(3):
                for batch in loader:  # LOOP
                    update(model(batch).sum())
                if check(evaluate(model)):
                    break
        main()
        """,
        {"STATE"},
    ),
    "a memory attribute of self": (
        """
        class Trainer:
            def __init__(self):
                self.hidden = None
                self.center = torch.zeros(3)
            def step(self, batch):
                out, self.hidden = model(batch, self.hidden)
                self.hidden = self.hidden.detach()
                update((out - self.center).sum())
                self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
            def fit(self):
                for batch in loader:  # LOOP
                    self.step(batch)
        Trainer().fit()
        """,
        {"self.center", "self.hidden"},
    ),
    "an attribute that only the base elsewhere makes": (
        """
        from base import BaseTrainer
        class Trainer(BaseTrainer):
            def fit(self):
                for epoch in range(3):
                    for batch in self.loader:  # LOOP
                        loss = self.compute_loss(batch)
                        loss.backward()
                        self.optimizer.step()
                        self.global_step += 1
                        if self.global_step % self.save_every == 0:
                            self.save_checkpoint()
        """,
        {"self.global_step"},
    ),
    "a decorator around the step": (
        """
        import functools
        def counted(f):
            calls = 0
            @functools.wraps(f)
            def wrapper(batch):
                nonlocal calls
                calls += 1
                return f(batch, scale=1 / calls)
            return wrapper
        @counted
        def train_step(batch, scale):
            update(model(batch).sum() * scale)
        for batch in loader:  # LOOP
            train_step(batch)
        """,
        {"calls"},
    ),
    "an early stop by a closure": (
        """
        def stopper(most):
            best, bad = 1e9, 0
            def should(value):
                nonlocal best, bad
                best, bad = (value, 0) if value < best else (best, bad + 1)
                return bad > most
            return should
        def main():
            should = stopper(3)
            for epoch in range(30):
                for batch in loader:  # LOOP
                    update(model(batch).sum())
                if should(evaluate(model)):
                    return
        main()
        """,
        {"bad", "best"},
    ),
    "a spawned worker's loop": (
        """
        def worker(rank, args):
            best = 0.0
            for epoch in range(args.epochs):
                for batch in loader:  # LOOP
                    update(model(batch).sum())
                score = evaluate(model)
                is_best = score > best
                best = max(score, best)
                if rank == 0:
                    save_checkpoint({"best": best}, is_best)
        torch.multiprocessing.spawn(worker, nprocs=2)
        """,
        {"best"},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_state_in_functions_is_found(case: str, names: Callable[[str], set[str]]) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected
