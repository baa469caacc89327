"""Training jobs that resume exactly where they stopped, from one framework-neutral checkpoint.

The import path names the framework: ``from resumekit.adapters.torch import Checkpointer``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from resumekit.version import __version__

if TYPE_CHECKING:
    from resumekit.checkpointer import BestCheckpoint, Checkpointer
    from resumekit.errors import ResumekitError
    from resumekit.places.place import Place
    from resumekit.record.trace import trace
    from resumekit.run.progress import Progress
    from resumekit.run.report import ResumeReport
    from resumekit.state import Fidelity, SharingPattern, StateComponent, Stateful

__all__ = [
    "BestCheckpoint",
    "Checkpointer",
    "Fidelity",
    "Place",
    "Progress",
    "ResumeReport",
    "ResumekitError",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "__version__",
    "trace",
]

# Loaded on first use: the command line and the package `storage` start without loading torch.
_HOMES = {
    "BestCheckpoint": "resumekit.checkpointer",
    "Checkpointer": "resumekit.checkpointer",
    "Fidelity": "resumekit.state",
    "Place": "resumekit.places.place",
    "Progress": "resumekit.run.progress",
    "ResumeReport": "resumekit.run.report",
    "ResumekitError": "resumekit.errors",
    "SharingPattern": "resumekit.state",
    "StateComponent": "resumekit.state",
    "Stateful": "resumekit.state",
    "trace": "resumekit.record.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
