"""The stack frames of the user: the functions that run the training loop, and their variables.

Frames are read once, before the first batch. Nothing here keeps a frame.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import Any

# Packages whose functions are not the user's. A loop that one of them runs is its own business.
_LIBRARIES = frozenset(
    {
        "accelerate",
        "contextlib",
        "datasets",
        "deepspeed",
        "fastprogress",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
        "resumekit",
        "rich",
        "torch",
        "torchdata",
        "tqdm",
        "transformers",
        "trl",
    }
)
# Before Python 3.12 a comprehension runs in a frame of its own; later it does in its function's.
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})


@dataclass(frozen=True)
class Activation:
    """One running function of the user.

    Args:
        code: its code.
        line: the line that runs.
        variables: the values of its names, and of the globals that it uses.
        module_globals: all globals of its file.
    """

    code: CodeType
    line: int
    variables: Mapping[str, Any] = field(repr=False)
    module_globals: dict[str, Any] = field(repr=False)

    @property
    def is_module(self) -> bool:
        """Whether it is the file itself."""
        return self.code.co_name == "<module>"

    @property
    def receiver(self) -> Any:
        """``self`` of a method; None in any other function."""
        names = self.code.co_varnames[: self.code.co_argcount]
        value = self.variables.get(names[0]) if names else None
        method = getattr(type(value), self.code.co_name, None)
        return value if inspect.isfunction(inspect.unwrap(method)) else None  # type: ignore[arg-type]


def calling_location() -> tuple[CodeType, int] | None:
    """Where the loop that asks for a batch stands; None if a library runs it."""
    frame = _user_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lineno)


def running_functions(run: Any = None) -> list[Activation]:
    """The user's running functions, the innermost first; empty if a library runs the loop.

    Args:
        run: an object; the functions end with the outermost one that refers to it. Further out are
            launchers, test runners and loops over whole runs.
    """
    frame = _user_frame(sys._getframe(1))
    found = []
    while frame is not None:
        if not _is_library(frame) and frame.f_code.co_name not in _COMPREHENSIONS:
            found.append(_activation(frame))
        frame = frame.f_back
    if run is not None:
        refers = [n for n, each in enumerate(found) if _refers(each, run)]
        del found[max(refers, default=0) + 1 :]
    return found


def _refers(activation: Activation, run: Any) -> bool:
    """Whether a variable of a function is the object, or has it as an attribute."""
    values = activation.variables.values()
    return any(
        value is run or any(each is run for each in getattr(value, "__dict__", {}).values())
        for value in values
        if not isinstance(value, (type, ModuleType))
    )


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the loop. Generators that only hand batches on are passed over, as tqdm's."""
    while frame is not None:
        code = frame.f_code
        hands_on = code.co_flags & inspect.CO_GENERATOR or code.co_name in _COMPREHENSIONS
        if _root(frame) == "resumekit" or hands_on:
            frame = frame.f_back
            continue
        return None if _is_library(frame) else frame
    return None


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    return _root(frame) in _LIBRARIES


def _activation(frame: FrameType) -> Activation:
    code, module_globals = frame.f_code, frame.f_globals
    if frame.f_locals is module_globals:
        variables = dict(module_globals)
    else:
        used = {name: module_globals[name] for name in code.co_names if name in module_globals}
        variables = {**used, **frame.f_locals}
        if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
            # Before Python 3.13 the frame keeps this copy of its locals, and with it their values.
            frame.f_locals.clear()
    return Activation(code, frame.f_lineno, variables, module_globals)
