"""Settings of the process that training changes: no checkpoint has them, and each is reported."""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any

import numpy as np
import torch

from resumekit.record.conditions import float32_precisions
from resumekit.state import CaptureLine, Fidelity

_BACKENDS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "opt_einsum.enabled"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)

# What decides results: each by what reads it.
_SETTINGS: Mapping[str, Callable[[], Any]] = {
    "os.getcwd()": os.getcwd,
    "decimal.getcontext().prec": lambda: decimal.getcontext().prec,
    "decimal.getcontext().rounding": lambda: decimal.getcontext().rounding,
    "numpy.geterr()": np.geterr,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (
        torch.backends.cuda.mem_efficient_sdp_enabled
    ),
    **{f"torch.backends.{name}": partial(attrgetter(name), torch.backends) for name in _BACKENDS},
}


class ProcessSettings:
    """The settings, and the environment variables, as they are when this is made."""

    def __init__(self) -> None:
        self._values = _read()
        self._environment = dict(os.environ)

    def lines(self, code: Iterable[CodeType]) -> Iterator[CaptureLine]:
        """A line for each one that has changed since.

        Args:
            code: of the user's; only the environment variables that it names are looked at.
        """
        for name, now in _read().items():
            value = self._values[name]
            if now != value:
                reason = f"training changed it from {value} to {now}; set it before the loop"
                yield CaptureLine(name, Fidelity.LOST, reason)
        changed = {name for name, _ in self._environment.items() ^ os.environ.items()}
        named = {text for each in code for text in _texts_in(each)} if changed else set()
        for name in sorted(changed & named):
            reason = "training changed this environment variable; keep the value in a variable"
            yield CaptureLine(f"os.environ.{name}", Fidelity.LOST, reason)


def _read() -> dict[str, Any]:
    return {**{name: read() for name, read in _SETTINGS.items()}, **float32_precisions()}


def _texts_in(code: CodeType) -> Iterator[str]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _texts_in(each)
        elif isinstance(each, str):
            yield each
