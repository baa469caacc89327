"""What a run is made of, and what has changed since a checkpoint was written."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch

import resumekit
from resumekit.capture.git import repository_state
from resumekit.capture.secrets import without_secrets
from resumekit.state import StateComponent

# A value under this name, at any depth, shapes how long the run is.
HORIZON = "horizon"


class Severity(str, Enum):
    """What a difference means for a resume."""

    HORIZON = "horizon"  # refused, unless allow_changes names it
    TOLD = "told"  # the checkpoint's value is used where it is state; the user is told


@dataclass(frozen=True)
class Difference:
    """One setting that is not what it was.

    Args:
        name: its dotted name in the fingerprint.
        then: the checkpoint's value, None where it has none.
        now: this run's value, None where it has none.
        severity: what it means for a resume.
    """

    name: str
    then: Any
    now: Any
    severity: Severity

    def __str__(self) -> str:
        return f"{self.name}: was {self.then}, now {self.now}"


def fingerprint(
    *,
    world_size: int,
    components: Iterable[StateComponent] = (),
    settings: Mapping[str, Any] | None = None,
    record_command: bool = True,
) -> dict[str, Any]:
    """What describes this run, in plain values that JSON can hold.

    Take it when the run starts, before anything is loaded: a load brings old settings back.

    Args:
        world_size: the number of ranks.
        components: the run's state; a stateful with a method ``fingerprint()`` adds its own.
        settings: more to compare. What stands under a key ``"horizon"`` is how long the run is.
        record_command: whether the command line is part of it; secrets in it are ``***``.
    """
    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "resumekit": resumekit.__version__,
        },
        "git": repository_state(),
        "world_size": world_size,
    }
    if record_command:
        found["command"] = without_secrets(sys.argv)
    for component in components:
        described = component.state.fingerprint()
        if described is not None:
            found[component.key] = described
    return {key: plain(value) for key, value in {**found, **(settings or {})}.items()}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Every setting that differs, by name.

    Args:
        then: the fingerprint in the checkpoint.
        now: the fingerprint of this run.
    """
    return tuple(_differences("", plain(then), plain(now), Severity.TOLD))


def plain(value: Any) -> Any:
    """A value as JSON holds it: tensors as numbers, what has no plain form by its type's name."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist()) if value.numel() <= 16 else f"<Tensor {tuple(value.shape)}>"
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return f"<{type(value).__name__}>"


def _differences(name: str, then: Any, now: Any, severity: Severity) -> Iterator[Difference]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            inner = Severity.HORIZON if key == HORIZON else severity
            yield from _differences(
                f"{name}.{key}" if name else key, then.get(key), now.get(key), inner
            )
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (each, partner) in enumerate(zip(then, now, strict=True)):
            yield from _differences(f"{name}[{index}]", each, partner, severity)
    elif then != now:
        yield Difference(name, then, now, severity)
