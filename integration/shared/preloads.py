"""What a warm server imports once for all its launches, by the framework that they train under.

Each names what the framework imports by itself, at the latest in its first step. None names more: a
resume that works only where another framework was imported must fail.
"""

from __future__ import annotations

from importlib.util import find_spec

from resumekit.testing import DEFAULT_PRELOAD

_BASE = (*DEFAULT_PRELOAD, "sklearn.datasets")
_STATEFUL = "torchdata.stateful_dataloader"
_ENGINE = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # for the first engine, as the next
    "torch.utils.cpp_extension",
)
_ASKED_FOR = tuple(name for name in ("deepspeed", "datasets") if find_spec(name))

SHARDED = ("torch.distributed.fsdp", "torch.distributed.checkpoint")
TORCH = (*_BASE, "resumekit.adapters.torch")
DEEPSPEED = (*_BASE, *_ENGINE, "resumekit.adapters.deepspeed")
ACCELERATE = (
    *_BASE,
    _STATEFUL,
    "accelerate",
    "resumekit.adapters.accelerate",
)
# The Trainer asks of every model whether it is an engine, and of every dataset whose it is.
TRAINER = (
    *_BASE,
    *_ASKED_FOR,
    _STATEFUL,
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "resumekit.adapters.transformers",
)
LIGHTNING = (*_BASE, "lightning.pytorch", "resumekit.adapters.lightning")
