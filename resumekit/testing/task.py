"""One launch of a training function, in a process that is made for it and ends with it."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from resumekit.errors import ConfigurationError


@dataclass(frozen=True)
class Task:
    """What one process of a launch is to run; it travels as JSON.

    Args:
        target: ``module:function`` or ``path/to/file.py:function``.
        directory: the run's directory, the function's first argument.
        options: keyword arguments for the function.
        environment: variables to set; None removes one.
        log: the file for stdout and stderr.
        is_cold: whether a fresh interpreter runs it.
    """

    target: str
    directory: str
    options: Mapping[str, Any]
    environment: Mapping[str, str | None]
    log: str
    is_cold: bool = False

    def to_json(self) -> str:
        """One line that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Task:
        """The inverse of ``to_json``."""
        return cls(**json.loads(line))

    def enter(self) -> None:
        """Makes this process the task's own: its session, its output, its environment.

        A cold start replaces it by a fresh interpreter, which reads its variables at its start.
        """
        os.setsid()
        # A shell ignores SIGINT for what it starts in the background, and its children inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull) as nothing, open(self.log, "ab") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.is_cold:
            words = [sys.executable, "-u", "-m", __name__, self.to_json()]
            os.execv(sys.executable, words)

    def run(self) -> None:
        """Calls the function and passes its exceptions on. Destroys its process group."""
        sys.argv = [self.target]
        load_function(self.target)(self.directory, **self.options)
        _end_process_group()


def _end_process_group() -> None:
    """Threads of gloo must not outlive the interpreter, nor a DDP module its process group.

    torch 2.13: freed after its group, the module waits for a thread that waits for the interpreter.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()
        distributed.barrier()
        distributed.destroy_process_group()


def target_of(function: str | Callable[..., Any]) -> str:
    """The text by which another process finds a function.

    Raises:
        ConfigurationError: the function is not at the top level of a file.
    """
    if isinstance(function, str):
        return function
    # A decorator may stand in another file than what it decorates.
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", "")
    if code is None or not name.isidentifier():
        raise ConfigurationError(
            repr(function),
            found="cannot be found by name from another process",
            expected="a function at the top level of a file",
        )
    return f"{code.co_filename}:{name}"


def load_function(target: str) -> Callable[..., Any]:
    """The function that a target names.

    Raises:
        ConfigurationError: there is no such module, file or function.
    """
    source, _, name = target.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(target, found=f"no function {name!r}", expected="module:function")
    loaded: Callable[..., Any] = function
    return loaded


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(str(path), found="not a Python file", expected="a file")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # it finds the modules beside it, as a script does
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses and worker processes look it up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """A cold start: one task, read from the command line, in a fresh interpreter."""
    Task.from_json(sys.argv[1]).run()


if __name__ == "__main__":
    main()
