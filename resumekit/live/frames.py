"""The frames of the user's running functions: which they are, and their live variables.

A fetch of a batch runs inside the user's functions, so their frames are on the stack. The live
variables of these are read and set here. Nothing keeps a frame longer than a fetch.
"""

from __future__ import annotations

import ctypes
import dis
import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType, GeneratorType, ModuleType
from typing import Any, Literal

from resumekit.errors import StateMismatchError
from resumekit.live.bytecode import (
    cleared_names,
    clock_names,
    is_in_comprehension,
    live_names,
    stored_names,
)
from resumekit.live.value_stack import NUM_CACHED, UnsupportedBytecodeError, find_executed

# Before Python 3.12 these run in frames of their own, and keep what they build on the stack.
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_PACKAGE = "resumekit"
# ipykernel 7 compiler.py get_file_name, in whose name is a hash of the cell, and its predecessors.
_CELL = re.compile(r".*[/\\]ipykernel_\d+[/\\]\d+\.py|<ipython-input-.*>")


@dataclass(frozen=True)
class Site:
    """The instruction that a frame executes, recognised in another process.

    Args:
        file: name of the file, without its directory; "cell" in a notebook.
        function: qualified name; on Python 3.10 without the class.
        digest: of the function's code, without line numbers and paths.
        lasti: offset of the instruction; of several that are compiled from one expression, as for
            the test of a ``while`` loop, the first.
        line: of the source, for messages.
    """

    file: str
    function: str
    digest: str
    lasti: int
    line: int

    def matches(self, saved: Site) -> Literal["same", "edited", "other"]:
        """Returns "same", "edited" if the function has other code now, "other" in any other case.

        Args:
            saved: the site in the saved process.
        """
        if (self.file, self.function) != (saved.file, saved.function):
            return "other"
        if self.digest != saved.digest:
            return "edited"
        return "same" if self.lasti == saved.lasti else "other"

    def as_plain(self) -> dict[str, str | int]:
        """Returns the site as JSON has it."""
        return asdict(self)

    @property
    def name(self) -> str:
        """File and function, for paths and messages."""
        return f"{self.file}:{self.function}"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Site:
        """Returns the site that `as_plain` was called on."""
        return cls(**plain)


class LiveFrame:
    """A running function of the user and its live variables. Drop it when the fetch ends.

    Args:
        frame: executes a call or fetches an item.
        lasti: of the instruction that counts; by default the one that it executes.
    """

    __slots__ = ("code", "frame", "lasti", "line", "names", "reason", "site", "stored")

    code: CodeType
    frame: FrameType
    lasti: int
    line: int
    site: Site
    names: frozenset[str]
    stored: frozenset[str]  # of the live variables, those that the function may still write
    reason: str | None  # why the frame cannot continue where another one was saved

    def __init__(self, frame: FrameType, lasti: int | None = None) -> None:
        self.frame = frame
        self.code, self.lasti, self.line = frame.f_code, frame.f_lasti, frame.f_lineno or 0
        self.names, self.stored, self.reason = frozenset(), frozenset(), None
        try:
            self.lasti = find_executed(self.code, frame.f_lasti if lasti is None else lasti)
            self.reason = _find_reason(self.code, self.lasti)
            if not self.reason:
                self.names = live_names(self.code, self.lasti)
                self.stored = self.names & stored_names(self.code, self.lasti)
        except UnsupportedBytecodeError as error:
            self.reason = str(error)
        path = self.code.co_filename
        file = "cell" if _CELL.fullmatch(path) else os.path.basename(path)
        function = getattr(self.code, "co_qualname", self.code.co_name)  # from Python 3.11 on
        offset = _first_of_expression(self.code, self.lasti)
        self.site = Site(file, function, digest_code(self.code), offset, self.line)

    def bound_variables(self) -> dict[str, Any]:
        """Returns the values of all variables that have one."""
        return read_variables(self.frame)

    def variables(self) -> dict[str, Any]:
        """Returns the values of the live variables that have one."""
        bound = read_variables(self.frame).items()
        return {name: value for name, value in bound if name in self.names}

    def set(self, values: Mapping[str, Any]) -> None:
        """Sets live variables, all at once.

        Args:
            values: by name; other variables keep their values.

        Raises:
            StateMismatchError: a variable is not live here, or has another value afterwards.
        """
        if unknown := values.keys() - self.names:
            raise self._mismatch(unknown, "not read after this line")
        write_variables(self.frame, values)
        bound = read_variables(self.frame)
        if wrong := [name for name in values if bound.get(name, self) is not values[name]]:
            raise self._mismatch(wrong, "cannot be set")

    def _mismatch(self, names: Iterable[str], found: str) -> StateMismatchError:
        where = f"{self.site.file}:{self.line}: {', '.join(sorted(names))}"
        return StateMismatchError(where, found=found, expected="a live variable")


