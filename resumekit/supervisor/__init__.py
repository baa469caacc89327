"""``resumekit run``: runs a command that nobody changed, and restarts it after a crash."""

from __future__ import annotations

from resumekit.supervisor.policy import Decision, RestartPolicy
from resumekit.supervisor.supervisor import Supervisor

__all__ = ["Decision", "RestartPolicy", "Supervisor"]
