"""Copied as ``sitecustomize.py``: activates what a variable lists, each after its module's import.

Python imports it before the program, in every process. It needs only the standard library, runs
the ``sitecustomize`` that it hides, and never stops a process: what fails is one line on stderr.
Of several copies on the path one acts, because the newest list has the activations of all.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LIST_NAME = "activations.json"

_VARIABLE = "PYTHONRESUMEKIT"


def run_hidden_sitecustomize() -> None:
    """Imports the ``sitecustomize`` that would have been imported without this one."""
    others = [path for path in sys.path if not Path(path, LIST_NAME).is_file()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules that activations wait for, and calls these once a module was executed.

    Args:
        activations: as listed by the launcher.
    """

    def __init__(self, activations: list[dict[str, Any]]) -> None:
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        self._finding: set[str] = set()
        for each in activations:
            self._waiting.setdefault(each["after"], []).append(each)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec as the other finders give it, its loader extended."""
        if fullname not in self._waiting or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader, fullname)
        return spec

    def _extend(self, loader: Any, name: str) -> None:
        # The loader itself stays: other code asks it for sources and resources.
        execute: Callable[[ModuleType], None] = loader.exec_module

        def execute_and_activate(module: ModuleType) -> None:
            execute(module)
            for each in self._waiting.pop(name, ()):
                _activate(each)

        loader.exec_module = execute_and_activate


def _activate(activation: dict[str, Any]) -> None:
    module, _, name = activation["call"].partition(":")
    try:
        getattr(importlib.import_module(module), name)(activation["settings"])
    except Exception as error:  # noqa: BLE001 - the program must run as without us
        text = f"resumekit: {activation['call']} is off ({type(error).__name__}: {error})"
        print(text, file=sys.stderr)  # noqa: T201 - no logger is configured yet


def has_started() -> bool:
    """Whether another copy of this file waits for the imports of this process."""
    # Each copy has a class of its own.
    return any(type(finder).__name__ == AfterImport.__name__ for finder in sys.meta_path)


def start() -> None:
    """Reads the list and waits for the imports."""
    listed = os.environ.get(_VARIABLE)
    if listed is None or not Path(listed).is_file():
        return
    sys.meta_path.insert(0, AfterImport(json.loads(Path(listed).read_text())))


if __name__ == "sitecustomize" and not has_started():
    start()
    run_hidden_sitecustomize()