@lru_cache(maxsize=NUM_CACHED)
def _first_of_expression(code: CodeType, lasti: int) -> int:
    if sys.version_info < (3, 11):
        return _first_of_line(code, lasti)
    positions = [*code.co_positions()]  # of each code unit of two bytes
    position = positions[lasti // 2]
    return lasti if None in position else 2 * positions.index(position)


def _first_of_line(code: CodeType, lasti: int) -> int:
    """The same for Python 3.10, which knows no columns: lines that begin with the same code."""
    starts = [*dis.findlinestarts(code)]
    begin, line = [each for each in starts if each[0] <= lasti][-1]
    instructions = code.co_code[begin : lasti + 2]
    same = (start for start, of in starts if of == line)
    first = next(each for each in same if code.co_code.startswith(instructions, each))
    return first + lasti - begin


def _find_reason(code: CodeType, lasti: int) -> str | None:
    if code.co_flags & _COROUTINE:
        return "a coroutine"
    if code.co_name in _COMPREHENSIONS or is_in_comprehension(code, lasti):
        return "a comprehension"
    return None


def find_frames(
    owner: object,
    start: FrameType,
    *,
    at: Mapping[CodeType, int] | None = None,
    is_passed_over: Callable[[str], bool] = lambda module: True,
) -> list[LiveFrame]:
    """Returns the frames of the user's functions, the innermost first.

    Frames of libraries are passed over: the standard library, installed packages and resumekit. An
    installed package that has the owner as a variable is the user's. Inside the user's innermost
    function a library requests the batch for it, as a generator around the loop does. The last
    frame is the outermost that refers to the owner, else the outermost of the main script; further
    out are launchers, test runners and loops over whole runs.

    Args:
        owner: the Checkpointer; a variable or an attribute of a variable's object refers to it.
        start: the innermost frame, or one inside it.
        at: of the functions that count, the instruction to continue at; by default all count, at
            the instruction that each executes.
        is_passed_over: of a library inside the user's innermost function, by the module's name.
    """
    frames = [frame for frame in _walk(start) if not _is_package(frame, _PACKAGE)]
    packages = {
        _top_package(frame)
        for frame in frames
        if is_library_file(frame.f_code.co_filename) and _has_variable(frame, owner)
    }
    of_user = [
        frame
        for frame in frames
        if not is_library_file(frame.f_code.co_filename) or _top_package(frame) in packages
    ]
    between = [
        frame
        for frame in (_up_to(of_user[0], start) if of_user else ())
        if not is_passed_over(str(frame.f_globals.get("__name__")))
    ]
    last = [number for number, frame in enumerate(of_user) if _refers(frame, owner)]
    last = last or [n for n, frame in enumerate(of_user) if _is_package(frame, "__main__")]
    frames = between + (of_user[: last[-1] + 1] if last else of_user)
    if at is None:
        return [LiveFrame(frame) for frame in frames]
    return [LiveFrame(each, at[each.f_code]) for each in frames if each.f_code in at]


def _up_to(last: FrameType, start: FrameType) -> list[FrameType]:
    """The frames outside of all of resumekit and inside the last one."""
    found: list[FrameType] = []
    for frame in takewhile(lambda each: each is not last, _walk(start)):
        found = [] if _is_package(frame, _PACKAGE) else [*found, frame]
    return found


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_on_stack(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Whether a generator runs in this thread: its variables are those of a frame."""
    frames = _walk(inspect.currentframe() if generator.gi_running else None)
    return any(frame is generator.gi_frame for frame in frames)


def _top_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_package(frame: FrameType, name: str) -> bool:
    return _top_package(frame) == name


@lru_cache(maxsize=NUM_CACHED)
def is_library_file(filename: str) -> bool:
    """Whether a file is of the standard library or of an installed package."""
    if filename.startswith("<frozen "):
        return True
    parts = re.split(r"[/\\]", filename)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {os.path.dirname(os.__file__)}
    folders |= {os.path.realpath(folder) for folder in folders}
    path = os.path.abspath(filename)
    return any(path.startswith(folder + os.sep) for folder in folders) or any(
        Path(path).relative_to(folder).parts[0] in _installed_in(folder)
        for folder in map(os.path.abspath, sys.path)
        if path.startswith(folder + os.sep)
    )


@lru_cache(maxsize=NUM_CACHED)
def _installed_in(folder: str) -> frozenset[str]:
    """The files and folders that an installer has put into a folder (``pip install --target``)."""
    records = [each.read_text("utf-8") for each in Path(folder).glob("*.dist-info/RECORD")]
    lines = (line for each in records for line in each.splitlines())
    return frozenset(line.split(",")[0].split("/")[0] for line in lines)


def _has_variable(frame: FrameType, owner: object) -> bool:
    return any(value is owner for value in read_variables(frame).values())


def _refers(frame: FrameType, owner: object) -> bool:
    """Whether a variable of a frame is the object, or has it as an attribute."""
    return any(
        value is owner or any(each is owner for each in _attributes(value))
        for value in read_variables(frame).values()
    )


def _attributes(value: object) -> list[Any]:
    if isinstance(value, (type, ModuleType)):
        return []
    try:
        attributes = object.__getattribute__(value, "__dict__")  # runs no code of the user
    except AttributeError:
        return []
    return list(attributes.values()) if isinstance(attributes, dict) else []


# The variables of several frames


def name_frames(frames: Sequence[LiveFrame]) -> dict[str, LiveFrame]:
    """Returns the frames by the names of their functions, the outermost first: paths are short."""
    named: dict[str, LiveFrame] = {}
    for frame in reversed(frames):
        function = frame.site.name
        number = sum(each.site.name == function for each in named.values())
        named[f"{function}#{number + 1}" if number else function] = frame
    return named


def variables_by_path(frames: Sequence[LiveFrame]) -> dict[str, Any]:
    """Returns all live variables of the frames."""
    named = name_frames(frames).items()
    return {f"{name}.{key}": v for name, frame in named for key, v in frame.variables().items()}


def state_variables(frames: Sequence[LiveFrame]) -> dict[str, dict[str, Any]]:
    """Returns the live variables but for readings of clocks, by the names of their frames.

    What an inner function shares with the one that defines it belongs to the outer one.
    """
    found: dict[str, dict[str, Any]] = {}
    codes: list[CodeType] = []  # of the frames further out
    for name, frame in name_frames(frames).items():
        shared = {each for code in codes for each in _shared(code, frame.code)}
        codes.append(frame.code)
        left_out = shared | clock_names(frame.code)
        found[name] = {k: v for k, v in frame.variables().items() if k not in left_out}
    return found


def _shared(outer: CodeType, inner: CodeType) -> Iterator[str]:
    """The variables of an inner function that are those of the function that defines it."""
    if inner in outer.co_consts:
        yield from {*inner.co_freevars} & {*outer.co_cellvars, *outer.co_freevars}


# Variables of a frame


def _is_optimized(frame: FrameType) -> bool:
    """Whether it is of a function, whose variables are not in a dict."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _namespace(frame: FrameType) -> Any:
    """The dict of a module's or a class's variables."""
    # A module has local variables if comprehensions run inside it. Then f_locals may be a copy of
    # the globals, and asking for it can unbind variables under a trace function (3.12), or a proxy
    # without the globals (3.13). Source: Objects/frameobject.c frame_getlocals.
    is_module = frame.f_code.co_name == "<module>"
    return frame.f_globals if is_module and frame.f_code.co_varnames else frame.f_locals


def _runs_comprehension(frame: FrameType) -> bool:
    try:
        return is_in_comprehension(frame.f_code, frame.f_lasti)
    except UnsupportedBytecodeError:
        return True


def read_variables(frame: FrameType) -> dict[str, Any]:
    """Returns the values of a frame's variables that have one."""
    if not _is_optimized(frame):
        return dict(_namespace(frame))
    frame_locals = frame.f_locals
    if sys.version_info >= (3, 13):
        return {name: frame_locals[name] for name in _safe_names(frame) if name in frame_locals}
    values = dict(frame_locals)
    del frame_locals
    _clear_snapshot(frame)
    return values


def _safe_names(frame: FrameType) -> list[str]:
    """The variables that can be read while a comprehension runs.

    Until 3.13.2, Objects/frameobject.c framelocalsproxy_getval takes a value for a cell, and
    crashes, when the comprehension's variable has the name of one that a nested function shares.
    """
    code = frame.f_code
    names = dict.fromkeys(code.co_varnames + code.co_cellvars + code.co_freevars)
    hidden = cleared_names(code).intersection(code.co_cellvars)
    if hidden and _runs_comprehension(frame):
        return [name for name in names if name not in hidden]
    return [*names]


def write_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Sets variables of a running function."""
    if not _is_optimized(frame):
        _namespace(frame).update(values)
        return
    # From Python 3.13 on this sets the variables (PEP 667); before, it is a snapshot of all of
    # them, and 0 leaves the variables that it does not have as they are.
    # Source: 3.10 to 3.12 Objects/frameobject.c PyFrame_LocalsToFast.
    frame_locals = frame.f_locals
    frame_locals.update(values)
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        del frame_locals
        _clear_snapshot(frame)


def _clear_snapshot(frame: FrameType) -> None:
    """Clears the snapshot that a frame keeps before Python 3.13, and the values in it with it.

    Two references are the frame's and the call's. With more, the function has called `locals()`
    and uses the same dict; it is left as it is.
    """
    if sys.version_info < (3, 13) and sys.getrefcount(frame.f_locals) <= 2:
        frame.f_locals.clear()


# The digest of a code


@lru_cache(maxsize=NUM_CACHED)
def digest_code(code: CodeType) -> str:
    """Returns what is equal in two processes of one Python version if the code is.

    Line numbers, paths and addresses do not count.
    """
    return hashlib.sha256(repr(_plain_code(code)).encode()).hexdigest()[:16]


def _plain_code(code: CodeType) -> tuple[object, ...]:
    return (
        (code.co_name, code.co_flags, code.co_code, getattr(code, "co_exceptiontable", b"")),
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars),
        [_plain_constant(constant) for constant in code.co_consts],
    )


def _plain_constant(constant: object) -> object:
    if isinstance(constant, CodeType):
        return _plain_code(constant)
    if isinstance(constant, tuple):
        return [_plain_constant(each) for each in constant]
    if isinstance(constant, frozenset):  # its order differs between processes
        return "frozenset", sorted(repr(_plain_constant(each)) for each in constant)
    return repr(constant)
