"""The data of the training functions: a part of scikit-learn's handwritten digits."""

from __future__ import annotations

import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """The first digits; with ``augment`` samples draw from all three global generators."""

    def __init__(self, num_samples: int, *, augment: bool) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[:num_samples], dtype=torch.float32).flatten(1) / 16
        self.labels = [int(label) for label in digits.target[:num_samples]]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.augment:
            image = image * (0.9 + 0.2 * random.random()) + 0.01 * torch.randn(image.shape)
            image = image + float(np.random.normal(scale=0.01))
        return image, self.labels[index]
