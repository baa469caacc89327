"""A residual network, after PyTorch's official example ``imagenet/main.py``.

It saves after each epoch, and keeps the best. Its own resume: ``--resume``.
"""

from __future__ import annotations

import argparse
import os
import shutil

import torch
from small_data import NUM_CLASSES, images
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class FlippedImages(Dataset):
    def __init__(self, pixels, labels):
        self.pixels, self.labels = pixels, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.pixels[index]
        return image.flip(2) if torch.rand(1) < 0.5 else image, self.labels[index]


def train(train_loader, model, criterion, optimizer):
    model.train()
    for inputs, target in train_loader:
        loss = criterion(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model):
    model.eval()
    with torch.no_grad():
        correct = [
            (model(inputs).argmax(1) == target).sum().item() for inputs, target in val_loader
        ]
    return sum(correct)


def save_checkpoint(state, is_best, directory):
    filename = os.path.join(directory, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(directory, "model_best.pth.tar"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--workers", default=2, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--output", default=".")
    parser.add_argument("--resume", default="", help="path to the latest checkpoint")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        BasicBlock(8),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, NUM_CLASSES),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    start_epoch, best_acc1 = 0, 0
    if args.resume:
        if os.path.isfile(args.resume):
            checkpoint = torch.load(args.resume)
            start_epoch = checkpoint["epoch"]
            best_acc1 = checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")
        else:
            print(f"=> no checkpoint found at '{args.resume}'")

    pixels, labels = images(64)
    train_loader = DataLoader(
        FlippedImages(pixels[:48], labels[:48]),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
    )
    val_loader = DataLoader(TensorDataset(pixels[48:], labels[48:]), batch_size=args.batch_size)

    for epoch in range(start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer)
        acc1 = validate(val_loader, model)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc1": best_acc1,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        save_checkpoint(state, is_best, args.output)


if __name__ == "__main__":
    main()
