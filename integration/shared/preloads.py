"""What a warm server imports once for all its launches, by the framework that they train under.

Each names what the framework imports by itself, at the latest in its first step. None names more: a
resume that works only where another framework was imported must fail.
"""

from __future__ import annotations

from importlib.util import find_spec

from resumekit.testing import DEFAULT_PRELOAD

_BASE = ("no_power_cut", *DEFAULT_PRELOAD, "sklearn.datasets")
_STATEFUL = "torchdata.stateful_dataloader"
_ENGINE = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # for the first engine, as the next
    "torch.utils.cpp_extension",
)
_DATASETS = ("datasets",) if find_spec("datasets") else ()
_DEEPSPEED = ("deepspeed",) if find_spec("deepspeed") else ()
_SHARDED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


TORCH = (*_BASE, *_SHARDED, "resumekit.adapters.torch")
DEEPSPEED = (*_BASE, *_ENGINE, "resumekit.adapters.deepspeed", "resumekit.adapters.torch")
ACCELERATE = (
    *_BASE,
    _STATEFUL,
    *_DATASETS,  # of several ranks each looks what the batches are
    "accelerate",
    "resumekit.adapters.accelerate",
)
# The Trainer asks of every model whether it is an engine, and of every dataset whose it is.
TRAINER = (
    *_BASE,
    *_SHARDED,
    *_DEEPSPEED,
    *_DATASETS,
    _STATEFUL,
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "resumekit.adapters.transformers",
)
LIGHTNING = (*_BASE, "lightning.pytorch", "lightning.fabric", "resumekit.adapters.lightning")
# For tests of what frameworks have in common.
ALL = (*TORCH, *ACCELERATE, *TRAINER, *LIGHTNING, *DEEPSPEED)
