"""The only rank of a job of DeepSpeed, for tests that need an engine and no launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resumekit.testing.launchers import free_port

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

DEPRECATIONS = [
    # deepspeed 0.19 zero/muon/original_muon.py compiles when it is imported, and that imports what
    # torch 2.13 itself has deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    # torch 2.13 distributed_c10d.py renamed functions that deepspeed 0.19 comm/torch.py calls.
    pytest.mark.filterwarnings("ignore:.torch.distributed.* is deprecated:FutureWarning"),
]


@contextmanager
def one_rank() -> Iterator[None]:
    """This process is all of its job; an engine that is made in it also asks for LOCAL_RANK."""
    import deepspeed

    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(_LAUNCHED, ("0", "0", "1", "127.0.0.1", free_port()), strict=True):
            patch.setenv(name, str(value))
        deepspeed.init_distributed("gloo")
    try:
        yield
    finally:
        deepspeed.comm.destroy_process_group()  # and the groups that deepspeed remembers
