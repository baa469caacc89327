"""Chosen places to kill at, as a user writes them: ``step:35``, ``checkpoint:40``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resumekit.errors import ConfigurationError

_PATTERN = re.compile(r"(step|checkpoint):(\d+)(?::(SIG[A-Z0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class KillPlace:
    """Right after one record of a trace was written; the process that wrote it kills itself.

    Args:
        event: ``step``: the step was recorded, and nothing that follows it has happened;
            ``checkpoint``: that checkpoint was committed.
        step: the optimizer step.
        signal: the name of the signal that it sends itself.
    """

    event: str
    step: int
    signal: str = "SIGKILL"

    @classmethod
    def parse(cls, text: str, *, where: str) -> KillPlace:
        """The place that a text names.

        Args:
            text: what the user wrote.
            where: the option or variable it was written in.

        Raises:
            ConfigurationError: it names no place.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                where, found=repr(text), expected="'step:<n>' or 'checkpoint:<n>'"
            )
        return cls(match[1], int(match[2]), match[3] or "SIGKILL")

    def is_behind(self, saved: int) -> bool:
        """Whether a run that is killed here has the checkpoint of step ``saved`` already."""
        # A step is recorded before it is saved.
        return self.step > saved or (self.event == "checkpoint" and self.step == saved)

    def __str__(self) -> str:
        place = f"{self.event}:{self.step}"
        return place if self.signal == "SIGKILL" else f"{place}:{self.signal}"
