"""Paths of user state: ``model.0.count`` is the attribute ``count`` of the module ``0``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resumekit.state import Renaming

# In the path of a module that the checkpoint has and the run does not have.
_NOT_HERE = "<checkpoint>"


def is_below(path: str, names: Iterable[str]) -> bool:
    """Whether a path is that of a holder of one of these names, or leads through one."""
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in names)


def moved_state(
    state: Mapping[str, Any], holders: Iterable[str], renaming: Renaming
) -> dict[str, Any]:
    """A saved user state whose attributes have followed their modules.

    Args:
        state: of the component.
        holders: the names of the models in it.
        renaming: of the parameters in these models.
    """
    names = list(holders)

    def moved(path: str) -> str:
        return _moved(path, names, renaming)

    return {
        **state,
        "slots": [[moved(entry[0]), *entry[1:]] for entry in state["slots"]],
        "first": {moved(path): digest for path, digest in state["first"].items()},
        "lost": [moved(path) for path in state["lost"]],
    }


def _moved(path: str, holders: Iterable[str], renaming: Renaming) -> str:
    for holder in holders:
        if path == holder or path.startswith(f"{holder}."):
            below = path[len(holder) + 1 :]
            found = renaming.path(below)
            found = f"{_NOT_HERE}.{below}" if found is None else found
            return f"{holder}.{found}".removesuffix(".")
    return path
