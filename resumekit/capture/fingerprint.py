"""What describes a run (versions, commit, command line, settings) and what changed since."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resumekit.state import StateComponent
from resumekit.version import __version__

# A value under this name, at any depth, is the length of the run.
HORIZON = "horizon"

# A slow file system must not delay a job for a line of a report.
_LIMIT_SECONDS = 5.0

HIDDEN = "***"

# As whole words of a name: --hf_token, --api-key, --wandb.apiKey, AWS_SECRET_ACCESS_KEY. Plurals
# are not among them: --max_tokens and --num_keys are settings.
_WORDS = frozenset(
    {"token", "key", "apikey", "password", "passwd", "passphrase", "pwd", "secret", "credential"}
    | {"credentials", "secrets", "auth", "accesskey", "secretkey", "authtoken"}
)
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/?#\s]*@")
_QUERY = re.compile(r"(?P<name>[?&;][^=?&;#\s]+)=(?P<value>[^&;#\s]*)")
_TOKENS = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA)[A-Za-z0-9_\-]{12,}"
)
_HEADER = re.compile(r"\b(?P<kind>bearer|basic)\s+\S+", re.IGNORECASE)
_JSON = re.compile(r"(?P<name>[\w.-]+)(?P<between>[\"']?\s*:\s*[\"'])[^\"']*")
_ASSIGNED = re.compile(r"(?P<name>[^=\s:/?]+)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)


class Severity(str, Enum):
    """What a difference means for a resume."""

    HORIZON = "horizon"  # refused, unless allow_changes names it
    REPORTED = "reported"  # logged; where the value is state, the checkpoint's is used


@dataclass(frozen=True)
class SettingChange:
    """One setting that has changed.

    Args:
        name: its dotted name in the fingerprint.
        then: the checkpoint's value, None where it has none.
        now: this run's value, None where it has none.
        severity: its effect on a resume.
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
    """The description of this run in JSON values.

    Call it when the run starts, before anything is loaded: a load restores old settings.

    Args:
        world_size: the number of ranks.
        components: the run's state; each adds its own ``fingerprint()``.
        settings: more to compare; a value under a key ``"horizon"`` is the length of the run.
        record_command: whether the command line is part of it; secrets in it are ``***``.
    """
    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "resumekit": __version__,
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


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Every setting that differs, by name.

    Args:
        then: the fingerprint in the checkpoint.
        now: the fingerprint of this run.
    """
    return tuple(_differences("", plain(then), plain(now), Severity.REPORTED))


def plain(value: Any) -> Any:
    """A JSON value: tensors as numbers, dtypes as text, other objects as the name of their type."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist()) if value.numel() <= 16 else f"<Tensor {tuple(value.shape)}>"
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return f"<{type(value).__name__}>"


def _differences(name: str, then: Any, now: Any, severity: Severity) -> Iterator[SettingChange]:
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
        yield SettingChange(name, then, now, severity)


def repository_state(script: Path | None = None) -> dict[str, object] | None:
    """The commit of the repository around a script, and whether tracked files differ from it.

    Args:
        script: a file of the repository; by default the program that is running.

    Returns:
        ``{"commit", "dirty"}``, or None without git, without a repository or without a script.
    """
    script = script or _running_script()
    if script is None:
        return None
    commit = _git(script.parent, "rev-parse", "HEAD")
    if not commit:
        return None
    status = _git(script.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _running_script() -> Path | None:
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(name).resolve() if name else None


def _git(directory: Path, *arguments: str) -> str | None:
    # GIT_OPTIONAL_LOCKS: looking at a repository must not write into it.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_secrets(words: Iterable[str]) -> list[str]:
    """A command line whose secrets are ``***``.

    A value is hidden when its option is named like a secret, when it is a URL with user
    information, or when it looks like a token of a well-known service. The value of an option
    follows ``=``, or is the next word unless that is an option.

    Args:
        words: as in ``sys.argv``.
    """
    found, hides_next = [], False
    for word in words:
        is_option = _OPTION.fullmatch(word) is not None
        if hides_next and not is_option:
            found.append(HIDDEN)
            hides_next = False
            continue
        assigned = _ASSIGNED.fullmatch(word)
        if assigned is not None and is_secret_name(assigned["name"]):
            found.append(f"{assigned['name']}={HIDDEN}")
        else:
            found.append(_without_tokens(word))
        hides_next = is_option and assigned is None and is_secret_name(word)
    return found


def is_secret_name(name: str) -> bool:
    """Whether an option, a variable or an attribute of this name holds a secret.

    Args:
        name: e.g. ``--hf_token``, ``wandb.apiKey`` or ``OPENAI_API_KEY``.
    """
    return any(part.lower() in _WORDS for part in _PARTS.findall(name))


def _without_tokens(word: str) -> str:
    word = _USER_INFO.sub(rf"\g<scheme>{HIDDEN}@", word)
    word = _QUERY.sub(
        lambda m: f"{m['name']}={HIDDEN if is_secret_name(m['name']) else m['value']}", word
    )
    word = _JSON.sub(
        lambda m: f"{m['name']}{m['between']}{HIDDEN}" if is_secret_name(m["name"]) else m[0], word
    )
    word = _HEADER.sub(rf"\g<kind> {HIDDEN}", word)
    return _TOKENS.sub(HIDDEN, word)
