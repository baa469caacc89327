"""A rank that dies in the first attempt of a job, for ``torchrun --max-restarts``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed import barrier, destroy_process_group
from workloads import train

from resumekit.record.moments import launch_directory
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE

if __name__ == "__main__":
    directory, traces, kill = sys.argv[1:]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    os.environ[TRACE_VARIABLE] = str(launch_directory(Path(traces), attempt))
    if attempt == 0 and os.environ["RANK"] == "1":
        os.environ[KILL_VARIABLE] = kill
    train(directory, dropout=True, save_every=3)
    # A thread of gloo that outlives the interpreter may abort it: one attempt more, of a run that
    # is at its end.
    barrier()
    destroy_process_group()
