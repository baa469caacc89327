"""A parsed source file: which functions its calls run, and which loop a running line is in."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from resumekit.analysis import calls
from resumekit.analysis.definitions import Definitions
from resumekit.analysis.scopes import Class, Function, LoopNode, Scope, root_of


class Callee(NamedTuple):
    """A function of the file that a call runs, with the path of ``self`` for a method."""

    function: Function
    receiver: str | None = None


class Program(Definitions):
    """A parsed source file."""

    @classmethod
    def parse(cls, source: str) -> Program:
        """The program of a source text.

        Raises:
            SyntaxError: it is not Python.
        """
        return cls(ast.parse(source))

    def called(self, call: ast.Call, scope: Scope) -> Callee | None:
        """The function of this file that a call runs."""
        function = self.function_named(call.func, scope)
        if function is not None:
            return None if function.is_abstract else Callee(function)
        owner: Class | None = None
        receiver: str | None = None
        name = "__call__"
        if isinstance(call.func, ast.Attribute):
            name = call.func.attr
            of_class = self._method_of_class(call.func, scope)
            if of_class is not None:
                return of_class
            receiver, owner = self._receiver(call.func.value, scope)
        if owner is None or name not in owner.methods:
            receiver, name = scope.path(call.func), "__call__"
            owner = self.class_of(receiver)
        if owner is None or (owner.is_module and name in ("forward", "__call__")):
            return None
        method = owner.methods.get(name)
        if method is None or method.is_abstract:
            return None
        return Callee(method, receiver if method.receiver else None)

    def mentioned(self, scope: Scope) -> frozenset[str]:
        """The variables that a function uses, in the functions of the file that it calls too."""
        key = (scope.function.name, scope.bindings)
        if key not in self._mentioned:
            self._mentioned[key] = frozenset()  # a recursive call adds nothing
            found: set[str] = set()
            for node in ast.walk(scope.function.node):
                if isinstance(node, ast.Name):
                    found.add(root_of(scope.path_of(node.id)))
                    self._add_mentioned(calls.call_of(node), scope, found)
                elif isinstance(node, ast.Call):
                    self._add_mentioned(node, scope, found)
                elif isinstance(node, ast.Attribute):
                    read = self.property_read(node, scope)
                    if read is not None:
                        self._add_mentioned(read, scope, found)
            self._mentioned[key] = frozenset(found)
        return self._mentioned[key]

    def _add_mentioned(self, call: ast.Call, scope: Scope, found: set[str]) -> None:
        called = self.called(call, scope)
        if called is not None:
            inner, _ = self.enter(call, scope, called)
            found |= self.mentioned(inner)

    def forward_of(self, call: ast.Call, scope: Scope) -> Callee | None:
        """``forward()`` of a module of this file that a call runs."""
        node = call.func
        if isinstance(node, ast.Attribute) and node.attr == "forward":
            node = node.value
        path = scope.path(node)
        owner = self.class_of(path)
        if owner is None or not owner.is_module or "forward" not in owner.methods:
            return None
        return Callee(owner.methods["forward"], path)

    def property_read(self, node: ast.expr, scope: Scope) -> ast.Call | None:
        """Reading an attribute as a call, where the attribute is a property of this file."""
        if not isinstance(node, ast.Attribute) or node.attr not in self.property_names:
            return None
        call = calls.call_of(node)
        found = self.called(call, scope)
        return call if found is not None and found.function.is_property else None

    def _method_of_class(self, node: ast.Attribute, scope: Scope) -> Callee | None:
        """``Class.method``: with the class as receiver of a class method, without one otherwise."""
        path = scope.path(node.value)
        owner = self.classes.get(path or "")
        method = None if owner is None else owner.methods.get(node.attr)
        if method is None or method.is_abstract:
            return None
        return Callee(method, path if "classmethod" in method.decorators else None)

    def _receiver(self, node: ast.expr, scope: Scope) -> tuple[str | None, Class | None]:
        """The object whose method is called, and its class; ``super()`` is ``self``."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = scope.function
            owner = self.classes.get(function.owner or "")
            if node.func.id == "super" and owner is not None and function.parameters:
                base = owner.bases[0] if owner.bases else None
                return scope.path_of(function.parameters[0]), base
        path = scope.path(node)
        return path, self.class_of(path)

    def enter(
        self, call: ast.Call, scope: Scope, callee: Callee
    ) -> tuple[Scope, dict[str, ast.expr]]:
        """The activation that a call makes.

        Returns:
            The scope, and the arguments that are copied into locals of the function, by the path of
            the local.
        """
        function, receiver = callee
        skipped = 1 if receiver is not None else self.num_bound(call.func, scope)
        arguments = _arguments(call, function, skipped)
        bindings: dict[str, str] = {}
        copied: dict[str, ast.expr] = {}
        if receiver is not None and function.parameters:
            bindings[function.parameters[0]] = receiver
        for name, value in arguments.items():
            path = scope.path(value)
            if path is not None and name not in function.local_names:
                bindings[name] = path
            else:
                copied[function.local(name)] = value
        unpacked = [each.value for each in call.args if isinstance(each, ast.Starred)]
        unpacked += [each.value for each in call.keywords if each.arg is None]
        if unpacked:  # any other parameter may be in it
            others = [each for each in function.parameters if each not in arguments]
            missing = (each for each in others if each not in bindings)
            copied.update((function.local(each), unpacked[-1]) for each in missing)
        parent = scope if function.parent is scope.function else None
        return Scope(function, tuple(sorted(bindings.items())), parent), copied


