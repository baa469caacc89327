"""Files that run code when they are unpickled, and a trap that notices it."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

_FORBIDDEN = frozenset(
    {
        "pickle.find_class",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "subprocess.Popen",
    }
)


class _Trap:
    """Pickles to a call of a function that leaves a marker behind."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def hostile_files(marker: Path) -> dict[str, bytes]:
    """Contents that make ``marker`` when somebody unpickles them, by the kind of file."""
    shell = f"touch {marker}"
    source = f"open({str(marker)!r}, 'w').close()"
    traps = {
        "os.system": _Trap(os.system, shell),
        "exec": _Trap(builtins.exec, source),
        "eval": _Trap(builtins.eval, source),
        "subprocess": _Trap(subprocess.call, ["touch", str(marker)]),
    }
    files = {
        f"raw pickle, protocol {protocol}, {name}": pickle.dumps(trap, protocol)
        for name, trap in traps.items()
        for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)
    }
    for name, trap in traps.items():
        files[f"torch zip, {name}"] = _torch_file(trap, zipped=True)
        files[f"torch legacy file, {name}"] = _torch_file(trap, zipped=False)
        files[f"npy of objects, {name}"] = _numpy_file(trap)
    files["pickle after valid JSON"] = b"{}\n" + pickle.dumps(traps["os.system"])
    return files


def run_hostile(name: str, content: bytes) -> None:
    """Loads such a file the way careless code would; shows that the file is a real one."""
    stream = io.BytesIO(content)
    if name.startswith("torch"):
        torch.load(stream, weights_only=False)
    elif name.startswith("npy"):
        np.load(stream, allow_pickle=True)
    else:
        stream.seek(content.index(b"\n") + 1 if name.startswith("pickle after") else 0)
        pickle.load(stream)  # noqa: S301 - the negative control must run it


class Watch:
    """Writes down what Python reports of unpickling and of starting processes."""

    def __init__(self) -> None:
        self._armed = False
        self._marker = ""
        self.events: list[str] = []
        sys.addaudithook(self._hook)  # for the life of the process: hooks cannot be taken back

    @contextmanager
    def over(self, marker: Path) -> Iterator[list[str]]:
        """Gives the list that forbidden events are added to while the block runs."""
        self.events = []
        self._marker = marker.name
        self._armed = True
        try:
            yield self.events
        finally:
            self._armed = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed or _is_own(event, arguments):
            return
        if event in _FORBIDDEN or self._runs_marker(event, arguments):
            self.events.append(f"{event} {arguments!r}"[:200])

    def _runs_marker(self, event: str, arguments: tuple[Any, ...]) -> bool:
        # Ordinary imports raise "exec" too; only code that names the marker is the trap's.
        if event != "exec" or not isinstance(arguments[0], CodeType):
            return False
        return any(self._marker in str(constant) for constant in arguments[0].co_consts)


def _is_own(event: str, arguments: tuple[Any, ...]) -> bool:
    # A resume asks git for the commit of the running script.
    return event == "subprocess.Popen" and arguments[0] == "git"


def _torch_file(value: object, *, zipped: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(
        {"model": torch.zeros(3), "trap": value}, stream, _use_new_zipfile_serialization=zipped
    )
    return stream.getvalue()


def _numpy_file(value: object) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([value], dtype=object), allow_pickle=True)
    return stream.getvalue()
