"""What ordinary scripts carry along for logs, figures and timing only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
    "running means by name": """
        running = {}
        for batch in loader:  # LOOP
            losses = model(batch)
            update(losses["total"])
            running = {k: running.get(k, 0) + v.item() for k, v in losses.items()}
            print(running)
        """,
    "a deque of losses in the bar": """
        from collections import deque
        from tqdm import tqdm
        window = deque(maxlen=100)
        with tqdm(loader) as bar:
            for batch in bar:  # LOOP
                loss = model(batch).sum()
                update(loss)
                window.append(loss.item())
                bar.set_postfix(loss=sum(window) / len(window))
        """,
    "metrics that are computed and logged": """
        import wandb
        from torchmetrics import Accuracy
        accuracy, seen = Accuracy(), 0
        for epoch in range(3):
            for x, y in loader:  # LOOP
                out = model(x)
                update((out - y).sum())
                accuracy.update(out, y)
                seen += len(x)
                wandb.log({"seen": seen})
            wandb.log({"accuracy": accuracy.compute()})
            accuracy.reset()
        """,
    "a results table and figures": """
        import pandas as pd
        import matplotlib.pyplot as plt
        rows, figure = [], plt.figure()
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            rows.append({"epoch": epoch, "loss": evaluate(model)})
            pd.DataFrame(rows).to_csv("rows.csv")
            plt.plot([each["loss"] for each in rows])
            plt.savefig("loss.png")
        """,
    "a profiler and an eta": """
        step, started, times = 0, time.perf_counter(), []
        profiler = torch.profiler.profile()
        for batch in loader:  # LOOP
            before = time.perf_counter()
            update(model(batch).sum())
            times.append(time.perf_counter() - before)
            step += 1
            profiler.step()
            if step % 50 == 0:
                eta = (1000 - step) * sum(times[-50:]) / 50
                print(f"{step} {eta:.0f} s left")
        """,
    "a checkpoint that holds the losses": """
        losses = []
        for epoch in range(3):
            for batch in loader:  # LOOP
                loss = model(batch).sum()
                update(loss)
                losses.append(loss.item())
            torch.save({"model": model.state_dict(), "losses": losses}, "m.pt")
        """,
    "an accuracy that is returned and printed": """
        def train():
            correct = total = 0
            for x, y in loader:  # LOOP
                out = model(x)
                update((out - y).sum())
                correct += (out.argmax(1) == y).sum().item()
                total += y.size(0)
            return correct / total
        for epoch in range(3):
            acc = train()
            print(acc)
        """,
    "a best value for a summary": """
        import wandb
        best = 0
        for epoch in range(3):
            for x in loader:  # LOOP
                update(model(x).sum())
            best = max(best, evaluate(model))
            wandb.summary["best"] = best
            wandb.run.summary["best2"] = best
        """,
    "times in a table": """
        import csv
        f = open("a.csv", "w")
        w = csv.writer(f)
        n, t = 0, 0.0
        for x in loader:  # LOOP
            s = time.time()
            loss = model(x).sum()
            update(loss)
            t += time.time() - s
            n += 1
            w.writerow([n, t, loss.item()])
            f.flush()
        """,
    "sums and a learning rate in a bar": """
        from tqdm import tqdm
        total_loss, total_norm, lr = 0.0, 0.0, 0.1
        pbar = tqdm(total=100)
        for i, x in enumerate(loader):  # LOOP
            loss = model(x).sum()
            loss.backward()
            total_norm += torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total_loss += loss.item()
            lr = optimizer.param_groups[0]["lr"]
            pbar.update(1)
            pbar.set_postfix({"l": total_loss / (i + 1), "n": total_norm, "lr": lr})
        """,
    "meters by name": """
        from meters import AverageMeter
        from collections import defaultdict
        meters = defaultdict(AverageMeter)
        for x in loader:  # LOOP
            losses = model(x)
            update(losses["a"])
            for k, v in losses.items():
                meters[k].update(v.item())
            print({k: m.avg for k, m in meters.items()})
        """,
    "a flag that prints once": """
        printed = False
        for x in loader:  # LOOP
            if not printed:
                print(x.shape)
                printed = True
            update(model(x).sum())
        """,
    "a smoothed loss beside an assertion": """
        ema = None
        for x in loader:  # LOOP
            loss = model(x).sum()
            assert torch.isfinite(loss)
            update(loss)
            ema = loss.item() if ema is None else 0.99 * ema + 0.01 * loss.item()
            if random.random() < 2:
                print(ema)
        """,
    "predictions for a score that is printed": """
        from sklearn.metrics import f1_score
        for epoch in range(3):
            preds, golds = [], []
            for x, y in loader:  # LOOP
                out = model(x)
                update((out - y).sum())
                preds += out.argmax(1).tolist()
                golds += y.tolist()
            print(f1_score(golds, preds))
        """,
    "a dict of logs": """
        logs = {"step": 0, "loss": 0.0}
        def log(**kw):
            logs.update(kw)
            print(logs)
        for x in loader:  # LOOP
            loss = model(x).sum()
            update(loss)
            logs["step"] += 1
            log(loss=loss.item())
        """,
    "names of the checkpoints": """
        names = []
        for epoch in range(3):
            for x in loader:  # LOOP
                update(model(x).sum())
            names.append(f"{epoch}.pt")
            torch.save(model.state_dict(), names[-1])
        print(names)
        """,
    "norms of the gradients": """
        norms = []
        for x in loader:  # LOOP
            model(x).sum().backward()
            norm = sum(p.grad.norm() for p in model.parameters())
            norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        print(max(norms))
        """,
    "a meter of the file": """
        class Meter:
            def __init__(self):
                self.n, self.t0, self.vals = 0, time.time(), []
            def add(self, v):
                self.n += 1
                self.vals.append(v)
                if self.n % 10 == 0:
                    print(sum(self.vals) / len(self.vals), time.time() - self.t0)
                    self.vals.clear()
        meter = Meter()
        for x in loader:  # LOOP
            loss = model(x).sum()
            update(loss)
            meter.add(loss.item())
        """,
}


@pytest.mark.parametrize("case", NOT_CARRIED)
def test_nothing_is_found_for(case: str, names: Callable[[str], set[str]]) -> None:
    assert names(NOT_CARRIED[case]) == set()
