"""State that real training scripts keep outside of models and optimizers, one idiom each."""

from __future__ import annotations

import pytest

from tests.analysis.test_loop_carried import analysed, names

CARRIED = {
    "an agent of the file with a buffer and an exploration rate": (
        """
        import gym
        from collections import deque
        class Agent:
            def __init__(self):
                self.net = nn.Linear(3, 2)
                self.opt = torch.optim.Adam(self.net.parameters())
                self.memory = deque(maxlen=100)
                self.epsilon = 1.0
            def act(self, state):
                if random.random() < self.epsilon:
                    return random.randrange(2)
                return self.net(state).argmax().item()
            def remember(self, *transition):
                self.memory.append(transition)
            def replay(self):
                batch = random.sample(self.memory, 32)
                loss = self.net(batch).sum()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                if self.epsilon > 0.01:
                    self.epsilon *= 0.99
        env = gym.make("x")
        agent = Agent()
        for episode in range(10):
            state = env.reset()
            for t in range(100):  # LOOP
                action = agent.act(state)
                next_state, reward, done, _ = env.step(action)
                agent.remember(state, action, reward, next_state, done)
                state = next_state
                if done:
                    break
                if len(agent.memory) > 32:
                    agent.replay()
        """,
        {"agent", "env", "state"},
    ),
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
    "an imported pool whose result is used": (
        """
        from util import ReplayPool
        pool = ReplayPool(50)
        for batch in loader:  # LOOP
            fake = pool.push_and_pop(model(batch))
            update(model(fake).sum())
        """,
        {"pool"},
    ),
    "hidden states in a tuple": (
        """
        h = (torch.zeros(1), torch.zeros(1))
        for epoch in range(2):
            for batch in loader:  # LOOP
                h = tuple(each.detach() for each in h)
                out, h = model(batch, h)
                update(out.sum())
        """,
        {"h"},
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
        {"hx", "cx"},
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
        {"seen", "length"},
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
    "a threshold from a moving average": (
        """
        average = None
        for batch in loader:  # LOOP
            loss = model(batch).mean()
            average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
            if loss.item() > 3 * average:
                continue
            update(loss)
        """,
        {"average"},
    ),
    "a moving baseline": (
        """
        baseline = 0.0
        for batch in loader:  # LOOP
            logp, reward = model(batch), batch.sum()
            advantage = reward - baseline
            baseline = 0.9 * baseline + 0.1 * reward.item()
            update(-(logp * advantage).mean())
        """,
        {"baseline"},
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
    "hard examples that a list collects": (
        """
        hard = []
        for batch in loader:  # LOOP
            loss = model(batch)
            for each, value in zip(batch, loss):
                if value > 1:
                    hard.append(each)
            update(loss.mean())
            if len(hard) > 16:
                update(model(torch.stack(hard)).mean())
                hard = []
        """,
        {"hard"},
    ),
    "the state of a filter that is called": (
        """
        import gym
        from utils import ZFilter
        env = gym.make("x")
        normalize = ZFilter((3,), clip=5)
        obs = normalize(env.reset())
        for step in range(100):  # LOOP
            action = model(obs)
            obs, reward, done, _ = env.step(action)
            obs = normalize(obs)
            update(action.sum() * reward)
        """,
        {"env", "normalize", "obs"},
    ),
    "correlated noise": (
        """
        import gym
        from noise import OUNoise
        env, noise = gym.make("x"), OUNoise(2)
        obs = env.reset()
        for step in range(100):  # LOOP
            action = model(obs) + noise.noise()
            obs, reward, done, _ = env.step(action)
            update(action.sum() * reward)
        """,
        {"env", "noise", "obs"},
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
    "a memory bank that is written by index": (
        """
        bank = torch.zeros(100, 3)
        for x, index in loader:  # LOOP
            features = model(x)
            update((features @ bank.T).sum())
            with torch.no_grad():
                bank[index] = 0.5 * bank[index] + 0.5 * features
        """,
        {"bank"},
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
    "weights of the samples": (
        """
        weights = torch.ones(100)
        for x, y, index in loader:  # LOOP
            losses = model(x)
            update((losses * weights[index]).mean())
            weights[index] *= torch.exp(losses.detach())
            weights /= weights.sum()
        """,
        {"weights"},
    ),
    "a tensor that an optimizer trains by itself": (
        """
        log_alpha = torch.zeros(1, requires_grad=True)
        alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
        for batch in loader:  # LOOP
            logp = model(batch)
            update((log_alpha.exp().detach() * logp).mean())
            alpha_loss = -(log_alpha * logp.detach()).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()
        """,
        {"log_alpha"},
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
    "fixed noise is not state, latents that training moves are": (
        """
        latents = torch.randn(100, 3)
        fixed = torch.randn(16, 3)
        for x, index in loader:  # LOOP
            z = latents[index].requires_grad_()
            loss = (model(z) - x).pow(2).mean()
            update(loss)
            latents[index] = (z - 0.1 * z.grad).detach()
        """,
        {"latents"},
    ),
    "trajectories that are trained on at the end of an episode": (
        """
        import gym
        env = gym.make("x")
        rewards, logps = [], []
        state = env.reset()
        for step in range(1000):  # LOOP
            logp = model(state)
            state, reward, done, _ = env.step(logp.argmax())
            rewards.append(reward)
            logps.append(logp)
            if done:
                returns = torch.tensor(rewards)
                update(-(torch.stack(logps) * returns).sum())
                rewards, logps = [], []
                state = env.reset()
        """,
        {"env", "logps", "rewards", "state"},
    ),
    "solved when the mean of the last scores is high": (
        """
        import gym
        from collections import deque
        import numpy as np
        env = gym.make("x")
        scores = deque(maxlen=100)
        for episode in range(1000):  # LOOP
            state, score, done = env.reset(), 0, False
            while not done:
                action = model(state)
                state, reward, done, _ = env.step(action)
                score += reward
                update(action.sum() * reward)
            scores.append(score)
            if np.mean(scores) > 195:
                break
        """,
        {"env", "scores"},
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
    "an option that training changes": (
        """
        from options import parse
        args = parse()
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum() * args.weight)
            if epoch % 3 == 0:
                args.weight *= 0.5
        """,
        {"args.weight"},
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
    "a dictionary of queues": (
        """
        queues = {name: [] for name in ("a", "b")}
        for name, batch in loader:  # LOOP
            queues[name].append(model(batch).detach())
            update((model(batch) - torch.stack(queues[name])).sum())
            if len(queues[name]) > 10:
                queues[name].pop(0)
        """,
        {"queues"},
    ),
    "augmentation that adapts": (
        """
        p, signs = 0.0, []
        for batch in loader:  # LOOP
            out = model(batch if random.random() > p else -batch)
            signs.append(out.sign().mean().item())
            update(out.sum())
            if len(signs) == 4:
                p += 0.01 if sum(signs) / 4 > 0.6 else -0.01
                signs.clear()
        """,
        {"p", "signs"},
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
    "a loss weight from the losses before": (
        """
        weights, previous = torch.ones(2), None
        for epoch in range(10):
            total = torch.zeros(2)
            for batch in loader:  # LOOP
                losses = model(batch)
                update((losses * weights).sum())
                total += losses.detach()
            if previous is not None:
                weights = torch.softmax(total / previous, 0)
            previous = total
        """,
        {"previous", "total", "weights"},
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
    "graph memory in a module-level store": (
        """
        from tgn import LastNeighborLoader
        neighbors = LastNeighborLoader(100, size=10)
        for batch in loader:  # LOOP
            ids, edges = neighbors(batch.ids)
            update(model(ids, edges).sum())
            neighbors.insert(batch.src, batch.dst)
        """,
        {"neighbors"},
    ),
    "self-play examples": (
        """
        import gym
        examples = []
        for iteration in range(10):  # LOOP
            fresh = []
            for _ in range(5):
                fresh.append(model(torch.zeros(3)))
            examples.append(fresh)
            if len(examples) > 20:
                examples.pop(0)
            flat = [each for group in examples for each in group]
            update(torch.stack(flat).sum())
        """,
        {"examples"},
    ),
    "a running normalisation of rewards by hand": (
        """
        count, mean = 0, 0.0
        for x, reward in loader:  # LOOP
            count += 1
            mean += (reward.mean().item() - mean) / count
            update((model(x) * (reward - mean)).sum())
        """,
        {"count", "mean"},
    ),
}

NOT_CARRIED = {
    "counts and scores of an epoch that are printed": """
        for epoch in range(3):
            correct, total, start = 0, 0, time.time()
            for x, y in loader:  # LOOP
                out = model(x)
                update((out - y).sum())
                correct += (out.argmax(1) == y).sum().item()
                total += len(y)
            print(f"{epoch} {correct / total:.3f} {time.time() - start:.1f} s")
        """,
    "meters of a function whose one result decides": """
        from meters import AverageMeter
        def train(epoch):
            losses, seen = AverageMeter(), 0
            for batch in loader:  # LOOP
                loss = model(batch).sum()
                update(loss)
                losses.update(loss.item())
                seen += 1
            return losses.avg, seen
        def main():
            for epoch in range(3):
                loss, seen = train(epoch)
                print(loss, seen)
        main()
        """,
    "a history that a file gets": """
        import json
        history = {"loss": [], "val": []}
        for epoch in range(3):
            for batch in loader:  # LOOP
                loss = model(batch).sum()
                update(loss)
                history["loss"].append(loss.item())
            history["val"].append(evaluate(model))
        with open("history.json", "w") as file:
            json.dump(history, file)
        """,
    "sample images by a counter": """
        from torchvision.utils import save_image
        fixed, n = torch.randn(16, 3), 0
        for batch in loader:  # LOOP
            update(model(batch).sum())
            n += 1
            if n % 100 == 0:
                with torch.no_grad():
                    save_image(batch, f"{n}.png")
        """,
    "a smoothed loss in a progress bar": """
        from tqdm import tqdm
        smooth, steps = None, 0
        bar = tqdm(loader)
        for batch in bar:  # LOOP
            loss = model(batch).sum()
            update(loss)
            smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            steps += 1
            bar.set_description(f"{smooth:.3f}")
            if steps % 10 == 0:
                print(steps, smooth)
        """,
    "confusion counts of an evaluation": """
        import numpy as np
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            matrix = np.zeros((2, 2))
            for x, y in loader:
                matrix[y, model(x).argmax(1)] += 1
            print(matrix)
        """,
    "what each step sets before it reads": """
        weight = 0.0
        for epoch in range(3):
            for i, batch in enumerate(loader):  # LOOP
                weight = 0.5 if epoch < 2 else 1.0
                loss = model(batch).sum() * weight
                update(loss)
        """,
    "a timer and a throughput": """
        start, tokens, best = time.time(), 0, 0.0
        for batch in loader:  # LOOP
            update(model(batch).sum())
            tokens += batch.numel()
            speed = tokens / (time.time() - start)
            if speed > best:
                best = speed
                print("fastest", best)
        """,
    "a table of the script's own logger class": """
        class Table:
            def __init__(self):
                self.rows, self.count = [], 0
            def add(self, **row):
                self.rows.append(row)
                self.count += 1
                print(self.count, row)
        table = Table()
        for batch in loader:  # LOOP
            loss = model(batch).sum()
            update(loss)
            table.add(loss=loss.item())
        """,
}


@pytest.mark.parametrize("case", CARRIED)
def test_an_idiom_with_state_is_found(case: str) -> None:
    body, expected = CARRIED[case]
    assert names(analysed(body)) == expected


@pytest.mark.parametrize("case", NOT_CARRIED)
def test_an_idiom_without_state_is_not(case: str) -> None:
    assert names(analysed(NOT_CARRIED[case])) == set()
