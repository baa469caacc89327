"""Training functions over iterable data that the conformance kit launches, kills and compares.

They are loops of the kind that people write, on scikit-learn's handwritten digits; the options are
the factors of the test matrix. None looks at whether it was started before.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from digits import Digits
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

from resumekit.adapters.torch import Checkpointer

NUM_SAMPLES = 46  # the last batch of an epoch is a partial one
BATCH_SIZE = 8
STEPS_PER_EPOCH = 6

Sample = tuple[torch.Tensor, int]


def my_share(length: int) -> range:
    """The samples of this worker, or all of them where there are no workers."""
    info = get_worker_info()
    return range(length) if info is None else range(info.id, length, info.num_workers)


class Stream(IterableDataset[Sample]):
    """The digits one after the other, the same in every worker."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.digits = Digits(num_samples, augment=False)

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self.digits)):
            yield self.digits[index]


class Sharded(Stream):
    """Each worker reads its own part."""

    def __iter__(self) -> Iterator[Sample]:
        for index in my_share(len(self.digits)):
            yield self.digits[index]


class Drawing(Sharded):
    """Draws for every sample, and shuffles through a buffer by the generator that dropout uses."""

    def __iter__(self) -> Iterator[Sample]:
        buffer: list[Sample] = []
        for image, label in super().__iter__():
            noise = random.random() + float(np.random.rand())
            buffer.append((image * (0.9 + 0.1 * noise), label))
            if len(buffer) > 6:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        random.shuffle(buffer)
        yield from buffer


class Placed(Sharded):
    """Says where it is, and goes there; draws for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def __iter__(self) -> Iterator[Sample]:
        mine = my_share(len(self.digits))
        while self.used < len(mine):
            image, label = self.digits[mine[self.used]]
            self.used += 1
            yield image + 0.01 * torch.randn(image.shape), label
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class OwnLoader:
    """A user-defined loader with a state, which makes its batches here or has them made by workers.

    Its state is the number of batches; what the workers make does not depend on random numbers. The
    loader inside has a generator, so that it draws no seed from the run's when it resumes.
    """

    def __init__(self, workers: int) -> None:
        self.stream = Sharded()
        self.workers = workers
        self.used = 0

    def __iter__(self) -> Iterator[Any]:
        seeds = torch.Generator()
        loader = DataLoader(self.stream, BATCH_SIZE, num_workers=self.workers, generator=seeds)
        for number, (images, labels) in enumerate(loader):
            if number == self.used:
                self.used += 1
                yield images + 0.01 * torch.randn(images.shape), labels
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


def streaming(*, buffer_size: int) -> Any:
    """The digits as a stream of Hugging Face datasets in four shards, with random augmentation."""
    from datasets import Dataset

    digits = Digits(NUM_SAMPLES, augment=False)
    columns = {"image": digits.images.tolist(), "label": digits.labels}
    stream = Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
    if buffer_size:
        stream = stream.shuffle(seed=3, buffer_size=buffer_size)
    return stream.map(_augmented).with_format("torch")


def _augmented(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": (np.asarray(sample["image"]) * (0.9 + 0.2 * random.random()))}


def stateful_data_loader(*arguments: Any, **settings: Any) -> Any:
    """torchdata's loader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        # torchdata 0.11 stateful_dataloader.py calls what torch 2.13 deprecates.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(*arguments, **settings)


def of_nodes(num_threads: int) -> Any:
    """torchdata's loader over nodes, with threads that read ahead."""
    from torchdata import nodes

    digits = Digits(NUM_SAMPLES, augment=False)
    node: Any = nodes.SamplerWrapper(RandomSampler(digits))
    node = nodes.Batcher(node, BATCH_SIZE, drop_last=False)
    node = nodes.ParallelMapper(
        node, lambda indices: default_collate([digits[i] for i in indices]), num_workers=num_threads
    )
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2) if num_threads else node)


def make_loader(kind: str, workers: str) -> Any:
    """The loader that the cell asks for; each gives six batches an epoch."""
    num_workers = 0 if workers == "0" else 2
    settings: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "num_workers": num_workers,
        "persistent_workers": workers == "persistent",
    }
    if kind == "iterable":  # each worker reads the whole of it
        return DataLoader(Stream(NUM_SAMPLES // max(num_workers, 1)), **settings)
    if kind == "sharded":
        return DataLoader(Sharded(), **settings)
    if kind == "drawing":
        return DataLoader(Drawing(), **settings)
    if kind == "streaming":
        return DataLoader(streaming(buffer_size=0), **settings)
    if kind == "buffered":
        return DataLoader(streaming(buffer_size=12), **settings)
    if kind == "stateful map":
        digits = Digits(NUM_SAMPLES, augment=True)
        return stateful_data_loader(digits, shuffle=True, **settings)
    if kind == "stateful iterable":
        return stateful_data_loader(Placed(), **settings)
    if kind == "nodes":
        return of_nodes(num_workers)
    return OwnLoader(num_workers)


def train(
    directory: str,
    *,
    kind: str,
    workers: str = "0",
    loop: str = "batches",
    through: str = "torch",
    save_every: int = 2,
    epochs: int = 2,
) -> None:
    """Trains a small classifier with dropout; refuses to start unless all of it is exact."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10)
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = make_loader(kind, workers)
    options: dict[str, Any] = {"save_every": save_every, "strict": True}
    if through == "torch":
        checkpointer: Any = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    else:
        from accelerate import Accelerator, DataLoaderConfiguration

        from resumekit.adapters import accelerate

        settings = DataLoaderConfiguration(
            dispatch_batches=through.startswith("dispatcher"),
            use_stateful_dataloader=through.endswith("stateful"),
        )
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        torch.manual_seed(accelerator.process_index + 1)  # ranks draw different dropout masks
        checkpointer = accelerate.Checkpointer(accelerator, directory, **options)

    def one_batch(batch: Any) -> None:
        images, labels = batch.values() if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(model(images.float()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(loss=loss)

    if loop == "batches":
        for batch in checkpointer.batches(loader, epochs=epochs):
            one_batch(batch)
    else:
        for _ in checkpointer.epochs(epochs):
            torch.rand(())
            for batch in checkpointer.batches(loader):
                one_batch(batch)
            np.random.rand()
    checkpointer.close()


def train_by_trainer(directory: str, *, workers: str, save_every: int, max_steps: int = 18) -> None:
    """The Hugging Face Trainer on a stream of unknown length; it goes through it several times."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
    from transformers_workloads import BLOCK_SIZE, Blocks

    from resumekit.adapters.transformers import ResumeCallback

    class Stream(IterableDataset[Any]):
        def __init__(self) -> None:
            self.blocks = Blocks(augment=True)

        def __iter__(self) -> Iterator[Any]:
            buffer: list[Any] = []
            for index in my_share(NUM_SAMPLES):
                buffer.append(self.blocks[index])
                if len(buffer) > 6:
                    yield buffer.pop(int(torch.randint(len(buffer), ())))
            yield from buffer

    set_seed(0)
    sizes = {"vocab_size": 256, "n_positions": BLOCK_SIZE, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=f"{directory}/output",
        max_steps=max_steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-2,
        dataloader_num_workers=int(workers),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model, arguments, train_dataset=Stream())
    callback = ResumeCallback(trainer, f"{directory}/run", save_every=save_every, strict=True)
    trainer.add_callback(callback)
    trainer.train()
