"""The loops and calls around a training loop, out to the function where a run begins."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from resumekit.analysis import calls
from resumekit.analysis.program import Program
from resumekit.analysis.roles import Roles
from resumekit.analysis.scopes import Function, LoopNode, Scope, children_of, own_nodes


def note_loaders(roles: Roles, chain: Iterable[ast.AST], program: Program) -> None:
    """What the loops iterate over is data: its position is in the checkpoint."""
    iterables = [each.iter for each in chain if isinstance(each, (ast.For, ast.AsyncFor))]
    lists = {path for each in program.functions.values() for path in _changed_lists(each)}
    for function in program.functions.values():
        scope = Scope(function)
        nodes = {id(each) for each in own_nodes(function.body)}
        for iterable in iterables:
            if id(iterable) not in nodes:
                continue
            for each in _iterated(iterable):
                path = scope.path(each)
                if path is not None and path not in lists:
                    roles.note_training(path)


def _changed_lists(function: Function) -> Iterator[str | None]:
    """The lists that a function makes longer, shorter or puts into another order."""
    scope = Scope(function)
    for node in own_nodes(function.body):
        changed = calls.changed_list(node) if isinstance(node, ast.Call) else None
        if changed is not None:
            yield scope.path(changed)


def _iterated(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        return [node]
    if calls.dotted(node.func) == "range":
        return []
    return [each for value in node.args for each in _iterated(value)]


def searched_chain(
    program: Program, function: Function, loop: LoopNode
) -> tuple[Function, Sequence[ast.AST]]:
    """The function that the analysis begins with, and the loops that a resume continues."""
    chain: list[ast.AST] = [loop, *_loops_around(function, loop)]
    seen = {function}
    root = function
    while True:
        callers = [
            (each, call)
            for each in program.functions.values()
            if each not in seen
            for call in _calls_of(program, each, root)
        ]
        if not callers or _makes_optimizer(root):
            return root, chain
        # A caller with the call in a loop is the one that trains in epochs.
        callers.sort(key=lambda pair: not _loops_around(*pair))
        root, call = callers[0]
        seen.add(root)
        chain += [call, *_loops_around(root, call)]


def _makes_optimizer(function: Function) -> bool:
    """Whether a run begins in the function: loops around it make several runs."""
    return any(
        isinstance(node, ast.Call) and "optim" in calls.dotted(node.func).lower()
        for each in own_nodes(function.body)
        if isinstance(each, ast.Assign)
        for node in ast.walk(each.value)
        if not function.owner and function.name
    )


def running_chain(
    program: Program,
    function: Function,
    loop: LoopNode,
    callers: Sequence[tuple[Function, int]],
) -> tuple[Function, Sequence[ast.AST]]:
    """The same from the functions that are running."""
    chain: list[ast.AST] = [loop, *_loops_around(function, loop)]
    root = function
    for caller, line in callers:
        if _makes_optimizer(root):
            return root, chain
        calls_here = [
            call
            for call in _calls_of(program, caller, root)
            if call.lineno <= line <= (call.end_lineno or line)
        ]
        if not calls_here:
            return root, chain
        root = caller
        chain += [calls_here[0], *_loops_around(caller, calls_here[0])]
    return root, chain


def _calls_of(program: Program, caller: Function, function: Function) -> list[ast.Call]:
    scope = Scope(caller)
    found = []
    for node in own_nodes(caller.body):
        if isinstance(node, ast.Call):
            called = program.called(node, scope)
            if called is not None and called[0] is function:
                found.append(node)
    return found


def _loops_around(function: Function, target: ast.AST) -> list[ast.AST]:
    """The loops of a function around a node, the innermost first."""
    found: list[ast.AST] = []

    def visit(node: ast.AST, loops: tuple[ast.AST, ...]) -> bool:
        if node is target:
            found.extend(reversed(loops))
            return True
        around = (*loops, node) if isinstance(node, LoopNode) else loops
        return any(visit(child, around) for child in children_of(node))

    any(visit(statement, ()) for statement in function.body)
    return found
