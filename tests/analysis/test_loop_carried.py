"""The names that the analysis reports for small training loops, one idea each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resumekit.analysis import LoopCarried

Analysed = Callable[[str], LoopCarried]
Names = Callable[[str], set[str]]

CARRIED = {
    "a batch that is fetched ahead": (
        """
        X, Y = next(iter(loader))
        while True:  # LOOP
            loss = model(X).sum() - Y
            X, Y = next(iter(loader))
            update(loss)
        """,
        {"X", "Y"},
    ),
    "the hidden state and a learning rate that decays": (
        """
        def repackage(h):
            return h.detach()
        lr, best = 20, None
        def train(epoch):
            hidden = torch.zeros(1)
            for batch in loader:  # LOOP
                hidden = repackage(hidden)
                output, hidden = model(batch, hidden)
                output.sum().backward()
                for p in model.parameters():
                    p.data.add_(p.grad, alpha=-lr)
        for epoch in range(3):
            train(epoch)
            val_loss = evaluate(model)
            if not best or val_loss < best:
                torch.save(model.state_dict(), "m.pt")
                best = val_loss
            else:
                lr /= 4
        """,
        {"hidden", "lr", "best"},
    ),
    "an observation, an environment and a replay buffer": (
        """
        import gym
        from buffers import ReplayBuffer
        env = gym.make("x")
        rb = ReplayBuffer(100)
        obs = env.reset()
        for step in range(1000):  # LOOP
            action = env.action_space.sample() if random.random() < 0.1 else model(obs).argmax()
            next_obs, reward, done = env.step(action)
            rb.add(obs, next_obs, action, reward)
            obs = next_obs
            if step % 4 == 0:
                data = rb.sample(32)
                update(model(data).sum())
        """,
        {"env", "obs", "rb"},
    ),
    "patience": (
        """
        best, patience, bad = 1e9, 3, 0
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            loss = evaluate(model)
            if loss < best:
                best, bad = loss, 0
            else:
                bad += 1
                if bad >= patience:
                    break
        """,
        {"best", "bad"},
    ),
    "an object of a class of the same file that stops the training": (
        """
        class Stopper:
            def __init__(self):
                self.count, self.best = 0, 1e9
            def __call__(self, loss):
                if loss < self.best:
                    self.best, self.count = loss, 0
                else:
                    self.count += 1
                return self.count > 3
        stopper = Stopper()
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            if stopper(evaluate(model)):
                break
        """,
        {"stopper"},
    ),
    "an imported early stopping object": (
        """
        from pytorchtools import EarlyStopping
        early_stopping = EarlyStopping(patience=3)
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            early_stopping(evaluate(model), model)
            if early_stopping.early_stop:
                break
        """,
        {"early_stopping"},
    ),
    "the best weights, kept for the end": (
        """
        best, weights = 0, copy.deepcopy(model.state_dict())
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            score = evaluate(model)
            if score > best:
                best, weights = score, copy.deepcopy(model.state_dict())
        model.load_state_dict(weights)
        """,
        {"best", "weights"},
    ),
    "a warm-up by a counter of the script": (
        """
        step = 0
        for epoch in range(3):
            for batch in loader:  # LOOP
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * min(1, step / 100)
                update(model(batch).sum())
                step += 1
        """,
        {"step"},
    ),
    "a moving average in the loss": (
        """
        average = 1.0
        for batch in loader:  # LOOP
            loss = model(batch).sum() / average
            average = 0.9 * average + 0.1 * loss.item()
            update(loss)
        """,
        {"average"},
    ),
    "a queue of keys and its pointer": (
        """
        queue, pointer = torch.randn(10, 3), 0
        for batch in loader:  # LOOP
            keys = model(batch)
            update((keys @ queue.T).sum())
            queue[pointer : pointer + 2] = keys.detach()
            pointer = (pointer + 2) % 10
        """,
        {"queue", "pointer"},
    ),
    "exploration that decays": (
        """
        epsilon = 1.0
        for batch in loader:  # LOOP
            action = random.random() if random.random() < epsilon else model(batch)
            update(model(action).sum())
            epsilon = max(0.01, epsilon * 0.99)
        """,
        {"epsilon"},
    ),
    "a count in a dict that decides about evaluation": (
        """
        state = {"step": 0}
        for batch in loader:  # LOOP
            update(model(batch).sum())
            state["step"] += 1
            if state["step"] % 10 == 0:
                evaluate(model)
        """,
        {"state"},
    ),
    "a history whose best value decides about a save": (
        """
        history = []
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            history.append(evaluate(model))
            if history[-1] >= max(history):
                torch.save(model.state_dict(), "best.pt")
        """,
        {"history"},
    ),
    "attributes of the trainer": (
        """
        class Trainer:
            def __init__(self):
                self.best, self.seen, self.logs = 1e9, 0, []
            def epoch(self):
                for batch in loader:  # LOOP
                    update(model(batch).sum())
                    self.seen += 1
                    self.logs.append(self.seen)
                    if self.seen % 100 == 0:
                        self.check()
            def check(self):
                loss = evaluate(model)
                if loss < self.best:
                    self.best = loss
                    torch.save(model.state_dict(), "best.pt")
            def fit(self):
                for epoch in range(3):
                    self.epoch()
        Trainer().fit()
        """,
        {"self.best", "self.seen"},
    ),
    "a global that another function of the file changes": (
        """
        best = 0
        def test():
            global best
            score = evaluate(model)
            if score > best:
                best = score
                torch.save(model.state_dict(), "best.pt")
        def train():
            for batch in loader:  # LOOP
                update(model(batch).sum())
        for epoch in range(3):
            train()
            test()
        """,
        {"best"},
    ),
    "a variable of the function around it": (
        """
        def main():
            scale = 1.0
            def train_step(batch):
                nonlocal scale
                loss = model(batch).sum() * scale
                scale *= 1.01
                update(loss)
            for batch in loader:  # LOOP
                train_step(batch)
        main()
        """,
        {"scale"},
    ),
    "a running loss that the scheduler of the script takes": (
        """
        total = 0.0
        for epoch in range(3):
            total = 0.0
            for batch in loader:  # LOOP
                loss = model(batch).sum()
                update(loss)
                total += loss.item()
            for group in optimizer.param_groups:
                group["lr"] = total
        """,
        {"total"},
    ),
    "a flag for the first step": (
        """
        first = True
        for batch in loader:  # LOOP
            if first:
                model.init(batch)
                first = False
            update(model(batch).sum())
        """,
        {"first"},
    ),
}

NOT_CARRIED = {
    "a running loss that is printed": """
        running = 0.0
        for epoch in range(3):
            for i, batch in enumerate(loader):  # LOOP
                loss = model(batch).sum()
                update(loss)
                running += loss.item()
                if i % 100 == 99:
                    print(running / 100)
                    running = 0.0
        """,
    "a progress bar, a writer, a timer and meters": """
        from tqdm import tqdm
        from torch.utils.tensorboard import SummaryWriter
        from meters import AverageMeter
        writer, meter, start, n = SummaryWriter(), AverageMeter(), time.time(), 0
        bar = tqdm(loader)
        for batch in bar:  # LOOP
            loss = model(batch).sum()
            update(loss)
            meter.update(loss.item())
            n += 1
            writer.add_scalar("loss", loss.item(), n)
            bar.set_postfix(loss=meter.avg, seconds=time.time() - start)
            start = time.time()
        """,
    "lists for a plot": """
        losses, scores = [], []
        for epoch in range(3):
            for batch in loader:  # LOOP
                loss = model(batch).sum()
                update(loss)
                losses.append(loss.item())
            scores.append(evaluate(model))
        plt.plot(losses, scores)
        """,
    "a best value that is only printed": """
        best = 0
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            best = max(best, evaluate(model))
            print("best", best)
        """,
    "what every epoch sets again": """
        for epoch in range(3):
            lr = 0.1 * 0.5**epoch
            for group in optimizer.param_groups:
                group["lr"] = lr
            for batch in loader:  # LOOP
                loss = model(batch).sum() * lr
                update(loss)
        """,
    "a storage that each iteration fills": """
        import gym
        rewards = torch.zeros(8)
        for iteration in range(10):  # LOOP
            for step in range(8):
                rewards[step] = random.random()
            update(model(rewards).sum())
        """,
    "what a schedule and the model keep themselves": """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scaler = torch.amp.GradScaler()
        for epoch in range(3):
            model.train()
            for x, y in loader:  # LOOP
                with torch.autocast("cpu"):
                    loss = model(x).sum() - y
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scheduler.step()
            if epoch == 2:
                break
        """,
    "a value that only one branch of a setting uses": """
        evaluates = False
        loss = 0.0
        best = 1.0
        def main(args):
            val = 0.0
            for batch in loader:  # LOOP
                update(model(batch).sum())
                if args.evaluates:
                    val = evaluate(model)
                if args.saves and val < 1.0:
                    torch.save(model.state_dict(), "m.pt")
        main(None)
        """,
}


@pytest.mark.parametrize("case", CARRIED)
def test_a_loop_carried_variable_is_found(case: str, names: Names) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected


@pytest.mark.parametrize("case", NOT_CARRIED)
def test_nothing_is_reported_for(case: str, names: Names) -> None:
    assert names(NOT_CARRIED[case]) == set()


def test_what_is_only_logged_is_known_as_such(analysed: Analysed) -> None:
    found = analysed(NOT_CARRIED["lists for a plot"])
    assert {each.name for each in found.only_logged} >= {"losses"}


ACCUMULATION = """
    for epoch in range(3):
        for i, batch in enumerate(loader{start}):  # LOOP
            loss = model(batch).sum()
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    """


def test_a_relative_index_that_decides_is_found_and_an_absolute_one_is_not(
    analysed: Analysed,
) -> None:
    assert analysed(ACCUMULATION.format(start="")).relative_indices == ("i",)
    assert analysed(ACCUMULATION.format(start=", start=loader.initial")).relative_indices == ()


def test_an_index_that_only_prints_is_not_found(analysed: Analysed) -> None:
    body = NOT_CARRIED["a running loss that is printed"]
    assert analysed(body).relative_indices == ()


def test_a_variable_is_known_to_be_assigned_or_only_changed(analysed: Analysed) -> None:
    found = analysed(CARRIED["an observation, an environment and a replay buffer"][0])
    assert {each.name: each.is_rebound for each in found.variables} == {
        "env": False,
        "obs": True,
        "rb": False,
    }
