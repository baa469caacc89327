"""Stores into items with a constant key, as ``extras["best"] = best``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from resumekit.analysis.program import Program, Scope, own_nodes


def stored_keys(program: Program) -> Iterator[tuple[str, str]]:
    """The path of the container and the key, for each such store in the program."""
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
