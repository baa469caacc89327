"""The GPUs that this process uses: which they are, and that they have done what was launched."""

from __future__ import annotations

import torch


def used_gpus() -> list[int]:
    """The CUDA devices on which this process has a context, by index; it creates none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch 2.13
        return []
    # torch 2.13 c10/cuda/CUDAFunctions.h hasPrimaryContext, which torch asks before it pins memory.
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # noqa: SLF001  # has no public name
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def wait_for_gpus() -> None:
    """Waits until all used GPUs have done what was launched, on whichever stream.

    Only then does host memory hold what was copied to it with ``non_blocking=True``.
    """
    for index in used_gpus():
        torch.cuda.synchronize(index)
