"""State that a framework keeps for its own loop: under another one it is left out, and told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resumekit.state import StateComponent
from resumekit.storage import Manifest

_DETAIL = "frameworks"


def owners(components: Sequence[StateComponent]) -> dict[str, Any]:
    """What a manifest's details tell of it: the framework by component key; nothing without any."""
    found = {each.key: each.framework for each in components if each.framework}
    return {_DETAIL: found} if found else {}


def of_other_frameworks(manifest: Manifest, components: Sequence[StateComponent]) -> dict[str, str]:
    """The saved components that only a framework needs which this run does not use, and its name.

    Args:
        manifest: of the checkpoint; an older one does not tell frameworks, and nothing is found.
        components: of this run.
    """
    used = frameworks_in(components)
    live = {component.key for component in components}
    saved = {record.key for record in manifest.components}
    return {
        key: framework
        for key, framework in _recorded(manifest).items()
        if key in saved - live and framework not in used
    }


def frameworks_in(components: Sequence[StateComponent]) -> frozenset[str]:
    """The frameworks that keep some of the components for their own loop."""
    return frozenset(each.framework for each in components if each.framework)


def frameworks_of(manifest: Manifest) -> frozenset[str]:
    """The frameworks whose own loop wrote the checkpoint; none for plain PyTorch."""
    return frozenset(_recorded(manifest).values())


def _recorded(manifest: Manifest) -> dict[str, str]:
    recorded = manifest.details.get(_DETAIL)
    found = recorded if isinstance(recorded, Mapping) else {}
    return {key: str(framework) for key, framework in found.items()}


def is_empty(state: Any) -> bool:
    """Whether there is nothing in a state, however its containers are nested."""
    if isinstance(state, Mapping):
        return all(map(is_empty, state.values()))
    return isinstance(state, (list, tuple)) and not state


def not_needed(manifest: Manifest, others: Mapping[str, str]) -> tuple[str, ...]:
    """What to tell about them."""
    return tuple(
        f"{manifest.name} has {key}, which belongs to {framework}: not needed here"
        for key, framework in sorted(others.items())
    )
