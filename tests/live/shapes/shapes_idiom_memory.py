"""Tensors, lists, tables and batches that one step of a real script leaves for the next."""

from __future__ import annotations

import copy
import heapq
import random
from collections import namedtuple

import numpy as np
import torch
from shapes_idiom_counts import begin
from tiny_training import BATCH_SIZE, BATCHES, EPOCHS, loss_of, make, step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

NUM_SAMPLES = BATCHES * BATCH_SIZE
State = namedtuple("State", "h step")


def begin_with_indices(directory, options):
    """The same with a loader that gives the indices of the samples as well."""
    model, optimizer, loader = make()
    data = TensorDataset(*loader.dataset.tensors, torch.arange(NUM_SAMPLES))
    indexed = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    return model, optimizer, indexed, ckpt


# ---------------------------------------------------------------- of the step before


def hard_examples_of_the_step_before(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    hard = []
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        x = torch.cat([inputs, *(a for a, _ in hard)]) if hard else inputs
        y = torch.cat([targets, *(b for _, b in hard)]) if hard else targets
        loss = loss_of(model, (x, y))
        errors = (model(inputs) - targets[:, :1]).square().flatten()
        hard = [(inputs[i : i + 1], targets[i : i + 1]) for i, e in enumerate(errors) if e > 1]
        step(ckpt, optimizer, loss)
        record(loss, model)


def mixture_with_the_batch_before(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    previous = None
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        mixed = inputs if previous is None else 0.7 * inputs + 0.3 * previous
        loss = loss_of(model, (mixed, targets))
        step(ckpt, optimizer, loss)
        previous = inputs
        record(loss, model)


def hidden_states_in_a_tuple(directory, *, record, **options):
    _, _, loader = make()
    lstm = nn.LSTM(4, 4)
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)
    ckpt = Checkpointer(directory, model=lstm, optimizer=optimizer, **options)
    h = (torch.zeros(1, 4), torch.zeros(1, 4))
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        h = tuple(each.detach() for each in h)
        out, h = lstm(inputs, h)
        loss = (out - targets).square().mean()
        step(ckpt, optimizer, loss)
        record(loss, lstm)


def named_tuple_that_is_replaced(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    state = State(torch.zeros(4), 0)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs + state.h, targets))
        state = state._replace(h=0.5 * state.h + inputs.mean(0), step=state.step + 1)
        step(ckpt, optimizer, loss / state.step)
        record(loss, model)


def keywords_that_a_step_returns(directory, *, record, **options):
    def train_step(batch, *, h=None, scale=1.0):
        loss = (loss_of(model, batch) + (0.0 if h is None else h.mean())) * scale
        step(ckpt, optimizer, loss)
        record(loss, model)
        return {"h": batch[1].mean(0), "scale": scale * 0.95}

    model, optimizer, loader, ckpt = begin(directory, options)
    keywords = {}
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        keywords = train_step(batch, **keywords)


# ---------------------------------------------------------------- collections


