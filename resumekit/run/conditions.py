"""The conditions under which an attempt trains, for the header of its journal."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import resumekit
from resumekit.journal import COMMAND

_LIBRARIES = (
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "datasets",
    "trl",
    "peft",
)
_MAX_SOURCES = 64
_INSTALLED = ("site-packages", "dist-packages")
_SHORT = 8  # hexadecimal digits of a digest in a header


def code() -> dict[str, str]:
    """Digests of the user's source files that are loaded, by path, and of the command line.

    Without a file behind the program (a notebook, a shell) nothing equals what ran before.
    """
    found = {COMMAND: short_digest(json.dumps(sys.argv).encode())}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        found["<interactive>"] = os.urandom(_SHORT // 2).hex()
        return found
    root = Path(main).resolve().parent
    for path in sorted(_own_sources())[:_MAX_SOURCES]:
        try:
            content = Path(path).read_bytes()
        except OSError:
            continue
        found[os.path.relpath(path, root)] = short_digest(content)
    return found


def _own_sources() -> set[str]:
    standard = os.path.dirname(os.__file__)
    here = os.path.dirname(os.path.abspath(resumekit.__file__))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {
        os.path.abspath(name)
        for name in files
        if name
        and name.endswith(".py")
        and not name.startswith((standard + os.sep, here + os.sep))
        and not any(folder in name for folder in _INSTALLED)
    }


def environment(optimizers: Iterable[Any]) -> dict[str, Any]:
    """What the bits of a loss depend on beside code and data."""
    devices = {
        parameter.device.type
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, torch.Tensor)
    }
    device = "+".join(sorted(devices)) or "cpu"
    if "cuda" in devices:
        device = f"cuda ({torch.cuda.get_device_name()})"
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "processor": _processor(),
        **_versions(),
    }


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "numpy": np.__version__,
        "resumekit": resumekit.__version__,
    }
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


@cache
def _processor() -> str:
    """Its vector instructions decide the order of sums."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} {capability}"


def settings(fingerprint: Mapping[str, Any]) -> str:
    """A digest of the components' settings as the script gives them."""
    others = ("versions", "git", "command", "world_size")
    kept = {name: value for name, value in fingerprint.items() if name not in others}
    return short_digest(json.dumps(kept, sort_keys=True, default=str).encode())


def short_digest(content: bytes) -> str:
    """A digest that is long enough to see a change."""
    return xxhash.xxh3_64_hexdigest(content)[:_SHORT]
