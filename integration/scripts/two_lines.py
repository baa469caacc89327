"""Digits with plain PyTorch and the Checkpointer's two lines; nothing is passed, no ``step()``.

``--case module`` trains at module level, ``class`` in a trainer object, ``gan`` two networks in
dicts, ``scaler`` with gradient accumulation, an average and a scaler that skips steps, ``ddp`` on
several ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from judged_script import arguments, record
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from resumekit.adapters.torch import Checkpointer

args = arguments("case")
digits = load_digits()
images = torch.tensor(digits.images[:512], dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target[:512])
dataset = TensorDataset(images, labels)
options: dict[str, Any] = {"save_every": 3, "strict": args.strict}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


class Trainer:
    """Keeps all in attributes."""

    def __init__(self) -> None:
        self.model = network()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 20)
        self.loader = DataLoader(dataset, batch_size=64, shuffle=True)

    def fit(self) -> None:
        checkpointer = Checkpointer(args.directory, **options)
        for _ in checkpointer.epochs(2):
            for inputs, targets in checkpointer.batches(self.loader):
                loss = self.step(inputs, targets)
                record(
                    checkpointer.progress.step + 1, loss=loss, optimizers=self.opt, inputs=inputs
                )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        return loss


def train_two() -> None:
    nets = {"gen": nn.Linear(8, 64), "disc": nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 1))}
    opts = {name: torch.optim.Adam(net.parameters(), lr=1e-3) for name, net in nets.items()}
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    checkpointer = Checkpointer(args.directory, **options)
    for real, _ in checkpointer.batches(loader, epochs=2):
        fake = nets["gen"](torch.randn(len(real), 8))
        judged = nets["disc"](real).mean() - nets["disc"](fake.detach()).mean()
        opts["disc"].zero_grad()
        judged.backward()
        opts["disc"].step()
        loss = nets["disc"](fake).mean()
        opts["gen"].zero_grad()
        loss.backward()
        opts["gen"].step()
        record(checkpointer.progress.step + 1, loss=loss, optimizers=[*opts.values()], inputs=real)


def train_scaled() -> None:
    net = network()
    opt = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    average = torch.optim.swa_utils.AveragedModel(net)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    checkpointer = Checkpointer(args.directory, **options)
    for inputs, targets in checkpointer.batches(loader, epochs=1):
        loss = nn.functional.cross_entropy(net(inputs), targets) * 16  # overflows at first
        scaler.scale(loss).backward()
        if checkpointer.progress.micro_step % 2 == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            average.update_parameters(net)
            state = {"scale": scaler.get_scale(), "average": [*average.parameters()]}
            step = checkpointer.progress.step + 1
            record(step, loss=loss, optimizers=opt, inputs=inputs, state=state)


def train_ddp() -> None:
    torch.distributed.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(network())
    torch.manual_seed(torch.distributed.get_rank())
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    checkpointer = Checkpointer(args.directory, **options)
    for epoch in checkpointer.epochs(2):
        sampler.set_epoch(epoch)
        for inputs, targets in checkpointer.batches(loader):
            loss = nn.functional.cross_entropy(net(inputs), targets)
            opt.zero_grad()
            loss.backward()
            opt.step()
            record(checkpointer.progress.step + 1, loss=loss, optimizers=opt, inputs=inputs)
    torch.distributed.destroy_process_group()


torch.manual_seed(0)
if args.case == "class":
    Trainer().fit()
elif args.case == "gan":
    train_two()
elif args.case == "scaler":
    train_scaled()
elif args.case == "ddp":
    train_ddp()
else:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    train_loader = DataLoader(dataset, batch_size=64, shuffle=True)
    ckpt = Checkpointer(args.directory, **options)
    for inputs, targets in ckpt.batches(train_loader, epochs=2):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        record(ckpt.progress.step + 1, loss=loss, optimizers=optimizer, inputs=inputs)
