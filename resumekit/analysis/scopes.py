"""Functions of a source file, and the paths of their variables.

A variable is a *path*: ``x`` at module level, ``train@x`` for a local of ``train()``, and
``train@state.best`` for an attribute. A parameter that its function never assigns is replaced by
the path of the argument, so an attribute has one path in all functions that share the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode = ast.For | ast.AsyncFor | ast.While

LOCAL = "@"


@dataclass(frozen=True)
class Class:
    """A class of the file: its methods, inherited ones too, and the classes of its attributes."""

    name: str
    bases: tuple[Class, ...]
    methods: Mapping[str, Function]
    attribute_classes: Mapping[str, str]
    is_module: bool

    def class_of_attribute(self, name: str) -> str | None:
        """The name of the class of an attribute, if the class or a base makes it."""
        made = self.attribute_classes.get(name)
        for base in self.bases:
            made = made or base.class_of_attribute(name)
        return made


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method of the file; the file itself is the function ``""``.

    Attributes:
        name: the qualified name.
        node: its definition.
        parameters: their names in order.
        local_names: what the function assigns, parameters excluded unless it assigns them.
        assigned_parameters: the parameters that the function assigns.
        parent: the function around it.
        owner: the class whose method it is.
    """

    name: str
    node: FunctionNode | ast.Module
    parameters: tuple[str, ...]
    local_names: frozenset[str]
    assigned_parameters: frozenset[str]
    parent: Function | None = None
    owner: str | None = None

    @property
    def body(self) -> list[ast.stmt]:
        """The statements."""
        return self.node.body

    @cached_property
    def keyword_only(self) -> frozenset[str]:
        """The parameters that are passed by keyword only."""
        if isinstance(self.node, ast.Module):
            return frozenset()
        return frozenset(each.arg for each in self.node.args.kwonlyargs)

    @cached_property
    def decorators(self) -> frozenset[str]:
        """The names of its decorators."""
        if isinstance(self.node, ast.Module):
            return frozenset()
        return frozenset(map(ast.unparse, self.node.decorator_list))

    @property
    def is_static(self) -> bool:
        """Whether it is a method without ``self``."""
        return "staticmethod" in self.decorators

    @property
    def is_property(self) -> bool:
        """Whether reading an attribute calls it."""
        return bool(self.decorators & {"property", "cached_property", "functools.cached_property"})

    @cached_property
    def is_abstract(self) -> bool:
        """Whether subclasses define what it does."""
        if any(each.rpartition(".")[2].startswith("abstract") for each in self.decorators):
            return True
        return all(map(_does_nothing, self.body))


@dataclass(frozen=True)
class Scope:
    """One activation of a function: which path each parameter stands for."""

    function: Function
    bindings: tuple[tuple[str, str], ...] = ()
    parent: Scope | None = None

    @cached_property
    def _bound(self) -> dict[str, str]:
        return dict(self.bindings)

    def path_of(self, name: str) -> str:
        """The path of a name that is used in this activation."""
        function = self.function
        if name in self._bound:
            return self._bound[name]
        if isinstance(function.node, ast.Module):
            return name
        if name in function.local_names or name in function.parameters:
            return f"{function.name}{LOCAL}{name}"
        if self.parent is not None:
            return self.parent.path_of(name)
        if function.parent is not None:
            return Scope(function.parent).path_of(name)
        return name

    @property
    def receiver(self) -> str | None:
        """The path of ``self`` in a method."""
        function = self.function
        if not function.owner or not function.parameters or function.is_static:
            return None
        return self.path_of(function.parameters[0])

    def path(self, node: ast.AST) -> str | None:
        """The path of a name or of an attribute of one; None for any other expression."""
        if isinstance(node, ast.Name):
            return self.path_of(node.id)
        if isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None


def _does_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Pass, ast.Raise))


def children_of(node: ast.AST) -> tuple[ast.AST, ...]:
    """The direct children of a node, kept in the node: the analysis visits it many times."""
    kept = node.__dict__
    if "_children" not in kept:
        kept["_children"] = tuple(ast.iter_child_nodes(node))
    children: tuple[ast.AST, ...] = kept["_children"]
    return children


def own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes of a body, those of nested functions and classes excluded."""
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*FunctionNode.__args__, ast.ClassDef, ast.Lambda)):
            stack.extend(reversed(children_of(node)))


def function_at(
    name: str, node: FunctionNode | ast.Module, parent: Function | None, owner: str | None
) -> Function:
    """The function that a definition makes."""
    outer: set[str] = set()
    stored: set[str] = set()
    for each in own_nodes(node.body):
        if isinstance(each, (ast.Global, ast.Nonlocal)):
            outer.update(each.names)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            stored.add(each.id)
        elif isinstance(each, ast.ExceptHandler) and each.name:
            stored.add(each.name)
    parameters: tuple[str, ...] = ()
    if not isinstance(node, ast.Module):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        every += [each for each in (given.vararg, given.kwarg) if each is not None]
        parameters = tuple(each.arg for each in every)
    return Function(
        name,
        node,
        parameters,
        frozenset(stored - outer),
        frozenset(stored & set(parameters)),
        parent,
        owner,
    )
