"""Functions of a source file, the paths of their variables, and questions about their syntax.

A variable is a *path*: ``x`` at module level, ``train@x`` for a local of ``train()``, and
``train@state.best`` for an attribute. A parameter that its function never assigns is replaced by
the path of the argument, so an attribute has one path in all functions that share the object.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from resumekit.analysis import calls

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode = ast.For | ast.AsyncFor | ast.While

LOCAL = "@"
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Class:
    """A class of the file: its methods, inherited ones too, and the classes of its attributes."""

    name: str
    bases: tuple[Class, ...]
    methods: Mapping[str, Function]
    attribute_classes: dict[str, str]
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
        parent: the function around it.
        owner: the class whose method it is.
    """

    name: str
    node: FunctionNode | ast.Module
    parent: Function | None = None
    owner: str | None = None

    @property
    def body(self) -> list[ast.stmt]:
        """The statements."""
        return self.node.body

    @cached_property
    def own_nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of its body, those of nested functions and classes excluded."""
        return tuple(own_nodes(self.body))

    def nodes_of(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of one kind among them."""
        return (each for each in self.own_nodes if isinstance(each, kind))

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters in order."""
        if isinstance(self.node, ast.Module):
            return ()
        given = self.node.args
        every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        return tuple(each.arg for each in every if each is not None)

    @cached_property
    def local_names(self) -> frozenset[str]:
        """What the function assigns, parameters excluded unless it assigns them."""
        names = {e.id for e in self.nodes_of(ast.Name) if not isinstance(e.ctx, ast.Load)}
        names.update(each.name for each in self.nodes_of(ast.ExceptHandler) if each.name)
        for node in self.own_nodes:
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                names.difference_update(node.names)
        return frozenset(names)

    @cached_property
    def returned(self) -> list[ast.expr]:
        """The values of its return statements."""
        return [each.value for each in self.nodes_of(ast.Return) if each.value is not None]

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

    @cached_property
    def receiver(self) -> str | None:
        """The name of ``self`` in a method."""
        has_none = "staticmethod" in self.decorators or not self.owner or not self.parameters
        return None if has_none else self.parameters[0]

    def local(self, name: str) -> str:
        """The path of a local."""
        return f"{self.name}{LOCAL}{name}"

    def has_local(self, path: str) -> bool:
        """Whether a path begins with a local."""
        return path.startswith(f"{self.name}{LOCAL}")

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
            return function.local(name)
        if self.parent is not None:
            return self.parent.path_of(name)
        if function.parent is not None:
            return Scope(function.parent).path_of(name)
        return name

    @property
    def receiver(self) -> str | None:
        """The path of ``self`` in a method."""
        name = self.function.receiver
        return None if name is None else self.path_of(name)

    def is_self(self, path: str | None) -> bool:
        """Whether a path is ``self`` of the method, or of the one around it."""
        function = self.function
        while function.parent is not None and not function.owner:
            function = function.parent
        return path is not None and path == Scope(function, self.bindings).receiver

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
        if not isinstance(node, FunctionNode | ast.ClassDef | ast.Lambda):
            stack.extend(reversed(children_of(node)))


def nodes_of(body: list[ast.stmt], kind: type[Node]) -> Iterator[Node]:
    """The nodes of one kind among ``own_nodes``."""
    return (each for each in own_nodes(body) if isinstance(each, kind))


# ---------------------------------------------------------------- paths

# A relevant path, and the conditions under which alone it is; None: under any.
Relevant = dict[str, frozenset[str] | None]


def joined(*many: Relevant) -> Relevant:
    """What is relevant in any of several successors."""
    result: Relevant = {}
    for each in many:
        for path, guards in each.items():
            known = result.get(path, frozenset())
            result[path] = None if guards is None or known is None else guards | known
    return result


def touches(path: str, other: str) -> bool:
    """Whether one path is the other, or an attribute of it."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def touches_any(path: str | None, paths: Iterable[str]) -> bool:
    """Whether a path touches one of several; what has no path touches none."""
    return path is not None and any(touches(path, each) for each in paths)


def without(relevant: Relevant, paths: set[str]) -> Relevant:
    """Without some paths."""
    return {path: guards for path, guards in relevant.items() if path not in paths}


def covers(path: str, other: str) -> bool:
    """Whether a store to the first path overwrites the second."""
    return other == path or other.startswith(f"{path}.")


