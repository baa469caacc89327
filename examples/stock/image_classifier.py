"""``image_classifier.py`` with a resume of its own: ``torch.save`` at each epoch's end.

It follows PyTorch's tutorial "Saving and Loading a General Checkpoint" and its ImageNet example.

Prove: resumekit prove --at step:80 -- python examples/stock/image_classifier.py --dir {dir}
"""

from __future__ import annotations

import argparse
import os
import random
import shutil

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

NUM_TRAIN = 1500


class Digits(Dataset):
    """8 x 8 images; those for training are shifted and get noise."""

    def __init__(self, train):
        digits = load_digits()
        part = slice(None, NUM_TRAIN) if train else slice(NUM_TRAIN, None)
        self.images = torch.tensor(digits.images[part], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target[part])
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            shift = (random.randint(-1, 1), random.randint(-1, 1))
            image = torch.roll(image, shift, dims=(1, 2)) + 0.1 * torch.randn_like(image)
        return image, self.labels[index]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for images, labels in loader:
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
    model.train()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/image_classifier")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader = DataLoader(
        Digits(train=True), batch_size=64, shuffle=True, num_workers=args.workers
    )
    test_loader = DataLoader(Digits(train=False), batch_size=297)

    model = make_model().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    num_steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)

    os.makedirs(args.dir, exist_ok=True)
    path = os.path.join(args.dir, "checkpoint.pt")
    start_epoch, best_accuracy = 0, 0.0
    if os.path.isfile(path):
        checkpoint = torch.load(path, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        ema.load_state_dict(checkpoint["ema"])
        start_epoch, best_accuracy = checkpoint["epoch"], checkpoint["best_accuracy"]
    for epoch in range(start_epoch, args.epochs):
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
        accuracy = evaluate(ema, test_loader, device)
        is_best = accuracy > best_accuracy
        best_accuracy = max(accuracy, best_accuracy)
        checkpoint = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "ema": ema.state_dict(),
            "best_accuracy": best_accuracy,
        }
        torch.save(checkpoint, path)
        if is_best:
            shutil.copyfile(path, os.path.join(args.dir, "best.pt"))
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