def stored_keys(program: Program) -> Iterator[tuple[str, str]]:
    """The path of the container and the key, for each store like ``extras["best"] = best``."""
    for function in program.functions.values():
        scope = Scope(function)
        for node in function.own_nodes:
            for container, key in _keys_stored_by(node):
                path = scope.path(container)
                if path is not None:
                    yield path, key


def _keys_stored_by(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.Subscript(value=container, slice=ast.Constant(value=str(key)), ctx=ast.Store()):
            yield container, key
        case ast.Call(func=ast.Attribute(value=container, attr="update"), keywords=keywords):
            yield from ((container, each.arg) for each in keywords if each.arg is not None)


def _arguments(call: ast.Call, function: Function, num_skipped: int) -> dict[str, ast.expr]:
    names = [each for each in function.parameters if each not in function.keyword_only]
    names = names[num_skipped:]
    found: dict[str, ast.expr] = {}
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        found[name] = value
    for keyword in call.keywords:
        if keyword.arg in function.parameters:
            assert keyword.arg is not None
            found[keyword.arg] = keyword.value
    return found


# ---------------------------------------------------------------- running code


@dataclass(frozen=True, eq=False)
class Located:
    """A loop in its source.

    Args:
        program: of the source file.
        function: the function that has the loop.
        loop: the loop; None where the function asks for batches outside of one.
    """

    program: Program
    function: Function
    loop: LoopNode | None


# A file is parsed once for all of its loops.
_MAX_PROGRAMS = 8


def program_of(code: CodeType, module_globals: dict[str, Any]) -> Program | None:
    """The program of a code object's file; None without a source, or with one that has changed."""
    lines = linecache.getlines(code.co_filename, module_globals)
    return _parsed("".join(lines)) if lines else None


@lru_cache(maxsize=_MAX_PROGRAMS)
def _parsed(source: str) -> Program | None:
    try:
        return Program.parse(source)
    except SyntaxError:
        return None


def function_of(program: Program, code: CodeType) -> Function | None:
    """The definition of a code object."""
    if code.co_name == "<module>":
        return program.module
    for function in program.functions.values():
        node = function.node
        if isinstance(node, ast.Module) or node.name != code.co_name:
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if code.co_firstlineno in (first, node.lineno):
            return function
    return None


def loop_at(function: Function, line: int) -> LoopNode | None:
    """The loop that runs a line: the one with the line in its head, or else around the line."""
    around: list[LoopNode] = []
    for node in function.own_nodes:
        if isinstance(node, LoopNode) and node.lineno <= line <= (node.end_lineno or line):
            around.append(node)
    heads = [each for each in around if line < each.body[0].lineno or each.lineno == line]
    found = heads or around
    return max(found, key=lambda each: each.lineno) if found else None
