"""Whether a call changes anything that a later step reads.

The called object is looked up in the running function, without running code of the user's. Of a
function of the user's the instructions are read, with those of what it calls. What cannot be looked
up counts as a change.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType
from typing import Any

from resumekit.live.frames import is_library_file
from resumekit.live.instructions import (
    CALLS,
    COMPUTATIONS,
    JUMPS,
    SHUFFLES,
    TESTS,
    UnsupportedBytecodeError,
    iter_nested,
    list_accesses,
    read_instructions,
)
from resumekit.live.value_stack import Operand, Simulation, simulate, split_callee, stored_values

# Methods of libraries' objects without state, and functions of libraries, that report.
_REPORTING = frozenset(
    {
        *("log", "debug", "info", "warning", "error", "critical", "exception"),
        *("print", "write", "writelines", "flush", "update", "refresh"),
        *("set_description", "set_description_str", "set_postfix", "set_postfix_str"),
        *("add_scalar", "add_scalars", "log_metric", "log_metrics", "log_dict"),
    }
)
_BUILTINS = frozenset(
    {
        *("print", "str", "repr", "format", "int", "float", "bool", "round", "len", "abs", "min"),
        *("max", "divmod", "sum", "range", "enumerate", "zip"),
    }
)
# Functions and methods of libraries that change nothing. The object of a method may be one that
# each step makes, as the loss, which cannot be looked up.
_QUERIES = frozenset(
    {"item", "mean", "sum", "min", "max", "tolist", "get_last_lr", "time", "perf_counter"}
)
_OF_MAPPINGS = frozenset({"get", "items", "keys", "values"})
_IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset, type(None))
_CONTAINERS = (*_IMMUTABLE, list, dict, set)
_FILLS = frozenset({"append", "extend", "insert", "add", "update", "setdefault"})

_HARMLESS = frozenset(
    {
        *("LOAD_CONST", "POP_TOP", "NOP", "EXTENDED_ARG", "KW_NAMES", "PRECALL", "PUSH_NULL"),
        *("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "LIST_TO_TUPLE"),
        *(*COMPUTATIONS, *SHUFFLES, *JUMPS, *TESTS),
    }
)
# In a function, whose variables nothing else reads.
_LOCAL = frozenset(
    {
        *("RESUME", "RETURN_VALUE", "RETURN_CONST", "COPY_FREE_VARS", "MAKE_CELL", "FOR_ITER"),
        *("END_FOR", "UNPACK_SEQUENCE", "UNPACK_EX", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP"),
        *("RERAISE", "PUSH_EXC_INFO", "POP_EXCEPT", "SETUP_FINALLY", "POP_BLOCK"),
        *("LIST_APPEND", "SET_ADD", "MAP_ADD", "DICT_UPDATE", "DICT_MERGE"),
    }
)
_OF_GENERATORS = frozenset({"RETURN_GENERATOR", "GEN_START", "YIELD_VALUE", "CALL_INTRINSIC_1"})
_MADE = ("BUILD_", "FORMAT_", "BINARY_OP", "LOAD_CONST", "INPLACE_", "BINARY_ADD")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FUNCTIONS = (FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_MISSING = object()


@dataclass(frozen=True)
class FunctionScope:
    """A function's code and what its names are bound to.

    Args:
        code: of the function.
        variables: the values of its names that are known.
        is_stateless: whether an object is of a library's class whose objects report, or run the
            machine, and have no state of the training.
        entered: functions that are being read.
    """

    code: CodeType
    variables: Mapping[str, Any]
    is_stateless: Callable[[Any], bool]
    entered: frozenset[tuple[CodeType, int]] = frozenset()

    @classmethod
    def of_frame(
        cls,
        frame: FrameType,
        bound: Mapping[str, Any],
        *,
        unknown: frozenset[str],
        is_stateless: Callable[[Any], bool],
    ) -> FunctionScope:
        """Returns the scope of a running function.

        Args:
            frame: of the function.
            bound: the values of its variables.
            unknown: variables whose value may be another one at a call.
            is_stateless: see the class.
        """
        names = {**vars(builtins), **frame.f_globals, **bound}
        known = {name: value for name, value in names.items() if name not in unknown}
        return cls(frame.f_code, known, is_stateless)

    def changes_nothing(self, offset: int) -> bool:
        """Whether an instruction of a loop's body changes nothing that a later step reads."""
        return self._is_harmless(simulate(self.code), offset)

    def _is_harmless(self, simulation: Simulation, offset: int) -> bool:
        instruction = simulation.instructions[offset]
        if instruction.opname in CALLS:
            return self._is_harmless_call(simulation, offset)
        accesses = list_accesses(instruction)
        is_load = bool(accesses) and all(access == "load" for access, _ in accesses)
        return is_load or instruction.opname in _HARMLESS

    def _is_harmless_call(self, simulation: Simulation, offset: int) -> bool:
        callee = split_callee(simulation.popped(offset))[0]
        if callee.kind == "constant":  # a comprehension
            return all(self._nested(each).stores_nothing() for each in iter_nested(self.code))
        if not callee.names and callee.text.startswith(("'", '"')):
            return True  # "{}".format
        if not callee.path or callee.is_call:
            return False
        owner, value = self._look_up(callee.path)
        if value is not _MISSING:
            return self._is_harmless_object(owner, value)
        return len(callee.path) > 1 and callee.path[-1] in _QUERIES

    def _look_up(self, path: tuple[str, ...]) -> tuple[Any, Any]:
        """The object that a path names, and the one that it is an attribute of."""
        owner, value = None, self.variables.get(path[0], _MISSING)
        for name in path[1:]:
            owner, value = value, _attribute(value, name)
        return owner, value

    def _is_harmless_object(self, owner: Any, value: Any) -> bool:
        """Whether a call of an object changes nothing."""
        while isinstance(value, (functools.partial, types.MethodType, staticmethod, classmethod)):
            if isinstance(value, functools.partial):
                owner, value = None, value.func
            else:
                owner, value = getattr(value, "__self__", owner), value.__func__
        if isinstance(value, FunctionType) and not is_library_file(value.__code__.co_filename):
            try:
                return self._is_harmless_function(owner, value)
            except UnsupportedBytecodeError:
                return False
        name = getattr(value, "__name__", "")
        if isinstance(value, type) or getattr(value, "__self__", None) is builtins:
            return value.__module__ == "builtins" and name in _BUILTINS
        if isinstance(value, types.BuiltinFunctionType) and owner is None:
            owner = value.__self__
        if not isinstance(value, _FUNCTIONS):
            call = inspect.getattr_static(type(value), "__call__", None)
            return isinstance(call, FunctionType) and self._is_harmless_object(value, call)
        if name in _QUERIES or isinstance(owner, (str, bytes)):
            return True
        if isinstance(owner, dict):
            return name in _OF_MAPPINGS
        return name in _REPORTING and (owner is None or self.is_stateless(owner))

    def _is_harmless_function(self, owner: Any, function: FunctionType) -> bool:
        code, key = function.__code__, (function.__code__, id(owner))
        if code.co_flags & _GENERATORS:
            return False
        if key in self.entered:
            return True  # another call of it is being read
        names = {**vars(builtins), **function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            names[name] = _contents(cell)
        for name in (*code.co_varnames, *code.co_cellvars):
            names.pop(name, None)
        parameters = inspect.getargs(code)
        given: dict[str | None, Any] = {parameters.varargs: (), parameters.varkw: {}}
        if owner is not None and not isinstance(owner, types.ModuleType):
            given.update(dict.fromkeys(parameters.args[:1], owner))
        stored = _stored_in(code)
        names.update((name, each) for name, each in given.items() if name and name not in stored)
        inner = replace(self, code=code, variables=names, entered=self.entered | {key})
        return inner.stores_nothing()

    def _nested(self, code: CodeType) -> FunctionScope:
        """The scope of a function that this one defines."""
        local = {*code.co_varnames, *code.co_cellvars}
        names = {name: value for name, value in self.variables.items() if name not in local}
        return replace(self, code=code, variables=names)

    def stores_nothing(self) -> bool:
        """Whether a function, when it runs, changes only what it has made itself."""
        if self.code.co_flags & _GENERATORS and self.code.co_name != "<genexpr>":
            return False
        simulation = simulate(self.code)
        return all(self._is_local(simulation, offset) for offset in simulation.states)

    def _is_local(self, simulation: Simulation, offset: int) -> bool:
        """Whether an instruction of a function changes only what the function has made itself."""
        instruction, popped = simulation.instructions[offset], simulation.popped(offset)
        name = instruction.opname
        if name in CALLS and self._fills_own(simulation, split_callee(popped)[0].path):
            return True
        if name == "STORE_SUBSCR":
            return self._is_own(simulation, popped[1])
        if name == "GET_ITER" or name in ("LIST_EXTEND", "SET_UPDATE"):
            return popped[-1].is_call or self._is_container(simulation, popped[-1])
        if name.startswith("INPLACE_") or (name == "BINARY_OP" and "=" in instruction.argrepr):
            return self._is_own(simulation, popped[0])
        stored = [each for access, each in list_accesses(instruction) if access != "load"]
        if stored:
            return name not in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME") and not (
                {*stored} & {*self.code.co_freevars}
            )
        is_generator = self.code.co_name == "<genexpr>" and name in _OF_GENERATORS
        return is_generator or name in _LOCAL or self._is_harmless(simulation, offset)

    def _fills_own(self, simulation: Simulation, path: tuple[str, ...]) -> bool:
        """Whether a method that a path names adds to a container that the function has made."""
        return len(path) == 2 and path[1] in _FILLS and self._is_made_here(simulation, path[0])

    def _is_container(self, simulation: Simulation, operand: Operand) -> bool:
        """Whether a value can be iterated over again."""
        value = self._look_up(operand.path)[1] if operand.path and not operand.is_call else None
        return type(value) in _CONTAINERS[1:] or self._is_own(simulation, operand)

    def _is_own(self, simulation: Simulation, operand: Operand) -> bool:
        """Whether a value is one that this run of the function has made, or an immutable one."""
        if len(operand.path) == 1 and not operand.is_call:
            return self._is_made_here(simulation, operand.path[0])
        if operand.path and not operand.is_call:
            return type(self._look_up(operand.path)[1]) in _IMMUTABLE
        opnames = [simulation.instructions[each].opname for each in operand.origins]
        return bool(opnames) and all(each.startswith(_MADE) for each in opnames)

    def _is_made_here(self, simulation: Simulation, name: str) -> bool:
        """Whether a function has made each value of one of its variables."""
        code = self.code
        if name not in code.co_varnames[_num_parameters(code) :]:
            return False
        stored = [
            value
            for offset in simulation.states
            for each, value in stored_values(simulation, offset)
            if each == name
        ]
        return bool(stored) and all(
            not value.path and not value.is_call and self._is_own(simulation, value)
            for value in stored
        )


def _attribute(owner: Any, name: str) -> Any:
    """An attribute of an object, without running code of its class."""
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name, _MISSING)
    value = _MISSING if owner is _MISSING else inspect.getattr_static(owner, name, _MISSING)
    if isinstance(value, types.MemberDescriptorType) and not isinstance(owner, type):
        return value.__get__(owner)  # of __slots__
    is_known = isinstance(value, (*_FUNCTIONS, types.MethodType, staticmethod, classmethod, type))
    is_computed = hasattr(type(value), "__get__") and not is_known
    return _MISSING if is_computed else value


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _stored_in(code: CodeType) -> set[str]:
    instructions = read_instructions(code).values()
    found = (access for each in instructions for access in list_accesses(each))
    return {name for access, name in found if access != "load"}


def _num_parameters(code: CodeType) -> int:
    parameters = inspect.getargs(code)
    num_variadic = sum(each is not None for each in (parameters.varargs, parameters.varkw))
    return len(parameters.args) + num_variadic
