"""Counters, best values, schedules and thresholds that a training loop moves by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CARRIED = {
    "a curriculum by a counter": (
        """
        seen, length = 0, 8
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch[:, :length]).sum())
                seen += len(batch)
                if seen > 1000:
                    length, seen = length * 2, 0
        """,
        {"length", "seen"},
    ),
    "a teacher-forcing ratio that decays": (
        """
        ratio = 1.0
        for epoch in range(3):
            for src, trg in loader:  # LOOP
                update(model(src, trg, teacher_forcing_ratio=ratio).sum())
            ratio = max(0.0, ratio - 0.1)
        """,
        {"ratio"},
    ),
    "hard examples from the steps before": (
        """
        hard = []
        for batch in loader:  # LOOP
            x = torch.cat([batch, *hard]) if hard else batch
            loss = model(x)
            hard = [each for each, value in zip(x, loss) if value > 1]
            update(loss.mean())
        """,
        {"hard"},
    ),
    "a learning rate that the script decays": (
        """
        lr, best = 0.1, 1e9
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            loss = evaluate(model)
            if loss > best:
                lr *= 0.5
                optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            best = min(loss, best)
        """,
        {"best", "lr"},
    ),
    "an epoch counter of its own": (
        """
        batches, epoch = iter(loader), 0
        for step in range(1000):  # LOOP
            try:
                batch = next(batches)
            except StopIteration:
                epoch += 1
                loader.sampler.set_epoch(epoch)
                batches = iter(loader)
                batch = next(batches)
            update(model(batch).sum())
        """,
        {"epoch"},
    ),
    "a while loop with a counter": (
        """
        step = 0
        while step < 100:
            for batch in loader:  # LOOP
                update(model(batch).sum())
                step += 1
                if step >= 100:
                    break
        """,
        {"step"},
    ),
    "a count of steps without progress in a dict": (
        """
        track = {"best": 1e9, "bad": 0}
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            value = evaluate(model)
            if value < track["best"]:
                track["best"], track["bad"] = value, 0
                torch.save(model.state_dict(), "best.pt")
            else:
                track["bad"] += 1
            if track["bad"] > 3:
                break
        """,
        {"track"},
    ),
    "a temperature that is annealed": (
        """
        import numpy as np
        temperature, step = 1.0, 0
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch, temperature).sum())
                if step % 100 == 0:
                    temperature = np.maximum(temperature * np.exp(-1e-4 * step), 0.5)
                step += 1
        """,
        {"step", "temperature"},
    ),
    "gradients that are skipped for some steps": (
        """
        since = 0
        for batch in loader:  # LOOP
            loss = model(batch).sum()
            loss.backward()
            since += 1
            if since == 4:
                optimizer.step()
                optimizer.zero_grad()
                since = 0
        """,
        {"since"},
    ),
    "critic steps by a generator counter": (
        """
        generator_steps = 0
        D = nn.Linear(3, 1)
        optimizer_d = torch.optim.Adam(D.parameters())
        for batch in loader:  # LOOP
            critic_steps = 100 if generator_steps < 25 else 5
            for _ in range(critic_steps):
                optimizer_d.zero_grad()
                D(batch).mean().backward()
                optimizer_d.step()
            update(model(batch).mean())
            generator_steps += 1
        """,
        {"generator_steps"},
    ),
    "a walrus and a condition": (
        """
        best = 1e9
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            if (value := evaluate(model)) < best:
                best = value
                torch.save(model.state_dict(), "best.pt")
        """,
        {"best"},
    ),
    "a batch size that grows": (
        """
        size = 8
        for epoch in range(10):
            for batch in DataLoader(loader.dataset, batch_size=size):  # LOOP
                update(model(batch).sum())
            if epoch % 2 == 0:
                size *= 2
        """,
        {"size"},
    ),
    "an iterator over a second loader and its count": (
        """
        used = 0
        second = iter(loader)
        for batch in loader:  # LOOP
            if used == len(loader):
                second, used = iter(loader), 0
            other = next(second)
            used += 1
            update(model(batch, other).sum())
        """,
        {"used"},
    ),
    "a plateau by hand with several variables": (
        """
        best, wait, cooldown = 1e9, 0, 0
        for epoch in range(30):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            value = evaluate(model)
            if cooldown > 0:
                cooldown -= 1
                wait = 0
            if value < best:
                best, wait = value, 0
            elif cooldown == 0:
                wait += 1
                if wait >= 3:
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.1
                    cooldown, wait = 2, 0
        """,
        {"best", "cooldown", "wait"},
    ),
    "a metric that decides what is saved": (
        """
        from metrics import Dice
        best, metric = 0, Dice()
        for epoch in range(3):
            for batch in loader:  # LOOP
                out = model(batch)
                metric.update(out)
                update(out.sum())
            value = metric.compute()
            metric.reset()
            if value > best:
                best = value
                torch.save(model.state_dict(), "best.pt")
        """,
        {"best", "metric"},
    ),
    "steps that itertools counts": (
        """
        import itertools
        steps = itertools.count()
        for batch in loader:  # LOOP
            step = next(steps)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + step)
            update(model(batch).sum())
        """,
        {"steps"},
    ),
    "failures in a row": (
        """
        failures = 0
        for batch in loader:  # LOOP
            try:
                loss = model(batch).sum()
                update(loss)
                failures = 0
            except RuntimeError:
                failures += 1
                if failures > 3:
                    raise
        """,
        {"failures"},
    ),
    "a match statement": (
        """
        phase, seen = "warm", 0
        for batch in loader:  # LOOP
            seen += 1
            match phase:
                case "warm":
                    loss = model(batch).sum() * 0.1
                    if seen == 50:
                        phase = "main"
                case _:
                    loss = model(batch).sum()
            update(loss)
        """,
        {"phase", "seen"},
    ),
    "a schedule that pops": (
        """
        lr, schedule = 0.1, {100: 0.01, 200: 0.001}
        step = 0
        for batch in loader:  # LOOP
            lr = schedule.pop(step, lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            update(model(batch).sum())
            step += 1
        """,
        {"lr", "schedule", "step"},
    ),
    "pseudo labels that an epoch makes for the next": (
        """
        labels = torch.zeros(100)
        for epoch in range(3):
            for x, index in loader:  # LOOP
                update((model(x) - labels[index]).sum())
            with torch.no_grad():
                for x, index in loader:
                    labels[index] = model(x).argmax(1).float()
        """,
        {"labels"},
    ),
    "adversarial perturbation kept between steps": (
        """
        delta = torch.zeros(8, 3)
        for x, y in loader:  # LOOP
            for _ in range(4):
                noise = delta[: x.size(0)].clone().requires_grad_()
                loss = (model(x + noise) - y).sum()
                loss.backward()
                delta[: x.size(0)] += 0.1 * noise.grad.sign()
                delta.clamp_(-1, 1)
                optimizer.step()
                optimizer.zero_grad()
        """,
        {"delta"},
    ),
    "a beta that grows in the loss": (
        """
        beta = 0.0
        for epoch in range(3):
            for batch in loader:  # LOOP
                rec, kl = model(batch)
                update(rec.sum() + beta * kl.sum())
                beta = min(1.0, beta + 1e-3)
        """,
        {"beta"},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_state_in_counters_is_found(case: str, names: Callable[[str], set[str]]) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected
