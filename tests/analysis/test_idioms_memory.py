"""Tensors, lists and batches that one step leaves for the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CARRIED = {
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
    "a stopping rule whose method answers": (
        """
        from rules import Rule
        rule = Rule()
        for epoch in range(3):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            if rule.should_stop(evaluate(model)):
                break
        """,
        {"rule"},
    ),
    "a generator of its own": (
        """
        import numpy as np
        rng = np.random.RandomState(0)
        data = torch.randn(100, 3)
        for step in range(100):  # LOOP
            index = rng.randint(0, 100, 8)
            update(model(data[index]).sum())
        """,
        {"rng"},
    ),
    "batches that the script cuts from a permutation": (
        """
        import numpy as np
        data = torch.randn(100, 3)
        order, start = np.random.permutation(100), 0
        for step in range(100):  # LOOP
            if start + 8 > 100:
                order, start = np.random.permutation(100), 0
            index = order[start : start + 8]
            start += 8
            update(model(data[index]).sum())
        """,
        {"order", "start"},
    ),
    "an order that is shuffled in place": (
        """
        data = list(range(100))
        for epoch in range(3):
            random.shuffle(data)
            for i in range(0, 100, 8):  # LOOP
                update(model(torch.tensor(data[i : i + 8])).sum())
        """,
        {"data"},
    ),
    "a rollback to the weights before": (
        """
        previous, state = 1e9, None
        for epoch in range(10):
            for batch in loader:  # LOOP
                update(model(batch).sum())
            loss = evaluate(model)
            if loss > previous:
                model.load_state_dict(state)
            else:
                previous, state = loss, copy.deepcopy(model.state_dict())
        """,
        {"previous", "state"},
    ),
    "a heap of the hardest examples": (
        """
        import heapq
        heap = []
        for batch in loader:  # LOOP
            loss = model(batch)
            heapq.heappush(heap, (loss.max().item(), batch))
            if len(heap) > 10:
                heapq.heappop(heap)
            update(loss.sum() + model(heap[0][1]).sum())
        """,
        {"heap"},
    ),
    "a batch from a prefetcher at the end": (
        """
        from data import Prefetcher
        for epoch in range(3):
            prefetcher = Prefetcher(loader)
            batch = prefetcher.next()
            while batch is not None:  # LOOP
                update(model(batch).sum())
                batch = prefetcher.next()
        """,
        {"batch", "prefetcher"},
    ),
    "weights averaged by hand": (
        """
        average = {k: v.clone() for k, v in model.state_dict().items()}
        for batch in loader:  # LOOP
            update(model(batch).sum())
            for key, value in model.state_dict().items():
                average[key] = 0.9 * average[key] + 0.1 * value
        model.load_state_dict(average)
        evaluate(model)
        """,
        {"average"},
    ),
    "active learning sets": (
        """
        labelled, pool = list(range(10)), list(range(10, 100))
        for round in range(5):
            for i in labelled:  # LOOP
                update(model(torch.tensor(i)).sum())
            pick = max(pool, key=lambda i: model(torch.tensor(i)).item())
            labelled.append(pick)
            pool.remove(pick)
        """,
        {"labelled", "pool"},
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_state_in_memory_is_found(case: str, names: Callable[[str], set[str]]) -> None:
    body, expected = CARRIED[case]
    assert names(body) == expected
