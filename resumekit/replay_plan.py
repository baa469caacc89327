"""What a run does otherwise: ``resumekit replay`` or ``doctor`` says it, and a run reads it."""

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
        directory: the run directory, which is only read; None for whichever the script has.
        scratch: a run directory with the one checkpoint to begin from, or empty; it is used
            instead.
        last_step: the process ends after this step; None: when the script ends.
        saved_steps: a checkpoint is saved after these steps, and after no other ones.
        until_differs: the process ends after the first step that is not as the journal has it.
    """

    directory: str | None
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
        if plan.directory is None:
            return plan
        is_this = os.path.realpath(directory) == os.path.realpath(plan.directory)
        return plan if is_this else None
