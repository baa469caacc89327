"""Questions about statements and expressions that their syntax answers."""

from __future__ import annotations

import ast

from resumekit.analysis import calls
from resumekit.analysis.scopes import Function, FunctionNode, Scope, own_nodes


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
    return [target]


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
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return None
    is_constant = isinstance(test.comparators[0], ast.Constant)
    return ast.unparse(test.left) if is_constant and len(test.ops) == 1 else None


def returned_values(node: ast.Return, *, in_parts: bool) -> list[ast.expr]:
    """What a return gives; in parts, the elements of a tuple each."""
    if node.value is None:
        return []
    if in_parts and isinstance(node.value, ast.Tuple):
        return list(node.value.elts)
    return [node.value]


def is_exhaustive(node: ast.Match) -> bool:
    """Whether the last case takes everything."""
    last = node.cases[-1]
    return isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and not last.guard


def stored_names(body: list[ast.stmt], scope: Scope) -> set[str]:
    """The variables that statements assign."""
    names = (each for each in own_nodes(body) if isinstance(each, ast.Name))
    return {scope.path_of(each.id) for each in names if isinstance(each.ctx, ast.Store)}


def derived_names(body: list[ast.stmt], indices: frozenset[str], scope: Scope) -> frozenset[str]:
    """The variables that a loop computes from its index."""
    found: set[str] = set()
    for node in own_nodes(body):
        if isinstance(node, ast.Assign):
            names = [each for each in ast.walk(node.value) if isinstance(each, ast.Name)]
            if any(scope.path_of(each.id) in indices | found for each in names):
                found.update(p for p in map(scope.path, node.targets) if p)
    return frozenset(found)


def is_without_gradients(function: Function) -> bool:
    """Whether a decorator switches gradients off."""
    if not isinstance(function.node, FunctionNode):
        return False
    return any(
        "no_grad" in text or "inference_mode" in text
        for text in map(ast.unparse, function.node.decorator_list)
    )


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
