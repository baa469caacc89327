"""The source of a running function: its program, the function's definition and the loop."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from types import CodeType
from typing import Any

from resumekit.analysis.program import Program
from resumekit.analysis.scopes import Function, LoopNode, own_nodes


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


def program_of(code: CodeType, module_globals: dict[str, Any]) -> Program | None:
    """The program of a code object's file; None without a source, or with one that has changed."""
    lines = linecache.getlines(code.co_filename, module_globals)
    if not lines:
        return None
    try:
        return Program.parse("".join(lines))
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
    for node in own_nodes(function.body):
        if isinstance(node, LoopNode) and node.lineno <= line <= (node.end_lineno or line):
            around.append(node)
    heads = [each for each in around if line < each.body[0].lineno or each.lineno == line]
    found = heads or around
    return max(found, key=lambda each: each.lineno) if found else None
