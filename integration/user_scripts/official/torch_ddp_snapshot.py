"""Training on several ranks with snapshots, after PyTorch's tutorial ``multigpu_torchrun.py``.

    torchrun --nproc-per-node=2 torch_ddp_snapshot.py --snapshot_path snapshot.pt

Its own resume: the snapshot of the last epoch, which the constructor loads.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DistributedDataParallel(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at epoch {self.epochs_run}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_epochs", type=int, default=5)
    parser.add_argument("--save_every", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    args = parser.parse_args()

    init_process_group("gloo")
    torch.manual_seed(0)
    train_set = MyTrainDataset(64)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train_data = DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=False,
        sampler=DistributedSampler(train_set),
    )
    Trainer(model, train_data, optimizer, args.save_every, args.snapshot_path).train(
        args.total_epochs
    )
    destroy_process_group()


if __name__ == "__main__":
    main()
