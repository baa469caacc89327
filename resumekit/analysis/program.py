"""A parsed source file: its functions and classes, and which of them a call runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from resumekit.analysis.scopes import (
    LOCAL,
    Class,
    Function,
    FunctionNode,
    Scope,
    function_at,
    own_nodes,
)


@dataclass
class Program:
    """A parsed source file.

    Attributes:
        imported: module-level and local names that an import statement binds.
        flags: the paths of variables that hold the result of a comparison.
    """

    tree: ast.Module
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)
    _variable_classes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, source: str) -> Program:
        """The program of a source text.

        Raises:
            SyntaxError: it is not Python.
        """
        program = cls(ast.parse(source))
        program.functions[""] = function_at("", program.tree, None, None)
        program._collect(program.tree.body, "", program.functions[""], None)
        for node in ast.walk(program.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                program.imported.update((a.asname or a.name).split(".")[0] for a in node.names)
        program._find_variable_classes()
        return program

    @property
    def module(self) -> Function:
        """The file's own statements."""
        return self.functions[""]

    def _collect(
        self, body: list[ast.stmt], prefix: str, parent: Function | None, owner: str | None
    ) -> None:
        for node in _definitions(body):
            name = f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                self._collect(node.body, f"{name}.", None, name)
                methods = {
                    each.name: self.functions[f"{name}.{each.name}"]
                    for each in node.body
                    if isinstance(each, FunctionNode)
                }
                self.classes[name] = Class(name, methods, {}, self._is_module_class(node))
            else:
                enclosing = parent if parent and parent.name else None
                function = function_at(name, node, enclosing, owner)
                self.functions[name] = function
                self._collect(node.body, f"{name}.", function, None)

    def _is_module_class(self, node: ast.ClassDef) -> bool:
        for base in node.bases:
            text = ast.unparse(base)
            known = self.classes.get(text)
            if text.endswith("Module") or (known is not None and known.is_module):
                return True
        return False

    # ---------------------------------------------------------------- classes of variables

    def _find_variable_classes(self) -> None:
        for function in self.functions.values():
            scope = Scope(function)
            for node in own_nodes(function.body):
                if not isinstance(node, ast.Assign):
                    continue
                if isinstance(node.value, (ast.Compare, ast.BoolOp)):
                    self.flags.update(p for p in map(scope.path, node.targets) if p)
                if not isinstance(node.value, ast.Call):
                    continue
                made = _name_of(node.value.func)
                if made not in self.classes:
                    continue
                for target in node.targets:
                    self._note_class(scope, target, made)

    def _note_class(self, scope: Scope, target: ast.expr, made: str) -> None:
        function = scope.function
        is_attribute = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
        if is_attribute and function.owner in self.classes and function.parameters:
            assert isinstance(target, ast.Attribute)
            assert isinstance(target.value, ast.Name)
            if target.value.id == function.parameters[0]:
                classes = self.classes[function.owner].attribute_classes
                assert isinstance(classes, dict)
                classes[target.attr] = made
                return
        path = scope.path(target)
        if path is not None:
            self._variable_classes[path] = made

    def class_of(self, path: str) -> Class | None:
        """The class of this file that the object at a path is an instance of, if that is known."""
        if path in self._variable_classes:
            return self.classes[self._variable_classes[path]]
        base, _, attribute = path.rpartition(".") if LOCAL not in path else _split(path)
        if base:
            owner = self.class_of(base)
            made = owner and owner.attribute_classes.get(attribute)
            return self.classes.get(made) if made else None
        name, _, variable = path.rpartition(LOCAL)
        function = self.functions.get(name) if name else None
        if function is None or function.parameters[:1] != (variable,):
            return None
        return self.classes.get(function.owner or "")

    # ---------------------------------------------------------------- calls

    def called(self, call: ast.Call, scope: Scope) -> tuple[Function, str | None] | None:
        """The function of this file that a call runs, with the path of ``self`` for a method."""
        if isinstance(call.func, ast.Name):
            name = call.func.id
            enclosing: Function | None = scope.function
            while enclosing is not None:
                found = self.functions.get(f"{enclosing.name}.{name}")
                if found is not None and found.owner is None:
                    return found, None
                enclosing = enclosing.parent
            found = self.functions.get(name)
            if found is not None and scope.path_of(name) == name:
                return found, None
        if isinstance(call.func, ast.Attribute):
            base = scope.path(call.func.value)
            owner = None if base is None else self.class_of(base)
            if owner is not None and not (owner.is_module and call.func.attr == "forward"):
                method = owner.methods.get(call.func.attr)
                return None if method is None else (method, base)
        path = scope.path(call.func)
        owner = None if path is None else self.class_of(path)
        if owner is not None and not owner.is_module and "__call__" in owner.methods:
            return owner.methods["__call__"], path
        return None

    def enter(
        self, call: ast.Call, scope: Scope, function: Function, receiver: str | None
    ) -> tuple[Scope, dict[str, ast.expr]]:
        """The activation that a call makes.

        Returns:
            The scope, and the arguments that are copied into locals of the function, by the path of
            the local.
        """
        arguments = _arguments(call, function, has_receiver=receiver is not None)
        bindings: dict[str, str] = {}
        copied: dict[str, ast.expr] = {}
        if receiver is not None and function.parameters:
            bindings[function.parameters[0]] = receiver
        for name, value in arguments.items():
            path = scope.path(value)
            if path is not None and name not in function.assigned_parameters:
                bindings[name] = path
            else:
                copied[f"{function.name}{LOCAL}{name}"] = value
        parent = scope if function.parent is scope.function else None
        return Scope(function, tuple(sorted(bindings.items())), parent), copied


def stored_keys(program: Program) -> Iterator[tuple[str, str]]:
    """The path of the container and the key, for each store like ``extras["best"] = best``."""
    for function in program.functions.values():
        scope = Scope(function)
        for node in own_nodes(function.body):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                path = scope.path(node.value)
                key = node.slice
                if (
                    path is not None
                    and isinstance(key, ast.Constant)
                    and isinstance(key.value, str)
                ):
                    yield path, key.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                path = scope.path(node.func.value)
                if path is not None and node.func.attr == "update":
                    for keyword in node.keywords:
                        if keyword.arg is not None:
                            yield path, keyword.arg


def _arguments(call: ast.Call, function: Function, *, has_receiver: bool) -> dict[str, ast.expr]:
    names = [each for each in function.parameters if each not in function.keyword_only]
    if has_receiver:
        names = names[1:]
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


def _definitions(body: list[ast.stmt]) -> Iterator[FunctionNode | ast.ClassDef]:
    for node in own_nodes(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def _split(path: str) -> tuple[str, str, str]:
    """A path of a local without its last attribute; function names have dots as well."""
    function, _, variable = path.rpartition(LOCAL)
    base, dot, attribute = variable.rpartition(".")
    return (f"{function}{LOCAL}{base}" if base else ""), dot, attribute


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