def variable_of(path: str) -> str:
    """The variable that a path begins with."""
    return path.rpartition(LOCAL)[2].split(".")[0]


def root_of(path: str) -> str:
    """The path of the variable that a path begins with."""
    function, at, variable = path.rpartition(LOCAL)
    return f"{function}{at}{variable.partition('.')[0]}"


def prefixes(path: str) -> list[str]:
    """The variable that a path begins with, then each attribute on the way, and the path itself."""
    function, at, variable = path.rpartition(LOCAL)
    parts = variable.split(".")
    return [f"{function}{at}{'.'.join(parts[: i + 1])}" for i in range(len(parts))]


def drop_guards_on(path: str, relevant: Relevant) -> None:
    """A variable gets a new value: a condition that reads it is another one before that."""
    word = re.compile(rf"\b{re.escape(path.rpartition(LOCAL)[2].split('.')[-1])}\b")
    for each, guards in relevant.items():
        if guards is not None and any(map(word.search, guards)):
            relevant[each] = None


def negated(guard: str) -> str:
    """The condition of the other branch."""
    return guard[4:] if guard.startswith("not ") else f"not {guard}"


def excludes(guards: frozenset[str] | None, guard: str) -> bool:
    """Whether a path that is relevant under some conditions only is not under this one's branch."""
    return guards is not None and guards == frozenset({guard})


def under(then: Relevant, other: Relevant, guard: str) -> Relevant:
    """Both branches joined: what only the first makes relevant is so under its condition."""
    return joined(_only_under(guard, then, other), _only_under(negated(guard), other, then))


def _only_under(guard: str, branch: Relevant, other: Relevant) -> Relevant:
    mine = frozenset({guard})
    return {p: mine if g is None and p not in other else g for p, g in branch.items()}


# ---------------------------------------------------------------- syntax


def base_of(node: ast.expr) -> ast.expr:
    """What an element or a call's result is taken from: ``a.b`` of ``a.b[i].c()``, if possible."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute):
                return node
            node = node.func.value
        else:
            node = node.value
    return node


def target_names(target: ast.expr) -> list[ast.expr]:
    """The names, attributes and items that a target assigns."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for each in target.elts for name in target_names(each)]
    return target_names(target.value) if isinstance(target, ast.Starred) else [target]


def pairs_of(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What an assignment of tuples gives to each target."""
    many = (ast.Tuple, ast.List)
    if not (isinstance(target, many) and isinstance(value, many)):
        return [(target, value)]
    if len(target.elts) != len(value.elts):
        return [(target, value)]
    return list(zip(target.elts, value.elts, strict=True))


def compared_subject(test: ast.expr) -> str | None:
    """What a test compares with a constant; None for any other test."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant()]):
            return ast.unparse(left)
    return None


def is_exhaustive(node: ast.Match) -> bool:
    """Whether the last case takes everything."""
    last = node.cases[-1]
    return isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and not last.guard


def stored_names(body: list[ast.stmt], scope: Scope) -> set[str]:
    """The variables that statements assign."""
    names = nodes_of(body, ast.Name)
    return {scope.path_of(each.id) for each in names if isinstance(each.ctx, ast.Store)}


def derived_names(body: list[ast.stmt], indices: frozenset[str], scope: Scope) -> frozenset[str]:
    """The variables that a loop computes from its index."""
    found: set[str] = set()
    for node in nodes_of(body, ast.Assign):
        names = [each for each in ast.walk(node.value) if isinstance(each, ast.Name)]
        if any(scope.path_of(each.id) in indices | found for each in names):
            found.update(p for p in map(scope.path, node.targets) if p)
    return frozenset(found)


def disables_gradients(text: str) -> bool:
    """Whether a decorator or a context manager does so."""
    return "no_grad" in text or "inference_mode" in text


def counts(node: ast.expr) -> bool:
    """Whether a loop goes over numbers: a resume continues it at the number it was at."""
    if not isinstance(node, ast.Call):
        return False
    name = calls.method(node)
    if name in ("enumerate", "tqdm") and node.args:
        return counts(node.args[0])
    return name in ("range", "trange", "count")


def iterates_parameters(node: ast.expr) -> bool:
    """Whether a loop goes over the parameters or parts of a model."""
    return any(
        isinstance(each, ast.Attribute)
        and each.attr in ("parameters", "named_parameters", "param_groups", "modules", "buffers")
        for each in ast.walk(node)
    )