def hidden_state_of_each_sequence(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    states = {}
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        key = int(indices[0]) % 3
        h = states.get(key, torch.zeros(4))
        loss = loss_of(model, (inputs + h, targets))
        states[key] = 0.5 * h + inputs.mean(0)
        step(ckpt, optimizer, loss)
        record(loss, model)


def targets_of_the_first_time(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    cache = {}
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        base = cache.setdefault(int(indices[0]) % 4, model(inputs).detach().mean())
        loss = loss_of(model, (inputs, targets)) + (model(inputs).mean() - base).square()
        step(ckpt, optimizer, loss)
        record(loss, model)


def dictionary_of_queues(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    queues = {name: [] for name in ("a", "b")}
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        queue = queues["ab"[int(indices[0]) % 2]]
        queue.append(targets.mean(0))
        loss = loss_of(model, (inputs, targets - torch.stack(queue).mean(0)))
        step(ckpt, optimizer, loss)
        if len(queue) > 2:
            queue.pop(0)
        record(loss, model)


def heap_of_the_hardest(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    heap, number = [], 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        number += 1
        loss = loss_of(model, batch)
        heapq.heappush(heap, (loss.item(), number, batch))
        if len(heap) > 3:
            heapq.heappop(heap)
        loss = loss + loss_of(model, heap[0][2])
        step(ckpt, optimizer, loss)
        record(loss, model)


def examples_of_former_iterations(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    examples = []
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        examples.append([(inputs[0], targets[0]), (inputs[1], targets[1])])
        if len(examples) > 4:
            examples.pop(0)
        flat = [each for group in examples for each in group]
        batch = [torch.stack(each) for each in zip(*flat, strict=True)]
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)


def examples_that_were_seen(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    seen = set()
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        ids = {int(i) // 2 for i in indices}
        loss = loss_of(model, (inputs, targets)) * (1 + len(ids - seen))
        seen.update(ids)
        step(ckpt, optimizer, loss)
        record(loss, model)


def sets_of_active_learning(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    inputs, targets = loader.dataset.tensors
    labelled, pool = list(range(4)), list(range(4, NUM_SAMPLES))
    for _ in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs[labelled], targets[labelled]))
        step(ckpt, optimizer, loss)
        with torch.no_grad():
            pick = max(pool, key=lambda i: model(inputs[i]).item())
        labelled.append(pick)
        pool.remove(pick)
        record(loss, model)


def batches_that_are_collected(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    buffer = []
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        buffer += [batch[0]]
        loss = loss_of(model, batch) + model(torch.cat(buffer)).square().mean()
        step(ckpt, optimizer, loss)
        if len(buffer) == 4:
            del buffer[:]
        record(loss, model)


def pool_whose_result_is_used(directory, *, record, **options):
    class ImagePool:
        def __init__(self, size):
            self.size, self.images = size, []

        def query(self, image):
            if len(self.images) < self.size:
                self.images.append(image)
                return image
            if random.uniform(0, 1) > 0.5:
                index = random.randint(0, self.size - 1)
                kept, self.images[index] = self.images[index].clone(), image
                return kept
            return image

    model, optimizer, loader, ckpt = begin(directory, options)
    pool = ImagePool(5)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (pool.query(inputs), targets))
        step(ckpt, optimizer, loss)
        record(loss, model)


def augmentation_that_adapts(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    p, signs = 0.2, []
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs if random.random() > p else -inputs, targets))
        signs.append(inputs.mean().sign().item())
        step(ckpt, optimizer, loss)
        if len(signs) == 4:
            p += 0.2 if sum(signs) > 0 else -0.1
            signs.clear()
        record(loss, model)


# ---------------------------------------------------------------- tables of tensors


def memory_bank_by_index(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    bank = torch.zeros(NUM_SAMPLES, 4)
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs + bank.mean(0), targets))
        with torch.no_grad():
            bank[indices] = 0.5 * bank[indices] + 0.5 * inputs
        step(ckpt, optimizer, loss)
        record(loss, model)


def weights_of_the_samples(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    weights = torch.ones(NUM_SAMPLES)
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        losses = (model(inputs) - targets[:, :1]).square().flatten()
        loss = (losses * weights[indices]).mean()
        step(ckpt, optimizer, loss)
        weights[indices] *= torch.exp(losses.detach().clamp(max=1))
        weights /= weights.mean()
        record(loss, model)


def latents_that_training_moves(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    latents, fixed = torch.randn(NUM_SAMPLES, 4), torch.randn(4, 4)
    for inputs, targets, indices in ckpt.batches(loader, epochs=EPOCHS):
        z = latents[indices].requires_grad_()
        loss = loss_of(model, (inputs + z @ fixed, targets))
        step(ckpt, optimizer, loss)
        latents[indices] = (z - 0.5 * z.grad).detach()
        record(loss, model)


def pseudo_labels_of_an_epoch(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin_with_indices(directory, options)
    labels = torch.zeros(NUM_SAMPLES, 1)
    for _ in ckpt.epochs(EPOCHS):
        for inputs, targets, indices in ckpt.batches(loader):
            loss = loss_of(model, (inputs, targets)) + loss_of(model, (inputs, labels[indices]))
            step(ckpt, optimizer, loss)
            record(loss, model)
        with torch.no_grad():
            labels[:] = model(loader.dataset.tensors[0]).sign()


def centers_that_a_function_moves(directory, *, record, **options):
    def move(centers, features, labels):
        for k in range(2):
            if (labels == k).any():
                centers[k] = 0.9 * centers[k] + 0.1 * features[labels == k].mean(0)

    model, optimizer, loader, ckpt = begin(directory, options)
    centers = torch.zeros(2, 4)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        labels = (targets[:, 1] > 0).long()
        loss = loss_of(model, (inputs - centers[labels], targets))
        step(ckpt, optimizer, loss)
        move(centers, inputs, labels)
        record(loss, model)


def queue_that_a_function_returns(directory, *, record, **options):
    def enqueue(queue, keys):
        return torch.cat([keys, queue])[:12]

    model, optimizer, loader, ckpt = begin(directory, options)
    queue = torch.zeros(12, 4)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs + queue.mean(0), targets))
        step(ckpt, optimizer, loss)
        queue = enqueue(queue, inputs)
        record(loss, model)


def ring_buffer_with_numpy(directory, *, record, **options):
    class Ring:
        def __init__(self):
            self.data, self.pointer, self.full = np.zeros((5, 4), np.float32), 0, False

        def add(self, row):
            self.data[self.pointer] = row
            self.pointer = (self.pointer + 1) % 5
            self.full = self.full or self.pointer == 0

        def sample(self):
            return self.data[np.random.randint(0, 5 if self.full else self.pointer, 4)]

    model, optimizer, loader, ckpt = begin(directory, options)
    ring = Ring()
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        ring.add(inputs[0].numpy())
        loss = loss_of(model, (torch.from_numpy(ring.sample()), targets))
        step(ckpt, optimizer, loss)
        record(loss, model)


def momentum_by_hand(directory, *, record, **options):
    model, _, loader, ckpt = begin(directory, options)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, v in zip(model.parameters(), velocity, strict=True):
                v.mul_(0.9).add_(p.grad)
                p -= 0.05 * v
        ckpt.step(loss=loss)
        record(loss, model)


def adam_by_hand(directory, *, record, **options):
    model, _, loader, ckpt = begin(directory, options)
    m, t = {n: torch.zeros_like(p) for n, p in model.named_parameters()}, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        t += 1
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        for n, p in model.named_parameters():
            m[n] = 0.9 * m[n] + 0.1 * p.grad
            p.data -= 0.05 * m[n] / (1 - 0.9**t)
        ckpt.step(loss=loss)
        record(loss, model)


def weights_without_a_module(directory, *, record, **options):
    """Two leaf tensors are trained by hand beside the model; their gradients are zeroed."""
    model, optimizer, loader, ckpt = begin(directory, options)
    w, b = torch.ones(4, requires_grad=True), torch.zeros(1, requires_grad=True)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, (inputs * w + b, targets))
        step(ckpt, optimizer, loss)
        with torch.no_grad():
            for each in (w, b):
                each -= 0.5 * each.grad
                each.grad.zero_()
        record(loss, model)


# ---------------------------------------------------------------- orders and generators


def order_that_is_shuffled_in_place(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    inputs, targets = loader.dataset.tensors
    order, start = list(range(NUM_SAMPLES)), 0
    for _ in ckpt.batches(loader, epochs=EPOCHS):
        if start == 0:
            random.shuffle(order)
        index = order[start : start + 4]
        start = (start + 4) % 12
        loss = loss_of(model, (inputs[index], targets[index]))
        step(ckpt, optimizer, loss)
        record(loss, model)


def generator_of_the_script(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    inputs, targets = loader.dataset.tensors
    rng = np.random.RandomState(0)
    for _ in ckpt.batches(loader, epochs=EPOCHS):
        index = rng.randint(0, NUM_SAMPLES, 4)
        loss = loss_of(model, (inputs[index], targets[index]))
        step(ckpt, optimizer, loss)
        record(loss, model)


def rollback_to_the_weights_before(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    previous, kept = 1e9, None
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        if loss.item() > 1.5 * previous:
            model.load_state_dict(kept)
        else:
            previous, kept = loss.item(), copy.deepcopy(model.state_dict())
        record(loss, model)


def average_that_is_loaded_at_the_end(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    average = {k: v.clone() for k, v in model.state_dict().items()}
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        for key, value in model.state_dict().items():
            average[key] = 0.9 * average[key] + 0.1 * value
        record(loss + sum(v.sum() for v in average.values()), model)
    model.load_state_dict(average)
