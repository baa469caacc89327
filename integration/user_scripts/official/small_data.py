"""Small random data in place of the data sets that the official examples download.

They are drawn from generators of their own: the examples' seeds draw as if they had downloaded.
"""

from __future__ import annotations

import random

import torch

WORDS = [f"word{index}" for index in range(59)]
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
VOCABULARY_SIZE = len(WORDS) + len(SPECIAL_TOKENS)
NUM_CLASSES = 10


def sentences(count, num_words=12):
    """Strings of random words, of different lengths."""
    generator = random.Random(0)
    lengths = [generator.randint(num_words // 2, num_words) for _ in range(count)]
    return [" ".join(generator.choices(WORDS, k=length)) for length in lengths]


def word_tokenizer():
    """A tokenizer of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def images(count):
    """Noisy images with one channel of 8 x 8 pixels, and their classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, 8, 8, generator=generator)
    return noise + labels.view(-1, 1, 1, 1) / NUM_CLASSES, labels
