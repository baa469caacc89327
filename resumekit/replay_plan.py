"""What a process is to replay: written by ``resumekit replay``, read where a run begins."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "RESUMEKIT_REPLAY"


@dataclass(frozen=True)
class ReplayPlan:
    """The steps of a run that are repeated, and where.

    Args:
        directory: the run directory, which is only read.
        scratch: a run directory with the one checkpoint to begin from; it is used instead.
        last_step: the process ends after this step; None: when the script ends.
        saved_steps: a checkpoint is saved after these steps, and after no other ones.
        until_differs: the process ends after the first step that is not as the journal has it.
    """

    directory: str
    scratch: str
    last_step: int | None
    saved_steps: tuple[int, ...] = ()
    until_differs: bool = False

    def to_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def for_run(cls, directory: Path) -> ReplayPlan | None:
        """The plan for a run in this directory; None when it is not being replayed."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        content = json.loads(text)
        plan = cls(**{**content, "saved_steps": tuple(content["saved_steps"])})
        is_this = os.path.realpath(directory) == os.path.realpath(plan.directory)
        return plan if is_this else None
